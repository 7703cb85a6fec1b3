"""Rates of migrations on an interface, their classes, and that nothing remains."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cgroups import make_cgroup, remove_cgroup
from agent.network import shaping as locks
from agent.network.edge import Edge, MigrationFlow
from agent.network.shaping import BURST_S, LinkShare, Shaper
from domain.traffic import OVERHEAD_SHARE, TrafficClass
from tests.netns.namespaces import Network
from tests.network.conftest import PORTS, ROOT, SINK_PORT, entered, sink, state
from tests.stack.harness import wait_until

# The method `thread` would end the whole test run and leave the namespaces behind.
pytestmark = pytest.mark.timeout(180, method="signal")

SHARE = LinkShare(link_bytes_s=12_500_000, migration_bytes_s=8_750_000)
MARK = 77
FLOW = MigrationFlow.of_mark("run-1", TrafficClass.PLANNED, MARK)
HOLDER = """
import sys, time
from agent.network import shaping as locks
from agent.network.edge import Edge
from agent.network.edge import MigrationFlow
from domain.traffic import TrafficClass
from agent.network.shaping import LinkShare, Shaper
shaper = Shaper(Edge("eth0", range(7000, 7010)), LinkShare(12_500_000, 8_750_000))
shaper.apply({MigrationFlow.of_mark("run-1", TrafficClass.PRE_SYNC, 5): 1e6})
print("shaped", flush=True)
time.sleep(600)
"""


@pytest.fixture
def edge(network: Network) -> Iterator[Edge]:
    attached = Edge("eth0", PORTS)
    yield attached
    attached.close()


def _send(address: str, size_bytes: int, mark: int = 0) -> float:
    """Sends bytes to the sink; returns the seconds until all have arrived."""
    with socket.socket() as transfer:
        if mark:
            transfer.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
        transfer.connect((address, SINK_PORT))
        start_s = time.monotonic()
        transfer.sendall(bytes(size_bytes))
        transfer.shutdown(socket.SHUT_WR)
        assert transfer.recv(1) == b"+"
        return time.monotonic() - start_s


LARGEST_PACKET_BYTES = 1 << 16
"""The kernel passes up to this many bytes as one packet (GSO)."""


def test_a_flow_gets_its_rate_and_not_more(network: Network, edge: Edge) -> None:
    rate_bytes_s, size_bytes = 2_000_000.0, 3_000_000
    shaper = Shaper(edge, SHARE)
    shaper.apply({FLOW: rate_bytes_s})
    with sink(network) as address:
        took_s = _send(address, size_bytes, MARK)
        sent = shaper.sent(FLOW)
    shaper.close()
    assert sent.payload_bytes == pytest.approx(size_bytes, rel=0.02)
    assert 0.02 < sent.wire_bytes / sent.payload_bytes - 1 < OVERHEAD_SHARE
    # The class lets the rate, one burst, and the packet that exceeds it pass, whatever the load of this computer.
    assert sent.wire_bytes < (rate_bytes_s * (took_s + BURST_S) + LARGEST_PACKET_BYTES) * 1.01


def test_packets_carry_the_dscp_of_their_class(network: Network, edge: Edge) -> None:
    """Sockets are assigned to a flow by mark and by cgroup; other traffic is not changed."""
    cgroup = make_cgroup(f"network-{os.getpid()}")
    if cgroup is None:
        pytest.skip("no cgroup v2")
    ahead = MigrationFlow.of_cgroup("run-2", TrafficClass.PRE_SYNC, cgroup)
    shaper = Shaper(edge, SHARE)
    shaper.apply({FLOW: 4e6, ahead: 4e6})
    with entered(network.namespace("b")):
        receiver = Edge("eth0", ())
    try:
        with sink(network) as address:
            _send(address, 100_000, MARK)
            code = f"""
import socket
open("{cgroup}/cgroup.procs", "w").write("0")
with socket.create_connection(("{address}", {SINK_PORT})) as transfer:
    transfer.sendall(bytes(50_000)); transfer.shutdown(1); transfer.recv(1)
