"""The `mizzen` command as a process: interrupts, pipes and terminals."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select, update

from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from infra.config.services import LimitSettings
from infra.db.logs import Outbox, Waiting
from infra.db.models import Workload
from infra.db.session import transaction
from mizzen_client import Client
from mizzen_client.contexts import Context, Contexts, save_contexts
from tests.cli.service import DOCUMENT, DONE, Service, serving

MIZZEN = [sys.executable, "-m", "mizzen.cli.main"]
TIMEOUT_S = 30

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Returns a function that starts `mizzen` for the API of a service; the process is killed after the test."""
    with ExitStack() as stack:

        def begin(service: Service, *arguments: str) -> subprocess.Popen[str]:
            environment = {**os.environ, "MIZZEN_API": service.url, "MIZZEN_API_KEY": service.keys["vision"]}
            process = subprocess.Popen(
                [*MIZZEN, *arguments],
                env=environment,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield begin


def unharmed(service: Service, id_: str) -> bool:
    """Returns whether the workload runs and has no request to end it."""
    with transaction(service.engine) as session:
        mail = session.scalars(select(Outbox.kind).where(Outbox.workload == id_)).all()
        return session.get_one(Workload, id_).phase == "running" and not list(mail)


@pytest.fixture
def running(service: Service, client: Client) -> str:
    """Returns the id of a running workload with one line of log."""
    id_ = client.submit(DOCUMENT)["id"]
    service.place(id_)
    service.write_log(id_, "hello\n")
    return id_


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (["logs", "-f"], "continues; `mizzen logs -f {id}`"),
        (["events", "-f"], "`mizzen events -f {id} --after "),
        (["wait"], "`mizzen wait {id}`"),
    ],
)
def test_ctrl_c_ends_the_following_and_not_the_workload(
    start: Start, service: Service, running: str, command: list[str], hint: str
) -> None:
    """At SIGINT the command exits with 130 and prints how to resume; the workload continues."""
    process = start(service, *command, running)
    stream = process.stderr if command == ["wait"] else process.stdout
    assert stream is not None and stream.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert hint.format(id=running) in err and "Traceback" not in err
    assert unharmed(service, running)


def test_ctrl_c_on_submit_follow_leaves_the_workload_running(start: Start, service: Service, tmp_path: Path) -> None:
    """`submit --follow` prints the id on stderr; after SIGINT the workload continues."""
    file = tmp_path / "a.json"
    file.write_text(json.dumps(DOCUMENT))
    process = start(service, "submit", str(file), "--follow")
    assert process.stdout is not None and process.stderr is not None
    id_ = process.stderr.readline().split()[-1]
    service.place(id_)
    service.write_log(id_, "hello\n")
    assert process.stdout.readline() == "train/0| hello\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130 and f"`mizzen cancel {id_}` stops it" in err
    assert unharmed(service, id_)


@pytest.mark.rotating
def test_who_follows_reads_why_the_workload_waits(start: Start, service: Service, client: Client) -> None:
    """A new reason is printed once. The lines of the log follow after the start."""
    id_ = client.submit(DOCUMENT)["id"]
    process = start(service, "logs", "-f", id_)
    assert process.stdout is not None and process.stderr is not None
    assert process.stderr.readline() == f"mizzen: {id_} is pending: waits for the next scan of the queue\n"
    reason = Reason(ReasonCode.ISOLATION_TOO_WEAK, {"machines": "m", "region": "north"})
    with transaction(service.engine) as session:
        session.add(Waiting(workload=id_, reasons={"reasons": [reason.to_json()]}))
    line = process.stderr.readline()
    assert line.startswith(f"mizzen: {id_} is pending") and line.endswith(f"{reason.sentence}\n"), line
    service.place(id_)
    service.write_log(id_, "hello\n")
    assert process.stdout.readline() == "train/0| hello\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=TIMEOUT_S)[1].count("is pending") == 0


@pytest.mark.parametrize(("phase", "code"), [(Phase.SUCCEEDED, 0), (Phase.FAILED, 1)])
def test_submit_wait_ends_with_the_workload(
    start: Start, service: Service, tmp_path: Path, phase: Phase, code: int
) -> None:
    """`submit --wait` exits with 0 if the workload succeeded, and with 1 if it failed; stdout has the final state."""
    file = tmp_path / "a.json"
    file.write_text(json.dumps(DOCUMENT))
    process = start(service, "submit", str(file), "--wait", "-o", "name")
    assert process.stderr is not None
    id_ = process.stderr.readline().split()[-1]
    service.become(id_, phase, 0, DONE)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (code, f"{id_}\n")


