"""The measured bandwidth of an interface: real transfers over a link of a known rate, on a clock of the test."""

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agent.lending.traffic import MigrationTraffic
from agent.network.counters import InterfaceCounter
from agent.network.flows import Flow
from agent.network.machine import MachineNetwork
from agent.network.shaping import LinkShare
from agent.network.uplink import ENOUGH_BLOCKS, Uplink
from domain.traffic import TrafficClass
from reclaim.traffic import migration_share
from tests.netns.namespaces import Network
from tests.network.conftest import PORTS, SINK_PORT, sink

LINK_BYTES_S = 12.5e6
CONFIGURED_BYTES_S = 125e6


class _Time:
    """A clock that runs faster than time by a factor, so that a test takes as many samples as an hour."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def link(network: Network) -> Network:
    """The interface of this namespace carries `LINK_BYTES_S`, and no more."""
    rate = ["tbf", "rate", f"{LINK_BYTES_S * 8:.0f}", "burst", "30000", "latency", "50ms"]
    core = ["ip", "netns", "exec", network.namespace("core"), "tc", "qdisc", "add", "dev", "port-b", "root"]
    subprocess.run([*core, *rate], check=True)
    return network


@contextmanager
def _sending(address: str, mark: int = 0) -> Iterator[None]:
    """Sends as fast as the link permits."""
    going = threading.Event()
    with socket.create_connection((address, SINK_PORT)) as connection:
        if mark:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
        connection.settimeout(0.2)

        def send() -> None:
            while not going.is_set():
                try:
                    connection.send(bytes(1 << 16))
                except TimeoutError:
                    continue

        thread = threading.Thread(target=send)
        thread.start()
        try:
            yield
        finally:
            going.set()
            thread.join()


def _look(uplink: Uplink, times: int, pause_s: float = 0.01) -> None:
    """Takes readings in quick succession. As samples are rates, their interval does not matter."""
    for _ in range(times):
        uplink.look()
        time.sleep(pause_s)


READINGS = 22 * ENOUGH_BLOCKS


async def test_only_a_busy_link_is_measured(link: Network) -> None:
    """The lower bound is below the true rate and near it; an idle link gives no samples, and so no estimate.

    As in the agent, an event loop runs.
    """
    uplink = Uplink("eth0", CONFIGURED_BYTES_S)
    with sink(link) as address:
        _look(uplink, 30, 0.005)
        assert uplink.report() is None
        with _sending(address):
            time.sleep(0.3)
            _look(uplink, READINGS)
        time.sleep(0.3)
        _look(uplink, 5)
        measured = uplink.report()
        assert measured is not None
        assert 0.5 * LINK_BYTES_S < measured.lower_bytes_s <= measured.bytes_s < 1.1 * LINK_BYTES_S
        assert measured.is_possible
        assert abs(measured.at_s - time.time()) < 30
        _look(uplink, 60, 0.005)
        after = uplink.report()
        assert after is not None
        assert (after.bytes_s, after.lower_bytes_s) == (measured.bytes_s, measured.lower_bytes_s)
    uplink.close()


def test_a_suspended_machine_and_a_vanished_interface_give_no_sample(link: Network) -> None:
    """The gap of hours, and the time before an interface was there again under the same name, are left out."""
    clock = _Time()
    uplink = Uplink("eth0", CONFIGURED_BYTES_S, clock=clock)
    with sink(link) as address:
        with _sending(address):
            time.sleep(0.3)
            _look(uplink, READINGS)
            before = uplink.report()
            assert before is not None
            for _ in range(5):
                clock.ahead_s += 3 * 3600.0
                _look(uplink, 5)
            after = uplink.report()
        assert after is not None
        assert after.lower_bytes_s > 0.5 * LINK_BYTES_S, "a transfer during the suspend would have had a rate near 0"
        assert after.at_s <= time.time()
        clock.ahead_s += 90_000.0
        assert uplink.report() is None, "what was measured a day ago does not count"
        clock.ahead_s -= 90_000.0
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        subprocess.run(["ip", "link", "set", "eth0", "name", "eth9"], check=True)
        clock.ahead_s += 61.0
        _look(uplink, 5)
        assert uplink.report() is not None, "what was measured stays while the interface is away"
        subprocess.run(["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "other"], check=True)
        clock.ahead_s += 61.0
        _look(uplink, 5)
        assert uplink.report() is None, "another interface is another link"
    uplink.close()


def test_the_rate_of_a_class_is_not_the_bandwidth(link: Network) -> None:
    """A migration that sends at the rate of its class says nothing about the link; one that cannot does."""
    share = LinkShare(CONFIGURED_BYTES_S, 0.7 * CONFIGURED_BYTES_S)
    flow = Flow.of_mark("run-1", TrafficClass.PLANNED, 5)
    with MachineNetwork("eth0", PORTS, share) as network, sink(link) as address:
        assert network.why_not is None
        uplink = Uplink("eth0", CONFIGURED_BYTES_S, network)
        network.apply({flow: LINK_BYTES_S / 4})
        with _sending(address, mark=5):
            time.sleep(0.5)
            _look(uplink, READINGS)
            assert uplink.report() is None
            network.apply({flow: 6 * LINK_BYTES_S})
            time.sleep(1.0)
            _look(uplink, READINGS, 0.02)
        measured = uplink.report()
        assert measured is not None
        assert 0.5 * LINK_BYTES_S < measured.lower_bytes_s < 1.1 * LINK_BYTES_S
        traffic = MigrationTraffic(network, int(share.migration_bytes_s), uplink, research_bytes_s=1e6)
        assert traffic.measured_share_bytes_s == int(migration_share(measured.lower_bytes_s, 1e6))
        assert traffic.measured_share_bytes_s < 0.1 * share.migration_bytes_s
        uplink.close()


def test_a_counter_is_read_by_number_and_not_by_name(network: Network) -> None:
    counter = InterfaceCounter("eth0")
    first = counter.sent_bytes()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
        sending.sendto(bytes(100), (network.address("b"), SINK_PORT))
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    subprocess.run(["ip", "link", "set", "eth0", "name", "eth9"], check=True)
    assert counter.sent_bytes() > first
    subprocess.run(["ip", "link", "del", "eth9"], check=True)
    with pytest.raises(OSError):
        counter.sent_bytes()
    with pytest.raises(OSError):
        InterfaceCounter("eth9")
    counter.close()
