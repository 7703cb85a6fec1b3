"""The zygote starts shims that equal those of a fresh interpreter, even if the zygote or its agent fails."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agent import shim, tasks, zygote, zygote_client
from agent.processes import ProcessIdentity
from agent.tasks import RunFolder, TaskState
from agent.zygote_client import start_shim
from tests.agent.harness import (
    ended,
    process_name,
    processes_of,
    python,
    run_folder,
    run_of,
    task_launch,
    until,
    zygotes,
)
from tests.depth import few

AGENT = """
import sys
from pathlib import Path
from agent import tasks
from tests.agent.harness import run_folder, task_launch
run = run_folder(Path(sys.argv[1]))
tasks.start(run, task_launch(run, "/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; exit 7"))
print("started", flush=True)
sys.stdin.read()
"""
"""Program that starts a task like an agent and then waits."""


@pytest.fixture(autouse=True)
def a_zygote_of_its_own() -> None:
    """Ends the current zygote, so that each test has its own."""
    if zygote_client._starter._zygote is not None:
        zygote_client._starter._zygote.end()
    zygote_client._forget()


def the_zygote(of: int | None = None) -> ProcessIdentity:
    (pid,) = until(lambda: zygotes(of))
    return ProcessIdentity.of(pid)


def start_one(root: Path, job: str, *argv: str) -> RunFolder:
    run = run_folder(root, job)
    tasks.start(run, task_launch(run, *argv))
    return run


def status_of(pid: int) -> dict[str, str]:
    lines = (line.partition(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: value for name, _, value in lines}


def shim_of(run: RunFolder) -> ProcessIdentity:
    identities = run.identities()
    assert identities is not None
    return identities[0]


def test_tasks_outlive_a_killed_zygote(tmp_path: Path) -> None:
    """When the zygote is killed, its tasks run to their end with their exit codes; the next start creates another."""
    first = start_one(tmp_path, "first", "/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.05; done; exit 7")
    killed = the_zygote()
    assert killed.send(signal.SIGKILL)
    until(lambda: not killed.alive())
    second = start_one(tmp_path, "second", "true")
    assert ended(second).exit_code == 0
    assert the_zygote() != killed
    assert tasks.inspect(first) is TaskState.RUNNING
    (first.work / "go").touch()
    assert ended(first).exit_code == 7


def test_a_zygote_that_is_stopped_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start requests that a halted zygote does not answer are handled by the next zygote, and each task starts once."""
    monkeypatch.setattr(zygote_client, "_ANSWER_S", (0.3, 30.0, 30.0))
    ended(start_one(tmp_path, "first", "true"))
    stopped = the_zygote()
    assert stopped.send(signal.SIGSTOP)
    runs = [run_folder(tmp_path, f"r{number}") for number in range(5)]
    starters = [
        threading.Thread(target=tasks.start, args=(run, python(run, "open('starts', 'a').write('x')"))) for run in runs
    ]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert all(ended(run).exit_code == 0 for run in runs)
    until(lambda: not stopped.alive())
    assert len(zygotes()) == 1
    assert [(run.work / "starts").read_text() for run in runs] == ["x"] * 5


