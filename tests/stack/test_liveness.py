"""Parts that are stopped by a signal: each is found, killed and started again, and work goes on."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack.harness import Up, processes_of, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]
LIVENESS = "\nliveness: {interval_s: 1, timeout_s: 3, restart_after_s: 5}\n"
LOGS = "logs: {max_bytes: 100, keep: 1, check_interval_s: 0.5}\n"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack whose parts count as stuck after five seconds."""
    up = Up(tmp_path_factory.mktemp("liveness"), lost_s=120)
    config = up.folder / "config.yaml"
    config.write_text(config.read_text() + LIVENESS + LOGS)
    try:
        up.start()
        up.client().set_tenant("t", 3, {"a100": 16}, None)
        yield up
        assert up.interrupt() == 0
        assert processes_of(up.data) == {}
    finally:
        up.close()


def _pids(up: Up, part: str) -> set[int]:
    return {pid for pid, command in processes_of(up.data).items() if part in command}


def _told(pid: int, file: str) -> str:
    """What the kernel tells of a process, or nothing of one that has just ended."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return ""


def _parent(pid: int) -> int | None:
    fields = _told(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else None


def _process(up: Up, part: str) -> int:
    """The process of a part, not one that it has forked: that may have a lower number, once the numbers start anew."""
    pids = _pids(up, part)
    (top,) = (pid for pid in pids if (parent := _parent(pid)) is not None and parent not in pids)
    return top


def _machine_agent(up: Up) -> int:
    """The agent of one machine: a child of the process of all of them."""
    agents = _pids(up, "server agents")
    return min(pid for pid in agents if _parent(pid) in agents)


def _gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def _backend(up: Up) -> int:
    """A process of Postgres that serves a connection of mizzen's."""
    postmaster = _process(up, "/postgres -D")
    children = [int(pid) for pid in _told(postmaster, f"task/{postmaster}/children").split()]
    return min(pid for pid in children if _told(pid, "cmdline").startswith("postgres: mizzen mizzen"))


@pytest.mark.parametrize(
    "stopped",
    [
        {"worker": "server worker", "api": "server api", "a backend of Postgres": None, "a machine's agent": None},
        {"agents": "server agents", "temporal": "start-dev", "postgres": "/postgres -D"},
    ],
    ids=["processes-and-backends", "servers-and-agents"],
)
def test_stopped_parts_are_started_again(stack: Up, stopped: dict[str, str | None], tmp_path: Path) -> None:
    """A task that runs meanwhile goes on, new work is taken and done, and operators see what was restarted and why."""
    gate = tmp_path / "gate"
    before = stack.submit("before", steps=3, step_s=0.05, gate=gate)
    wait_until(lambda: stack.phase(before) == "running", "it runs")
    pids = {name: _process(stack, part) for name, part in stopped.items() if part is not None}
    if "a machine's agent" in stopped:
        pids |= {"a machine's agent": _machine_agent(stack), "a backend of Postgres": _backend(stack)}
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    for name, pid in pids.items():
        wait_until(lambda pid=pid: _gone(pid), f"{name}, which is stopped, is killed")
    gate.touch()
    after = wait_until(lambda: stack.submit("after", 3, 0.05, key="+".join(stopped)), "a submission is taken")
    for workload in (before, after):
        wait_until(lambda workload=workload: stack.ended(workload), "it ends")
    assert [a["attempt"] for a in stack.client().attempts(before)] == [1]
    parts = {name for name, part in stopped.items() if part is not None}

    def told() -> bool:
        events = [e["detail"] for e in stack.client().events(follow=False) if e["kind"] == "stack.restarted"]
        return parts <= {e["part"] for e in events if "has failed for" in e["because"]}

    wait_until(told, "events tell of the restarts")
    log = (stack.folder / "up.log").read_text()
    assert all(f"{name} is restarted" in log for name in parts)


def test_logs_do_not_grow(stack: Up) -> None:
    """Every part's log is cut while the stack runs, and parts go on writing to it."""
    logs = stack.data / "run" / "log"
    wait_until(lambda: list(logs.glob("*.log.1")), "a log was cut")
    wait_until(lambda: all(log.stat().st_size <= 100 for log in logs.glob("*.log")), "all are short")


def test_a_supervisor_that_was_stopped_restarts_nobody(stack: Up) -> None:
    """Time in which it was itself stopped, as on a laptop that sleeps, is no part's: all go on as they are."""
    assert stack.process is not None
    parts = ("server worker", "server api", "server agents", "start-dev", "/postgres -D")
    before = {part: _pids(stack, part) for part in parts[:4]}
    pids = sorted(pid for part in before.values() for pid in part)
    for pid in (stack.process.pid, *pids):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(8)
    for pid in (*pids, stack.process.pid):
        os.kill(pid, signal.SIGCONT)
    workload = stack.submit("woken", steps=3, step_s=0.05)
    wait_until(lambda: stack.ended(workload), "the stack works")
    assert {part: _pids(stack, part) for part in parts[:4]} == before
