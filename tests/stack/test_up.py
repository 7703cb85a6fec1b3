"""`mizzen up`: what a user can do to it, and what it leaves behind."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.stack.harness import ROOT, Up, processes_of, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


def _tenant(up: Up) -> None:
    up.client().set_tenant("t", 3, {"a100": 16}, None)


def _task_pids(up: Up, workload: str) -> set[int]:
    out = set()
    for pid in processes_of(up.data):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"MIZZEN_WORKLOAD={workload}".encode() in environ:
            out.add(pid)
    return out


def test_interrupt_saves_stops_and_goes_on(up: Up) -> None:
    """Ctrl-C asks for a checkpoint and leaves no process; at the next start the workload goes on from there."""
    up.start()
    _tenant(up)
    workload = up.submit("long", steps=60, step_s=0.2, tasks=2)
    wait_until(lambda: (up.client().workload(workload).get("progress") or {}).get("step"), "it makes progress")
    assert up.interrupt() == 0
    assert processes_of(up.data) == {}
    up.start()
    wait_until(lambda: up.ended(workload), "it goes on to its end")
    attempts = up.client().attempts(workload)
    assert [a["attempt"] for a in attempts] == [1, 2]
    assert attempts[1]["resumed_step"] >= attempts[0]["checkpoint_step"] > 0
    assert up.interrupt() == 0
    assert processes_of(up.data) == {}


def test_killed_up_is_taken_over(up: Up) -> None:
    """After kill -9 of `up` its tasks go on, and the next `up` finds them: the same processes, the same attempt."""
    up.start()
    _tenant(up)
    workload = up.submit("long", steps=100, step_s=0.2)
    wait_until(lambda: up.phase(workload) == "running" and _task_pids(up, workload), "it runs")
    before = _task_pids(up, workload)
    assert up.process is not None
    up.process.send_signal(signal.SIGKILL)
    up.process.wait()
    up.start()
    assert before <= _task_pids(up, workload)
    wait_until(lambda: up.ended(workload), "it ends")
    assert [a["attempt"] for a in up.client().attempts(workload)] == [1]
    assert up.interrupt() == 0
    assert processes_of(up.data) == {}


@pytest.mark.parametrize("port", ["port", "database-port", "temporal-port", "temporal-ui-port"])
def test_taken_port_is_named(up: Up, port: str) -> None:
    """A port that is taken is an error of one line that names it, and nothing is left running."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up.ports[port] = taken.getsockname()[1]
        done = subprocess.run(up.command(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6
    assert str(up.ports[port]) in done.stderr and f"--{port}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert processes_of(up.data) == {}


def test_second_up_on_a_folder_is_refused(up: Up) -> None:
    """Two stacks never share a data folder: the second names the first's process."""
    up.start()
    other = Up(up.folder)
    done = subprocess.run(other.command(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6
    assert up.process is not None and str(up.process.pid) in done.stderr
    assert up.interrupt() == 0


def test_dead_children_are_restarted(up: Up) -> None:
    """Each part that is killed comes back, and the stack answers again."""
    up.start()
    _tenant(up)
    log = up.data / "run" / "log"
    for part in ("server worker", "server api", "server agents", "start-dev", "/postgres -D"):
        pids = {pid for pid, command in processes_of(up.data).items() if part in command}
        assert pids, f"{part} runs: {sorted(p.name for p in log.iterdir())}"
        os.kill(min(pids), signal.SIGKILL)
        wait_until(
            lambda part=part, pids=pids: {p for p, c in processes_of(up.data).items() if part in c} - pids,
            f"{part} is started again",
        )
    workload = up.submit("after", steps=3, step_s=0.05)
    wait_until(lambda: up.ended(workload), "the stack works")
    assert up.interrupt() == 0
    assert processes_of(up.data) == {}
