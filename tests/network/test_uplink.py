"""The measured bandwidth of an interface: real transfers over a link of a known rate, on a clock of the test."""

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from agent.lending.traffic import MigrationTraffic
from agent.network.counters import InterfaceCounter, WaitingConnections
from agent.network.edge import MigrationFlow
from agent.network.machine import MachineNetwork
from agent.network.shaping import LinkShare
from agent.network.uplink import ENOUGH_BLOCKS, Uplink
from domain.traffic import TrafficClass
from reclaim.traffic import migration_share
from tests.netns.namespaces import Network
from tests.network.conftest import PORTS, SINK_PORT, sink

LINK_BYTES_S = 12.5e6
CONFIGURED_BYTES_S = 125e6
_MAX_PACING_RATE = 47


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
def _beside(work: Callable[[], None], ends: threading.Event) -> Iterator[None]:
    """Runs `work` in a thread, which returns once `ends` is set."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


@contextmanager
def _sending(address: str, port: int = SINK_PORT, mark: int = 0, most_bytes_s: int = 0) -> Iterator[None]:
    """Sends as fast as the link permits, or as `most_bytes_s`."""
    going = threading.Event()
    with socket.create_connection((address, port)) as connection:
        if most_bytes_s:
            connection.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, most_bytes_s)
        if mark:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
        connection.settimeout(0.2)

        def send() -> None:
            while not going.is_set():
                try:
                    connection.send(bytes(1 << 16))
                except TimeoutError:
                    continue

        with _beside(send, going):
            yield


def _look(uplink: Uplink, times: int, pause_s: float = 0.01) -> None:
    """Takes readings in quick succession. As samples are rates, their interval does not matter."""
    for _ in range(times):
        uplink.measure()
        time.sleep(pause_s)


READINGS = 22 * ENOUGH_BLOCKS
_PEER = """
import socket, sys, time
each_s = float(sys.argv[1])
with socket.create_server(("", 9100)) as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
    print("ready", flush=True)
    connection, _ = listener.accept()
    while True:
        time.sleep(each_s)
        connection.recv(20_000)
"""


@contextmanager
def _reading_each(network: Network, each_s: float) -> Iterator[tuple[str, int]]:
    """Accepts one connection in namespace `b`, and reads 20 kB from it in each interval."""
    command = [*network.enter("b"), sys.executable, "-c", _PEER, str(each_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            yield network.address("b"), 9100
        finally:
            process.kill()


@contextmanager
def _datagrams(address: str) -> Iterator[None]:
    """Sends some datagrams, which wait for nothing: without them the connections are not looked at."""
    going = threading.Event()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:

        def send() -> None:
            while not going.wait(0.002):
                sending.sendto(bytes(1000), (address, SINK_PORT))

        with _beside(send, going):
            yield


@pytest.mark.rotating
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


@pytest.mark.rotating
def test_a_connection_that_does_not_wait_for_the_link_gives_no_sample(link: Network) -> None:
    """Each task of a machine can have such a connection, on purpose or by accident. The measured bound stays."""
    uplink = Uplink("eth0", CONFIGURED_BYTES_S)
    reasons = [("does not read", 3600.0, 0), ("reads slowly", 0.01, 0), ("its process paces it", 0.0, 500_000)]
    with sink(link) as address:
        with _sending(address):
            time.sleep(0.3)
            _look(uplink, READINGS)
        time.sleep(0.3)
        _look(uplink, 5)
        before = uplink.report()
        assert before is not None
        for reason, each_s, most_bytes_s in reasons:
            with (
                _reading_each(link, each_s) as (peer, port),
                _sending(peer, port, most_bytes_s=most_bytes_s),
                _datagrams(address),
            ):
                time.sleep(0.3)
                _look(uplink, 60, 0.02)
            after = uplink.report()
            assert after is not None
            assert (after.bytes_s, after.lower_bytes_s) == (before.bytes_s, before.lower_bytes_s), reason
    uplink.close()


@pytest.mark.rotating
def test_a_peer_that_is_gone_says_nothing_about_the_link(link: Network) -> None:
    """The connection has unsent bytes until it times out, after many minutes; other traffic goes on."""
    uplink = Uplink("eth0", CONFIGURED_BYTES_S)
    with sink(link) as address, _sending(address), _datagrams(link.address("core")):
        time.sleep(0.3)
        _look(uplink, READINGS)
        link.cut("b")
        _look(uplink, 100, 0.02)
        link.join("b")
        measured = uplink.report()
    assert measured is not None
    assert measured.lower_bytes_s > 0.5 * LINK_BYTES_S
    uplink.close()


@pytest.mark.rotating
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


@pytest.mark.rotating
def test_the_rate_of_a_class_is_not_the_bandwidth(link: Network) -> None:
    """A migration that sends at the rate of its class says nothing about the link; one that cannot does."""
    share = LinkShare(CONFIGURED_BYTES_S, 0.7 * CONFIGURED_BYTES_S)
    flow = MigrationFlow.of_mark("run-1", TrafficClass.PLANNED, 5)
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
        # The mean, because a sender that got no CPU time for a while gives slow samples.
        assert 0.5 * LINK_BYTES_S < measured.bytes_s < 1.1 * LINK_BYTES_S
        traffic = MigrationTraffic(network, int(LINK_BYTES_S), uplink, research_bytes_s=1e6)
        assert traffic.measured_share_bytes_s == int(migration_share(measured.lower_bytes_s, 1e6))
        traffic = MigrationTraffic(network, int(100 * LINK_BYTES_S), uplink, research_bytes_s=1e6)
        assert traffic.measured_share_bytes_s == int(10 * LINK_BYTES_S), "at least a tenth of the configured share"
        uplink.close()


@pytest.mark.rotating
async def test_an_error_does_not_end_the_measurement(network: Network, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, and the next readings measure again."""
    readings = 0

    def clock() -> float:
        nonlocal readings
        readings += 1
        if readings in (3, 4):
            raise ValueError("no clock")
        return time.monotonic()

    uplink = Uplink("eth0", CONFIGURED_BYTES_S, clock=clock)
    running = asyncio.create_task(uplink.run())
    try:
        async with asyncio.timeout(60):
            while readings < 8 and not running.done():
                await asyncio.sleep(0.05)
        assert not running.done()
        assert uplink.report() is None
        assert ["no clock" in record.exc_text for record in caplog.records if record.exc_text] == [True]
    finally:
        running.cancel()
        await asyncio.wait([running])
        uplink.close()


def test_after_an_error_no_answer_is_that_to_an_earlier_question(
    link: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's list of connections was not read to its end: the next call reads a new list."""

    class Interrupted(socket.socket):
        failures = 0

        def recv(self, *arguments: int) -> bytes:
            if self.family == socket.AF_NETLINK and Interrupted.failures:
                Interrupted.failures -= 1
                raise TimeoutError("timed out")
            return super().recv(*arguments)

    monkeypatch.setattr(socket, "socket", Interrupted)
    counter, waiting = InterfaceCounter("eth0"), WaitingConnections()
    with sink(link) as address:
        addresses = counter.addresses()
        for ask in (counter.sent_bytes, lambda: waiting.has_any(addresses)):
            Interrupted.failures = 1
            with pytest.raises(TimeoutError):
                ask()
        before = counter.sent_bytes()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
            sending.sendto(bytes(100), (address, SINK_PORT))
        assert counter.sent_bytes() > before
        with _sending(address):
            time.sleep(0.3)
            waiting.has_any(addresses)
            time.sleep(0.3)
            assert waiting.has_any(addresses)
        assert not waiting.has_any(addresses)
    counter.close()
    waiting.close()


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
