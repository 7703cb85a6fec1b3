"""The checkpoints that leave within a notice: rates by admission, on a real interface and real cgroups."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.cgroups import make_cgroup, remove_cgroup
from agent.config import AgentConfig
from agent.lending.leaving_tasks import LeavingTask
from agent.lending.traffic import MigrationTraffic, open_traffic
from agent.network.edge import Edge
from agent.network.machine import MachineNetwork
from agent.network.shaping import LinkShare
from domain.traffic import TrafficClass
from reclaim.admission import FlowOutcome
from tests.netns.namespaces import Network
from tests.network.conftest import PORTS, SINK_PORT, entered, sink, state

SHARE = LinkShare(link_bytes_s=6_000_000, migration_bytes_s=4_240_000)
_SAVE = f"""
import os, socket, sys, time
with open(sys.argv[1] + "/cgroup.procs", "w") as file: file.write(str(os.getpid()))
with socket.create_connection((sys.argv[2], {SINK_PORT})) as save:
    save.sendall(bytes(int(sys.argv[3])))
    save.shutdown(socket.SHUT_WR)
    save.recv(1)
print(time.time())
"""


@contextmanager
def _cgroups(count: int) -> Iterator[list[Path]]:
    """Makes cgroups for this many tasks."""
    made = [make_cgroup(f"leaving-{number}") for number in range(count)]
    try:
        assert None not in made
        yield [Path(str(path)) for path in made]
    finally:
        for path in filter(None, made):
            remove_cgroup(path)


def _task(cgroup: Path, address: str, size_bytes: int) -> "subprocess.Popen[str]":
    """Starts a task that saves a checkpoint of some bytes, and prints when it has arrived."""
    command = [sys.executable, "-c", _SAVE, str(cgroup), address, str(size_bytes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_checkpoints_leave_before_the_notice_ends(network: Network) -> None:
    """Both admitted tasks save in time; the one that cannot is told apart and does not delay them.

    Afterwards the interface is as it was.
    """
    before = state()
    sizes = [8_000_000, 6_000_000, 120_000_000]
    traffic = MigrationTraffic(MachineNetwork("eth0", PORTS, SHARE), int(SHARE.migration_bytes_s))
    with sink(network) as address, _cgroups(3) as cgroups:
        deadlines = [time.time() + left_s for left_s in (10.0, 12.0, 11.0)]
        leaving = [
            LeavingTask(f"run-{number}", cgroup, size, due_s)
            for number, (cgroup, size, due_s) in enumerate(zip(cgroups, sizes, deadlines, strict=True))
        ]
        outcomes = traffic.update(leaving, time.time())
        assert outcomes == {
            "run-0": FlowOutcome.ADMITTED,
            "run-1": FlowOutcome.ADMITTED,
            "run-2": FlowOutcome.TOO_NARROW,
        }
        tasks = [_task(one.cgroup, address, size) for one, size in zip(leaving, sizes, strict=True)]
        try:
            while any(task.poll() is None for task in tasks[:2]) and time.time() < deadlines[1]:
                time.sleep(0.2)
                there = [one for one, task in zip(leaving, tasks, strict=True) if task.poll() is None]
                traffic.update(there, time.time())
            for task, due_s in zip(tasks[:2], deadlines, strict=False):
                assert float(task.communicate(timeout=1.0)[0]) < due_s
            assert tasks[2].poll() is None
        finally:
            for task in tasks:
                task.kill()
                task.communicate()
        traffic.update([], time.time())
    traffic.close()
    assert state() == before


def test_parts_that_are_sent_ahead_have_their_own_class(network: Network) -> None:
    """Their packets carry the lowest class, and they do not count as a part of the last checkpoint."""
    with entered(network.namespace("b")):
        receiver = Edge("eth0", ())
    traffic = MigrationTraffic(MachineNetwork("eth0", PORTS, SHARE), int(SHARE.migration_bytes_s))
    with sink(network) as address, _cgroups(1) as (cgroup,):
        due_s = time.time() + 60.0
        ahead = LeavingTask("run-0", cgroup, 400_000, due_s, pre_sync=True)
        last = LeavingTask("run-0", cgroup, 400_000, due_s)
        for one in (ahead, last):
            for _ in range(2):
                assert traffic.update([one], time.time()) == {"run-0": FlowOutcome.ADMITTED}
            task = _task(cgroup, address, 1_000_000)
            task.communicate(timeout=30)
            if one.pre_sync:
                assert receiver.received_bytes(TrafficClass.PRE_SYNC) == pytest.approx(1_000_000, rel=0.1)
                assert receiver.received_bytes(TrafficClass.PLANNED) == 0
        assert receiver.received_bytes(TrafficClass.PRE_SYNC) == pytest.approx(1_000_000, rel=0.1)
        assert receiver.received_bytes(TrafficClass.PLANNED) == pytest.approx(1_000_000, rel=0.1)
        traffic.update([], time.time())
    traffic.network.close()
    receiver.close()


def test_a_checkpoint_of_unknown_size_gets_what_is_left(network: Network) -> None:
    """It is not promised anything, and a task without a cgroup is left out."""
    traffic = MigrationTraffic(MachineNetwork("eth0", PORTS, SHARE), int(SHARE.migration_bytes_s))
    with _cgroups(2) as cgroups:
        due_s = time.time() + 10.0
        known, unknown = (
            LeavingTask("run-0", cgroups[0], 8_000_000, due_s),
            LeavingTask("run-1", cgroups[1], None, due_s),
        )
        gone = LeavingTask("run-2", Path("/sys/fs/cgroup/nowhere"), 1, due_s)
        assert traffic.update([known, unknown, gone], time.time()) == {"run-0": FlowOutcome.ADMITTED, "run-1": None}
        traffic.update([], time.time())
    traffic.close()


def test_an_update_may_be_in_progress_when_the_agent_stops(network: Network) -> None:
    """The interface is as it was after the close, although updates go on in another thread."""
    before = state()
    traffic = MigrationTraffic(MachineNetwork("eth0", PORTS, SHARE), int(SHARE.migration_bytes_s))
    with _cgroups(8) as cgroups, ThreadPoolExecutor(1) as thread:
        due_s = time.time() + 60.0
        leaving = [LeavingTask(f"run-{number}", cgroup, 1_000_000, due_s) for number, cgroup in enumerate(cgroups)]
        stop = threading.Event()

        def follow() -> dict[str, FlowOutcome | None]:
            found = dict(traffic.update(leaving, time.time()))
            while not stop.is_set():
                traffic.update([], time.time())
                found = dict(traffic.update(leaving, time.time()))
            return found

        following = thread.submit(follow)
        try:
            time.sleep(0.5)
            assert not following.done()
            traffic.close()
            traffic.close()
            assert state() == before
        finally:
            stop.set()
        assert following.result(30) == {}
    assert state() == before


def test_the_kill_switch_closes_the_ports_of_tasks(network: Network, tmp_path: Path) -> None:
    """The agent's port range is closed, on the interface that it was told, with the share that its settings give."""
    config = AgentConfig(
        machine="r/c/m", region="r", cluster="c", rack="k", cpus_milli=1000, memory_bytes=1 << 30, address="a",
        ports=(PORTS[0], PORTS[-1]), state_dir=tmp_path, interface="eth0", link_bytes_s=10e6, research_bytes_s=4e6,
    )  # fmt: skip
    traffic = open_traffic(config)
    assert traffic.network.why_not is None
    assert traffic.share_bytes_s == 6_000_000
    traffic.kill_switch.on()
    assert traffic.kill_switch.is_on and traffic.kill_switch.in_kernel
    traffic.kill_switch.off()
    traffic.close()