"""
            subprocess.run([sys.executable, "-c", code], check=True)
            _send(address, 10_000)
            _send(address, 10_000, mark=MARK + 1)
        assert receiver.received_bytes(TrafficClass.PLANNED) == pytest.approx(100_000, rel=0.1)
        assert receiver.received_bytes(TrafficClass.PRE_SYNC) == pytest.approx(50_000, rel=0.1)
        assert receiver.received_bytes(TrafficClass.RESEARCH) == pytest.approx(20_000, rel=0.2)
        assert shaper.sent(ahead).payload_bytes == 50_000
        assert edge.sent().payload_bytes == pytest.approx(20_000, rel=0.1)
    finally:
        receiver.close()
        shaper.close()
        remove_cgroup(cgroup)


def test_the_overhead_is_measured(network: Network, edge: Edge) -> None:
    """With small packets the headers are a larger part."""
    subprocess.run(["ip", "link", "set", "eth0", "mtu", "576"], check=True)
    shaper = Shaper(edge, SHARE)
    shaper.apply({FLOW: SHARE.migration_bytes_s})
    assert shaper.overhead_share == OVERHEAD_SHARE
    with sink(network) as address:
        _send(address, 9_000_000, MARK)
    shaper.apply({FLOW: SHARE.migration_bytes_s})
    assert shaper.overhead_share == pytest.approx(590 / 524 - 1 + 0.01, rel=0.05)
    shaper.close()


def test_rates_change_and_flows_end(network: Network, edge: Edge) -> None:
    before = state()
    shaper = Shaper(edge, SHARE)
    assert state() == before  # Without flows there is no qdisc.
    second = MigrationFlow.of_mark("run-2", TrafficClass.PRE_SYNC, 6)
    shaper.apply({FLOW: 1e6})
    assert _rates() == {1e6: 1}
    shaper.apply({FLOW: 2e6, second: 1e6}, LinkShare(25_000_000, 20_000_000))
    assert _rates() == {2e6: 1, 1e6: 1}
    shaper.apply({second: 18e6})
    assert _rates() == {18e6: 1}
    shaper.apply({})
    assert state() == before
    shaper.apply({second: 1e6})
    shaper.close()
    shaper.close()
    assert state() == before


def _rates() -> dict[float, int]:
    """Returns the rates of the classes below the migration share, with their numbers."""
    found: dict[float, int] = {}
    for line in subprocess.run(
        ["tc", "class", "show", "dev", "eth0"], capture_output=True, text=True
    ).stdout.splitlines():
        words = line.split()
        if "parent" in words and words[words.index("parent") + 1] == "4d5a:3":
            text = words[words.index("rate") + 1]
            assert text == words[words.index("ceil") + 1]
            number, unit = float(text.rstrip("KMGbit")), text[:-3].lstrip("0123456789.")
            rate = round(number * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[unit] / 8, -3)
            found[rate] = found.get(rate, 0) + 1
    return found


def test_invalid_rates_are_refused_and_change_nothing(network: Network, edge: Edge) -> None:
    shaper = Shaper(edge, SHARE)
    shaper.apply({FLOW: 1e6})
    with pytest.raises(ValueError, match="must be at most the migration share, 8750000 bytes/s"):
        shaper.apply({FLOW: SHARE.migration_bytes_s + 10})
    with pytest.raises(ValueError, match="rate 10 of flow run-1: must be at least 1000 bytes/s"):
        shaper.apply({FLOW: 10})
    assert _rates() == {1e6: 1}
    shaper.apply({FLOW: SHARE.migration_bytes_s})
    shaper.close()
    with pytest.raises(ValueError, match="migration_bytes_s 9: must be greater than 0 and less than link_bytes_s, 8"):
        LinkShare(8, 9)
    with pytest.raises(ValueError, match="research traffic has no flow"):
        MigrationFlow.of_mark("x", TrafficClass.RESEARCH, 1)
    with pytest.raises(ValueError, match="mark 0: must be within 1 to 4294967295"):
        MigrationFlow.of_mark("x", TrafficClass.PLANNED, 0)


def test_a_configured_qdisc_is_not_replaced(network: Network, edge: Edge) -> None:
    subprocess.run(
        ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "1gbit", "burst", "1mb", "latency", "9ms"]
    )
    before = state()
    shaper = Shaper(edge, SHARE)
    with pytest.raises(OSError, match="its qdisc tbf was configured by another program"):
        shaper.apply({FLOW: 1e6})
    assert state() == before


@pytest.mark.parametrize("also_guardian", [False, True])
def test_after_sigkill_the_interface_is_as_before(network: Network, also_guardian: bool) -> None:
    before = state()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, cwd=ROOT, env=_environment())
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"shaped\n"
    assert state() != before
    guardian = _guardian_of(holder.pid)
    if also_guardian:
        os.kill(guardian, signal.SIGKILL)
    holder.kill()
    with holder:
        holder.wait()
    if also_guardian:  # The next agent repairs what remains.
        assert json.loads(_qdiscs())[0]["kind"] == "htb"
        edge = Edge("eth0", PORTS)
        Shaper(edge, SHARE)
        edge.close()
    wait_until(lambda: state() == before, "the interface is restored")
    wait_until(lambda: not Path(f"/proc/{guardian}").exists(), "the guardian has ended")
    namespace = Path("/proc/thread-self/ns/net").stat().st_ino
    assert not list(Path("/run").glob(f"mizzen-*-{namespace}-*"))


def test_a_signal_to_both_does_not_end_the_guardian_first(network: Network) -> None:
    before = state()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, cwd=ROOT, env=_environment())
    assert holder.stdout is not None
    holder.stdout.readline()
    guardian = _guardian_of(holder.pid)
    os.kill(guardian, signal.SIGTERM)
    with holder:
        holder.terminate()
    wait_until(lambda: state() == before, "the interface is restored")
    wait_until(lambda: not Path(f"/proc/{guardian}").exists(), "the guardian has ended")


def test_one_process_shapes_an_interface(network: Network, edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    shaper, rival = Shaper(edge, SHARE), Shaper(edge, SHARE)
    shaper.apply({FLOW: 1e6})
    shaped = state()
    monkeypatch.setattr(locks, "PATIENCE_S", 0.1)
    with pytest.raises(OSError, match="another process of mizzen shapes its traffic"):
        rival.apply({FLOW: 1e6})
    assert state() == shaped
    # The lock is released with the shaping, even while the rival waits for it.
    monkeypatch.setattr(locks, "PATIENCE_S", 30.0)
    timer = threading.Timer(0.2, shaper.close)
    timer.start()
    rival.apply({MigrationFlow.of_mark("run-2", TrafficClass.PLANNED, 6): 1e6})
    timer.join()
    rival.close()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'sdk'}"}


def _guardian_of(pid: int) -> int:
    """Returns the pid of the holder's only child."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _qdiscs() -> str:
    return subprocess.run(
        ["tc", "-j", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True, check=True
    ).stdout