def test_a_zygote_that_dies_of_every_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no zygote ever responds, the start fails with an error that says so, and can be tried again."""
    run = run_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(zygote_client, "command", lambda: ["/bin/true"])
        with pytest.raises(tasks.NotStarted, match="3 zygotes did not respond"):
            tasks.start(run, task_launch(run, "true"))
    assert tasks.inspect(run) is TaskState.ABSENT
    tasks.start(run, task_launch(run, "true"))
    assert ended(run).exit_code == 0


def test_a_shim_that_nobody_waits_for_starts_nothing(tmp_path: Path) -> None:
    """If an agent dies or gives up before it sends the launch, the shim exits, and the run can be started later."""
    run = run_folder(tmp_path)
    ended(start_one(tmp_path, "first", "true"))
    current = zygote_client._starter._zygote
    assert current is not None
    theirs, giving = os.pipe()
    report, reporting = os.pipe()
    with (run.path / "shim.log").open("ab") as log:
        os.close(giving)
        os.close(report)
        assert current.ask(zygote.PLAIN + os.fsencode(run.path), [theirs, reporting, log.fileno()])
    os.close(theirs)
    os.close(reporting)
    tasks.start(run, python(run, "open('starts', 'a').write('x')"))
    ended(run)
    until(lambda: processes_of(tmp_path) == [])
    assert (run.work / "starts").read_text() == "x"
    assert (run.path / "shim.log").read_text() == ""


@pytest.mark.parametrize("stopped", few([True, False], 1))
def test_a_zygote_ends_with_its_agent_and_its_shims_do_not(tmp_path: Path, stopped: bool) -> None:
    """After kill -9 of an agent's process group, its zygote ends, even if it was halted; the agent's task continues."""
    root = Path(tasks.__file__).parents[1]
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(tmp_path)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert agent.stdout is not None and agent.stdout.readline() == b"started\n"
        of_agent = the_zygote(agent.pid)
        if stopped:
            of_agent.send(signal.SIGSTOP)
    finally:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.communicate()
    until(lambda: not of_agent.alive())
    run = run_of(tmp_path)
    assert tasks.inspect(run) is TaskState.RUNNING
    (run.work / "go").touch()
    assert ended(run).exit_code == 7


@pytest.mark.rotating
def test_an_agent_leaves_no_socket_open(tmp_path: Path) -> None:
    """An agent that ends, and a process that it forks, close the socket of the zygote."""
    forks = "import os\nif (pid := os.fork()) == 0: os._exit(0)\nos.waitpid(pid, 0)\n"
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", AGENT + forks, str(tmp_path)]
    agent = subprocess.run(command, cwd=Path(tasks.__file__).parents[1], input=b"", capture_output=True, check=True)
    (run_of(tmp_path).work / "go").touch()
    assert ended(run_of(tmp_path)).exit_code == 7
    assert agent.stderr == b""


def test_a_zygote_keeps_nothing(tmp_path: Path) -> None:
    """After many concurrent starts, the zygote has no extra descriptor, no zombie, and no task's secret in memory."""
    secret = "zq" + os.urandom(16).hex()
    ended(start_one(tmp_path, "first", "true"))
    pid = the_zygote().pid
    before = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208

    def start(number: int) -> None:
        run = run_folder(tmp_path, f"r{number}")
        launch = task_launch(run, "/bin/sh", "-c", f"test $SECRET = {secret}")
        tasks.start(run, tasks.TaskLaunch(**{**launch.__dict__, "env": {**launch.env, "SECRET": secret}}))
        assert ended(run).exit_code == 0

    starters = [threading.Thread(target=start, args=(number,)) for number in range(20)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    until(lambda: shim.descendants({pid}) == set())
    assert the_zygote().pid == pid
    assert len(os.listdir(f"/proc/{pid}/fd")) == before  # noqa: PTH208
    found = 0
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory, open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            span, rights = line.split()[:2]
            if rights.startswith("rw"):
                first, last = (int(part, 16) for part in span.split("-"))
                memory.seek(first)
                text = memory.read(last - first)
                found += b"mizzen zygote" in text
                assert secret.encode() not in text
    assert found, "the zygote's memory was not read"


def test_a_shim_is_like_that_of_a_fresh_interpreter(tmp_path: Path) -> None:
    """A shim has its own session, no environment, `/` as folder, the agent's umask and niceness, and no agent files."""
    before = os.umask(0o027)
    try:
        run = start_one(tmp_path, "main", "sleep", "600")
    finally:
        os.umask(before)
    me, pid = status_of(os.getpid()), shim_of(run).pid
    status = status_of(pid)
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert Path(f"/proc/{pid}/environ").read_bytes() == b""
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    assert status["Umask"] == "0027"
    assert status["Threads"] == "1"
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == Path("/proc/self/oom_score_adj").read_text()
    assert Path(f"/proc/{pid}/cgroup").read_text() == Path("/proc/self/cgroup").read_text()
    assert status["Uid"] == me["Uid"]
    blocked = {signal.SIGCHLD, signal.SIGTERM}
    # The kernel does not show a signal as blocked while a process waits for it.
    assert int(status["SigBlk"], 16) in (0, sum(1 << number - 1 for number in blocked))
    # The two signals that Python itself ignores, and the two that the shim ignores.
    ignored = {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP}
    # Signals 32 and 33 are reserved by the C library: no process can set them, and the test may inherit any value.
    settable = sum(1 << number - 1 for number in signal.valid_signals())
    assert int(status["SigIgn"], 16) & settable == sum(1 << number - 1 for number in ignored)
    assert int(status["SigCgt"], 16) == 0
    links = {entry.name: str(entry.readlink()) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    assert sorted(links.values()) == [
        "/dev/null",
        "/dev/null",
        str(run.path / shim.LOCK_FILE),
        str(run.path / "shim.log"),
    ]
    assert links["2"] == str(run.path / "shim.log")
    tasks.request_stop(run, 0, told=True)
    ended(run)


def test_a_list_of_processes_says_whose_shim_it_is(tmp_path: Path) -> None:
    """A shim's command line names its run folder (the end of a long path); a zygote's names its agent."""
    folder = tmp_path.joinpath(*["long" * 50] * 6)
    for root in (tmp_path, folder):
        run = start_one(root, "main", "sleep", "600")
        command = Path(f"/proc/{shim_of(run).pid}/cmdline").read_bytes().rstrip(b"\0")
        wanted = b"mizzen shim " + os.fsencode(run.path)
        assert command == (wanted if root == tmp_path else wanted[-len(command) :])
        assert len(command) > 500 or root == tmp_path
        assert process_name(shim_of(run).pid) == "mizzen-shim"
        tasks.request_stop(run, 0, told=True)
        ended(run)
    command = Path(f"/proc/{the_zygote().pid}/cmdline").read_bytes().rstrip(b"\0")
    assert command == f"mizzen zygote of agent {os.getpid()}".encode()


def test_a_fork_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system cannot fork another process, the error number and the reason are passed to the agent."""

    def refuse() -> int:
        raise OSError(errno.EAGAIN, "no more processes")

    report, reporting = os.pipe()
    with (tmp_path / "shim.log").open("ab") as log, monkeypatch.context() as patch:
        patch.setattr(os, "fork", refuse)
        zygote._fork(str(tmp_path), [-1, reporting, log.fileno()], (0, 0))
    os.close(reporting)
    with open(report, "rb") as file:
        assert file.read() == str(errno.EAGAIN).encode()
    assert "no more processes" in (tmp_path / "shim.log").read_text()


def test_a_large_launch(tmp_path: Path) -> None:
    """A launch description that is larger than a pipe's buffer arrives completely."""
    run = run_folder(tmp_path)
    values = {f"V{number}": "x" * 100_000 for number in range(5)}
    launch = task_launch(run, "/bin/sh", "-c", 'test "${#V0}${#V4}" = 100000100000')
    tasks.start(run, tasks.TaskLaunch(**{**launch.__dict__, "env": {**launch.env, **values}}))
    assert ended(run).exit_code == 0


def test_a_forked_process_has_a_zygote_of_its_own(tmp_path: Path) -> None:
    """A forked process starts its own zygote and does not use its parent's, which may exit at any time."""
    ended(start_one(tmp_path, "first", "true"))
    run = run_folder(tmp_path, "second")
    report, reporting = os.pipe()
    pid = os.fork()
    if pid == 0:
        with (run.path / "shim.log").open("ab") as log:
            code = start_shim(
                run.path, json.dumps(task_launch(run, "true").to_json()).encode(), log.fileno(), sandboxed=False
            )
        os.write(reporting, f"{code} {len(zygotes())}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(reporting)
    with open(report, "rb") as file:
        assert file.read() == b"0 1"
    assert ended(run).exit_code == 0
