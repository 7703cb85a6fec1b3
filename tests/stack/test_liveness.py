"""Parts of the stack that hang (SIGSTOP) are detected, killed and started again, and workloads continue."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.stack.harness import Up, processes_of, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]


def _pids(up: Up, part: str) -> set[int]:
    return {pid for pid, command in processes_of(up.data).items() if part in command}


def _told(pid: int, file: str) -> str:
    """Returns the text of `/proc/PID/FILE`, or an empty string if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text()
    except OSError:
        return ""


def _parent(pid: int) -> int | None:
    fields = _told(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else None


def _process(up: Up, part: str) -> int:
    """Returns the pid of a part's top process, which need not be its lowest pid, because pids wrap around."""
    pids = _pids(up, part)
    (top,) = (pid for pid in pids if (parent := _parent(pid)) is not None and parent not in pids)
    return top


def _machine_agent(up: Up) -> int:
    """Returns the pid of the agent of one machine, a child of the process that hosts all agents."""
    agents = _pids(up, "server agents")
    return min(pid for pid in agents if _parent(pid) in agents)


def _gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def _backend(up: Up) -> int:
    """Returns the pid of a Postgres backend that serves a connection of mizzen."""
    postmaster = _process(up, "/postgres -D")
    children = [int(pid) for pid in _told(postmaster, f"task/{postmaster}/children").split()]
    return min(pid for pid in children if _told(pid, "cmdline").startswith("postgres: mizzen mizzen"))


@pytest.mark.rotating
@pytest.mark.parametrize(
    "stopped",
    [
        {
            "worker": "server worker",
            "api": "server api",
            "gateway": "server gateway",
            "a backend of Postgres": None,
            "a machine's agent": None,
        },
        pytest.param(
            {"agents": "server agents", "temporal": "start-dev", "postgres": "/postgres -D"}, marks=pytest.mark.long
        ),
    ],
    ids=["processes-and-backends", "servers-and-agents"],
)
def test_stopped_parts_are_started_again(shared: Up, stopped: dict[str, str | None], tmp_path: Path) -> None:
    """A running task survives the restarts, new workloads run, and events name each restarted part and the reason."""
    gate = tmp_path / "gate"
    before = shared.submit("before", steps=3, step_s=0.05, gate=gate)
    wait_until(lambda: shared.phase(before) == "running", "the first workload runs")
    pids = {name: _process(shared, part) for name, part in stopped.items() if part is not None}
    if "a machine's agent" in stopped:
        pids |= {"a machine's agent": _machine_agent(shared), "a backend of Postgres": _backend(shared)}
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    for name, pid in pids.items():
        wait_until(lambda pid=pid: _gone(pid), f"the stopped part is killed: {name}")
    gate.touch()
    after = wait_until(lambda: shared.submit("after", 3, 0.05, key="+".join(stopped)), "a submission is accepted")
    for workload in (before, after):
        wait_until(lambda workload=workload: shared.ended(workload), "both workloads succeed")
    assert [a["attempt"] for a in shared.client().attempts(before)] == [1]
    parts = {name for name, part in stopped.items() if part is not None}

    def told() -> bool:
        events = [e["detail"] for e in shared.client().events(follow=False) if e["kind"] == "stack.restarted"]
        return parts <= {e["part"] for e in events if "has failed for" in e["because"]}

    wait_until(told, "there is an event for each restart")
    log = (shared.folder / "up.log").read_text()
    assert all(f"{name} is restarted" in log for name in parts)


@pytest.mark.long
def test_a_supervisor_that_was_stopped_restarts_nobody(shared: Up) -> None:
    """After the supervisor and all parts were suspended together, as on a laptop that sleeps, no part is restarted."""
    assert shared.process is not None
    parts = ("server worker", "server api", "server agents", "server gateway", "start-dev", "/postgres -D")
    before = {part: _pids(shared, part) for part in parts[:5]}
    pids = sorted(pid for part in before.values() for pid in part)
    for pid in (shared.process.pid, *pids):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(8)
    for pid in (*pids, shared.process.pid):
        os.kill(pid, signal.SIGCONT)
    workload = shared.submit("woken", steps=3, step_s=0.05)
    wait_until(lambda: shared.ended(workload), "a new workload succeeds")
    assert {part: _pids(shared, part) for part in parts[:5]} == before
