"""`mizzen run` and `mizzen retry` on a running stack: output, exit status, files, and Ctrl-C."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.stack.harness import Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
_COMMAND = Path(sys.executable).parent / "mizzen"


def mizzen(stack: Up, folder: Path, *arguments: str, **more: object) -> subprocess.Popen[str]:
    """Starts a command of the client in a folder."""
    environ = {**os.environ, "MIZZEN_API": stack.client().url, "MIZZEN_API_KEY": _key(stack)}
    return subprocess.Popen(
        [_COMMAND, *arguments], cwd=folder, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        **more,
    )  # fmt: skip


def _key(stack: Up) -> str:
    return (stack.data / "operator.key").read_text().strip()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Waits for the end of a command; returns its status and its output."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def _submitted(errors: Sequence[str]) -> str:
    return next(line.rpartition(" as ")[2] for line in errors if " as wl-" in line).strip()


def test_a_command_runs_with_the_files_of_the_folder(shared: Up, tmp_path: Path) -> None:
    """Its output goes to stdout, its variables and files arrive, and the status of the command is that of the task."""
    (tmp_path / "data.txt").write_text("from here\n")
    options = ("--tenant", "t", "--tasks", "2", "--env", "WORD=hello", "--memory", "64MiB", "--cpus", "0.1")
    script = 'cat data.txt; echo "$WORD $RANK"'
    code, out, err = ended(mizzen(shared, tmp_path, "run", *options, "--", "sh", "-c", script))
    assert code == 0, err
    assert sorted(line.partition("| ")[2] for line in out.splitlines()) == [
        "from here", "from here", "hello 0", "hello 1",
    ]  # fmt: skip
    id_ = _submitted(err.splitlines())
    workload = shared.client().workload(id_)
    assert workload["name"] == "sh" and workload["spec"]["jobs"][0]["run"] == ["sh", "-c", script]
    # The document that the API returns can be submitted again, with changes.
    again = mizzen(shared, tmp_path, "submit", "--from", id_, "--set", "jobs.0.run=[cat, data.txt]", "--follow")
    code, out, err = ended(again)
    assert code == 0 and out.count("from here") == 2, err
    code, out, err = ended(mizzen(shared, tmp_path, "retry", id_))
    assert code == 0, err
    wait_until(lambda: shared.phase(out.strip()) == "succeeded", "the second try has succeeded")


@pytest.mark.parametrize(("script", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_the_status_of_the_task_is_that_of_the_command(shared: Up, tmp_path: Path, script: str, status: int) -> None:
    """A signal counts as in a shell. The reason is printed."""
    code, out, err = ended(mizzen(shared, tmp_path, "run", "--tenant", "t", "--no-files", "sh", "-c", script))
    assert (code, out) == (status, ""), err
    assert "has failed" in err


def test_ctrl_c_without_a_terminal_cancels(shared: Up, tmp_path: Path) -> None:
    """The workload has ended when the command ends. No line is printed again while it is cancelled."""
    process = mizzen(
        shared, tmp_path, "run", "--tenant", "t", "--no-files", "--", "sh", "-c", "echo begun; exec sleep 600",
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (130, ""), err
    assert shared.phase(_submitted(err.splitlines())) == "cancelled"


@pytest.mark.parametrize(("answer", "phase"), [("detach", "running"), ("c", "cancelled")])
def test_ctrl_c_on_a_terminal_asks(shared: Up, tmp_path: Path, answer: str, phase: str) -> None:
    """It asks once, and the answer, or its first letter, is obeyed."""
    mine, its = pty.openpty()
    script = "echo begun; exec sleep 600"
    process = mizzen(shared, tmp_path, "run", "--tenant", "t", "--no-files", "--", "sh", "-c", script, stdin=its)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    os.write(mine, f"{answer}\n".encode())
    code, _, err = ended(process)
    os.close(mine)
    os.close(its)
    assert code == 130 and "Detach or cancel?" in err, err
    id_ = _submitted(err.splitlines())
    assert shared.phase(id_) == phase
    if answer == "detach":
        shared.client().cancel(id_)
        assert shared.client().wait([id_])[0]["phase"] == "cancelled"


@pytest.mark.rotating
def test_the_output_of_an_array_is_followed(shared: Up, tmp_path: Path) -> None:
    """`run` and `submit --follow` print the lines of its elements, and end with it."""
    options = ("--tenant", "t", "--no-files", "--array", "0-1", "--memory", "64MiB", "--cpus", "0.1")
    code, out, err = ended(mizzen(shared, tmp_path, "run", *options, "--", "sh", "-c", "echo from $MIZZEN_ARRAY_INDEX"))
    assert code == 0, err
    assert sorted(out.splitlines()) == ["sh/0: from 0", "sh/1: from 1"]
    code, again, err = ended(mizzen(shared, tmp_path, "submit", "--from", _submitted(err.splitlines()), "--follow"))
    assert code == 0 and sorted(again.splitlines()) == sorted(out.splitlines()), err
