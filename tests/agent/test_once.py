"""`mizzen agent --once` as a process, while the control plane is away: its exit status says why it has ended."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.stack.ports import free_port
from tests.stack.harness import wait_until

MIZZEN = Path(sys.executable).parent / "mizzen"


def _agent(folder: Path) -> "subprocess.Popen[bytes]":
    """Starts an agent whose Temporal does not answer; returns it when it takes signals."""
    state, log = folder / "state", folder / "log"
    options = {
        "region": "r", "cluster": "c", "name": "m1", "bucket": f"file://{folder}/bucket", "state-dir": state,
        "temporal": f"127.0.0.1:{free_port()}", "gpus": 0, "isolation": "NONE", "platform": "kubernetes",
    }  # fmt: skip
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    with log.open("wb") as out:
        process = subprocess.Popen([MIZZEN, "agent", "--once", *flags], stdout=out, stderr=out, cwd=folder)
    wait_until(lambda: b"Temporal is unavailable" in log.read_bytes(), "it tries to connect")
    return process


def _status(process: "subprocess.Popen[bytes]", number: int) -> int:
    try:
        process.send_signal(number)
        return process.wait(60)
    finally:
        process.kill()


@pytest.mark.rotating
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 76)])
def test_a_signal(tmp_path: Path, number: int, status: int) -> None:
    """SIGTERM is the notice; SIGINT is none. Its folder is removed, which no later agent uses."""
    assert _status(_agent(tmp_path), number) == status
    assert not (tmp_path / "state").exists()


@pytest.mark.long
def test_output_that_is_not_stored(tmp_path: Path) -> None:
    """If the output of a task cannot be stored until the agent has to go, its status says so."""
    run = tmp_path / "state" / "runs" / "wl-1m8k8gt6250178wf.1" / "count.0"
    run.mkdir(parents=True)
    (tmp_path / "state").chmod(0o700)
    (run / "exit.json").write_text('{"code": 0}')
    (run / "stdout").write_text("output\n")
    assert _status(_agent(tmp_path), signal.SIGTERM) == 74