def test_a_reader_that_goes_away_is_no_error(start: Start, service: Service, running: str) -> None:
    """If stdout is closed, as by `| head`, the command exits with 141 and prints no error."""
    for arguments in (["events"], ["ls"], ["logs", running]):
        process = start(service, *arguments)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.wait(TIMEOUT_S), process.stderr.read()) == (141, "")
        process.stderr.close()


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("ls >/dev/full", 6, "No space left on device"),
        ("ls -o json >/dev/full", 6, "No space left on device"),
        ("checkpoint ls none -o json >/dev/full", 3, "not a checkpoint root"),
        ("cadence --mtbf 3h --save 30s --step 2s >/dev/full", 6, "No space left on device"),
        ("ls >&-", 0, ""),
        ("cadence --mtbf 3h --save 30s --step 2s >&- 2>&-", 0, ""),
        ("submit - <&-", 2, "contains no document"),
        ("submit /dev/zero", 2, "/dev/zero: has more than 16 MiB"),
        ("login $MIZZEN_API --key $MIZZEN_API_KEY", 2, "/proc/mizzen/config.yaml: No such file or directory: set"),
    ],
)
def test_output_that_cannot_be_written_is_one_line(service: Service, line: str, code: int, said: str) -> None:
    """A full disk, closed standard streams, an unwritable home and a file without end are no internal errors."""
    done = subprocess.run(
        ["bash", "-c", f"{' '.join(MIZZEN)} {line}"],
        env={
            **os.environ,
            "MIZZEN_API": service.url,
            "MIZZEN_API_KEY": service.keys["vision"],
            "XDG_CONFIG_HOME": "/proc",
        },
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert said in done.stderr and len(done.stderr.splitlines()) <= 1


@pytest.mark.rotating
@pytest.mark.parametrize("command", ["init --region east=file:///b", "adopt", "worker --role control", "backup f"])
def test_a_database_that_does_not_answer_is_one_line(tmp_path: Path, command: str) -> None:
    """Commands of operators name the database, without its password, and exit with 6."""
    url = "postgresql://u:secret@127.0.0.1:1/x"
    done = subprocess.run([*MIZZEN, *command.split(), "--database", url], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 6 and "secret" not in done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("mizzen: ")]
    assert 'database: connection failed: connection to server at "127.0.0.1", port 1 failed' in line
    assert "Traceback" not in done.stderr


def test_piped_output_is_plain_and_whole(service: Service, client: Client) -> None:
    """Without a terminal the output has no escape sequences and is not truncated, for any value of COLUMNS."""
    name = "n" * 60
    client.submit({**DOCUMENT, "name": name})
    environment = {**os.environ, "MIZZEN_API": service.url, "MIZZEN_API_KEY": service.keys["vision"], "COLUMNS": "30"}
    done = subprocess.run(
        [*MIZZEN, "ls", "--limit", "0"], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert name in done.stdout and "\x1b" not in done.stdout and done.stderr == ""


def at_terminal(service: Service, columns: int, *command: str, **environment: str) -> str:
    """Runs a command (default: `ls`) at a terminal of this width; returns its output."""
    near, far = pty.openpty()
    fcntl.ioctl(far, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [*MIZZEN, *(command or ["ls"])],
        env={**unset, "MIZZEN_API": service.url, "MIZZEN_API_KEY": service.keys["vision"], **environment},
        stdout=far,
        stderr=subprocess.DEVNULL,
    )
    os.close(far)
    out = b""
    try:
        while chunk := os.read(near, 4096):
            out += chunk
    except OSError:  # The process has closed the terminal.
        pass
    os.close(near)
    assert process.wait(TIMEOUT_S) == 0
    return out.decode()


def test_tables_fit_the_terminal(service: Service, running: str) -> None:
    """On a narrow terminal lines fit and ids are not truncated; phases have colours unless NO_COLOR is set."""
    coloured = at_terminal(service, 50, "ls", "--name", "digits")
    plain = at_terminal(service, 50, "ls", "--name", "digits", NO_COLOR="1")
    assert "\x1b[32mrunning" in coloured and "\x1b" not in plain
    lines = plain.splitlines()
    assert running in plain and all(len(line) <= 50 for line in lines)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()[0] == lines[0]


def test_logs_cannot_command_a_terminal(service: Service, client: Client) -> None:
    """On a terminal, control characters of a log are escaped; a pipe gets the original bytes."""
    id_ = client.submit({**DOCUMENT, "name": "hostile"})["id"]
    service.place(id_)
    line = "\x1b]0;owned\x07\x1b[2J\x9b1m\u202eten\t%\r"
    service.write_log(id_, f"{line}\n", end=True)
    shown = at_terminal(service, 80, "logs", id_, "--task", "0")
    assert shown.splitlines()[0] == "^[]0;owned^G^[[2J<9b>1m<202e>ten\t%"
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\u202e"}
    environment = {**os.environ, "MIZZEN_API": service.url, "MIZZEN_API_KEY": service.keys["vision"]}
    command = [*MIZZEN, "logs", id_, "--task", "0"]
    piped = subprocess.run(command, env=environment, capture_output=True, timeout=TIMEOUT_S)
    assert piped.stdout == f"{line}\n".encode()


@pytest.mark.rotating
def test_bash_completes_ids_names_and_contexts(service: Service, running: str) -> None:
    """Completion reads names from the API; if the API is down, it offers nothing and prints no error."""

    def completed(words: str, api: str) -> list[str]:
        environment = {
            **os.environ,
            "MIZZEN_API": api,
            "MIZZEN_API_KEY": service.keys["vision"],
            "_MIZZEN_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        done = subprocess.run(MIZZEN, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.stderr == ""
        return done.stdout.split()

    assert f"plain,{running}" in completed("mizzen show wl-", service.url)
    assert completed("mizzen logs -f di", service.url) == ["plain,digits"]
    assert completed("mizzen show wl-", "http://127.0.0.1:9") == []
    assert completed("mizzen ls --name di", service.url) == ["plain,digits"]
    assert completed("mizzen submit --after di", service.url) == ["plain,digits"]
    assert completed("mizzen machines cordon no", service.url) == ["plain,north/alpha/m1"]
    assert completed("mizzen regions set n", service.url) == ["plain,north"]
    assert completed("mizzen tenants set v", service.url) == ["plain,vision"]
    assert completed("mizzen ls --tenant v", service.url) == ["plain,vision"]
    assert completed("mizzen ls --phase r", service.url) == ["plain,running"]
    assert completed("mizzen tables rm x", service.url) == []
    assert completed("mizzen machines un", service.url) == ["plain,uncordon", "plain,undrain"]
    save_contexts(Contexts("lab", {"lab": Context(service.url)}))
    assert completed("mizzen contexts use l", "") == ["plain,lab"]


@pytest.fixture
def narrow(service: Service) -> Iterator[Service]:
    """Yields an API that allows two queued workloads for each tenant."""
    folder = service.folder / uuid.uuid4().hex
    folder.mkdir()
    limits = LimitSettings(queued_per_tenant=2, full_queue_retry_s=1)
    settings = service.settings.model_copy(update={"limits": limits})
    with transaction(service.engine) as session:
        session.execute(update(Workload).where(Workload.finished_at.is_(None)).values(phase="running"))
    with serving(settings) as port:
        yield replace(service, settings=settings, port=port)


def sweep(tmp_path: Path, name: str) -> str:
    """Writes a file with four documents; returns its path."""
    file = tmp_path / "sweep.yaml"
    file.write_text("\n---\n".join(json.dumps({**DOCUMENT, "name": f"{name}-{n}"}) for n in range(4)))
    return str(file)


def submitted(service: Service, name: str) -> list[str]:
    """Returns the ids of a sweep's workloads in the order of submission."""
    with transaction(service.engine) as session:
        found = select(Workload.id).where(Workload.name.startswith(f"{name}-")).order_by(Workload.name)
        return list(session.scalars(found))


def test_a_sweep_waits_for_room_in_the_queue(start: Start, narrow: Service, tmp_path: Path) -> None:
    """If the queue has room for two of four workloads, the command waits, and submits the rest when they started."""
    process = start(narrow, "submit", "--patience", "1", sweep(tmp_path, "waits"))
    assert process.stderr is not None
    said = process.stderr.readline()
    assert "tenant vision has 2 workloads in the queue" in said and re.search(r"trying for (1d|23h 59m) more", said)
    time.sleep(1.5)  # Longer than `--patience`, which applies only to an API that does not respond.
    for id_ in submitted(narrow, "waits"):
        narrow.become(id_, Phase.RUNNING)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out.split()) == (0, submitted(narrow, "waits"))
    assert len(out.split()) == 4


def test_ctrl_c_while_waiting_for_room_tells_what_was_submitted(start: Start, narrow: Service, tmp_path: Path) -> None:
    """At SIGINT the ids of the submitted workloads are printed. With `--wait-for-room 0` the exit code is 6."""
    file = sweep(tmp_path, "cut")
    process = start(narrow, "submit", file)
    assert process.stderr is not None and "has 2 workloads" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out.split()) == (130, submitted(narrow, "cut"))
    assert "2 of 4 documents submitted" in err and "Traceback" not in err
    process = start(narrow, "submit", "--wait-for-room", "0", file)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 6
