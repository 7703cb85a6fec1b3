"""killswitch: the time until new connections are refused, and the new work that still arrives.

A machine and a peer are network namespaces, connected by a veth pair. The peer streams SYNs to one port without pause,
and in addition opens real connections to another port one after the other, with a request on each. In each trial
connections are refused in four ways, one after the other, and permitted again:

- the kill-switch of the agent: one store to memory that the eBPF program reads;
- libnftables in this process: a rule is added to a chain that exists;
- `iptables`: a command that inserts a rule;
- a flag in the server, which it checks after each accept; it then closes its listening socket.

The time is from before the call until the last SYN that was let through: an eBPF program where the kernel looks up the
listening socket, after all filters, stores the time of each SYN. It is 0 if no SYN was let through after the call
began. For the flag it is the time until the listening socket was closed. New work is the bytes that the server read from
connections that were opened after the call began.
"""

import ctypes
import ctypes.util
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent.bpf import VALUE, Hook, Kind, Op, Program, SharedMemory, Step, link, load
from agent.network.edge import Edge
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, collector_off
from bench.killswitch_server import CLOSED_NS, FLAG, NEW_BYTES, SERVED, SHARED_BYTES, SINCE_NS, shared
from bench.network_lab import SUBNET, ip, lab, nodes

TRIALS = 500
_ADDRESS = f"{SUBNET}.1"
_WORK_PORT, _STREAM_PORT = 7000, 7001
_PORTS = range(7000, 7010)
_RULE = "tcp dport 7000-7009 tcp flags & (syn | ack) == syn drop"
_LEAST_BYTES = 500
_SETTLE_S = 0.004
_PATIENCE_S = 10.0
_GET_TIME = 5
"""Number of the helper function that returns the time of the monotonic clock."""
LINES = (
    Line("time to the last SYN, kill-switch over libnftables: median of 500", 1 / 20),
    Line("time to the last SYN, kill-switch over libnftables: P99 of 500", 1 / 5),
    Line("time to the last SYN, kill-switch over iptables: median of 500", None),
    Line("time to refusal, kill-switch over a flag in the server: median of 500", None),
    Line(f"most bytes of new work after the kill-switch in 500 trials, over {_LEAST_BYTES}", 1.0),
    Line(f"most bytes of new work after libnftables in 500 trials, over {_LEAST_BYTES}", None),
)


@dataclass(frozen=True)
class _Way:
    """A way to refuse new connections."""

    on: Callable[[], object]
    off: Callable[[], object]


class _Nftables:
    """libnftables in this process: what a program does that does not start `nft`."""

    def __init__(self) -> None:
        name = ctypes.util.find_library("nftables")
        if name is None:
            raise InvalidBenchmark("libnftables is not installed: apt-get install libnftables1 iptables")
        self._library = ctypes.CDLL(name)
        self._library.nft_ctx_new.restype = ctypes.c_void_p
        self._context = ctypes.c_void_p(self._library.nft_ctx_new(0))
        self("add table inet lab; add chain inet lab in { type filter hook input priority 0; }")

    def __call__(self, command: str) -> None:
        if self._library.nft_run_cmd_from_buffer(self._context, command.encode()) != 0:
            raise InvalidBenchmark(f"libnftables: {command}: failed")


def _iptables(*words: str) -> None:
    subprocess.run(["iptables", *words], check=True, capture_output=True)


class _Machine:
    """The machine, with everything that a trial needs."""

    def __init__(self, edge: Edge, seen: memoryview, values: memoryview) -> None:
        nft = _Nftables()
        self._seen = seen
        self._values = values
        self._edge = edge
        switch = edge.kill_switch
        rule = ["INPUT", "-p", "tcp", "--dport", "7000:7009", "--syn", "-j", "DROP"]
        self.ways = {
            "kill_switch": _Way(switch.on, switch.off),
            "libnftables": _Way(lambda: nft(f"add rule inet lab in {_RULE}"), lambda: nft("flush chain inet lab in")),
            "iptables": _Way(lambda: _iptables("-I", *rule), lambda: _iptables("-D", *rule)),
            "flag": _Way(lambda: self._flag(1), lambda: self._flag(0)),
        }

    def trial(self, name: str) -> tuple[float, int]:
        """Refuses connections in one way; returns the seconds until it had effect, and the bytes of new work."""
        way = self.ways[name]
        self._flowing()
        self._values[NEW_BYTES] = 0
        begin_ns = time.monotonic_ns()
        self._values[SINCE_NS] = begin_ns
        way.on()
        if name == "flag":
            self._until(lambda: self._values[CLOSED_NS] > 0, "the server closes its listening socket")
            last_ns = self._values[CLOSED_NS]
        else:
            time.sleep(_SETTLE_S)
            last_ns = self._seen[0]
            self._refused(name)
        new_bytes = self._values[NEW_BYTES]
        way.off()
        self._values[SINCE_NS] = 0
        return max(0.0, (last_ns - begin_ns) / 1e9), new_bytes

    def interval_s(self) -> float:
        """Returns the mean time between two SYNs of the stream."""
        before, begin_s = self._seen[1], time.monotonic()
        time.sleep(0.5)
        return (time.monotonic() - begin_s) / (self._seen[1] - before)

    def _flag(self, value: int) -> None:
        self._values[FLAG] = value

    def _flowing(self) -> None:
        """Waits until SYNs and requests arrive, and then for a random time."""
        seen, served = self._seen[1], self._values[SERVED]
        self._until(lambda: self._seen[1] > seen + 10 and self._values[SERVED] > served, "SYNs and requests arrive")
        time.sleep(random.uniform(0.0005, 0.0015))

    def _refused(self, name: str) -> None:
        """Checks that no SYN is let through any more although SYNs arrive."""
        seen, arrived = self._seen[1], self._edge.received_bytes(0)
        self._until(lambda: self._edge.received_bytes(0) > arrived, "SYNs arrive")
        if self._seen[1] != seen:
            raise InvalidBenchmark(f"{name} let {self._seen[1] - seen} SYNs through after {_SETTLE_S} s")

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        give_up_s = time.monotonic() + _PATIENCE_S
        while not holds():
            if time.monotonic() > give_up_s:
                raise InvalidBenchmark(f"not within {_PATIENCE_S:.0f} s: {what}")
            time.sleep(0.0002)


def _observer(memory: int) -> Program:
    """Returns a program that stores the time of each new connection and counts them, and lets them pass."""
    return [
        Step(Op.CALL, constant=_GET_TIME),
        Step(Op.MAP, 1, VALUE, constant=memory),
        Step(Op.STORE_DOUBLE, 1, 0, offset=0),
        Step(Op.CONSTANT, 2, constant=1),
        Step(Op.ATOMIC_ADD, 1, 2, offset=8),
        Step(Op.CONSTANT, 0, constant=1),
        Step(Op.EXIT),
    ]


@contextmanager
def _machine() -> Iterator[_Machine]:
    if shutil.which("iptables") is None:
        raise InvalidBenchmark("iptables is not installed: apt-get install libnftables1 iptables")
    with ExitStack() as stack:
        stack.enter_context(lab())
        (peer,) = stack.enter_context(nodes(1, "bench.killswitch_node"))
        ip("addr", "add", f"{_ADDRESS}/24", "dev", peer.port)
        edge = Edge(peer.port, _PORTS)
        stack.callback(edge.close)
        memory = SharedMemory(16, "lab_seen")
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        stack.callback(os.close, namespace)
        program = load(_observer(memory.map), Kind.SK_LOOKUP, Hook.SK_LOOKUP, "lab_seen")
        stack.callback(os.close, link(program, namespace, Hook.SK_LOOKUP))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mizzen-bench-")))
        path = folder / "shared"
        path.write_bytes(bytes(SHARED_BYTES))
        command = [sys.executable, "-m", "bench.killswitch_server", _ADDRESS, str(_WORK_PORT), str(path)]
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(server.kill)
        assert server.stdout is not None
        server.stdout.readline()
        stack.enter_context(socket.create_server((_ADDRESS, _STREAM_PORT)))
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as own:
            own.bind((peer.port, 0))
            peer("stream", target=own.getsockname()[4].hex(), address=_ADDRESS, port=_STREAM_PORT)
        peer("work", address=_ADDRESS, port=_WORK_PORT)
        yield _Machine(edge, memory.memory.cast("Q"), shared(path))


def run(bench: Bench) -> Iterable[Figure]:
    """Yields the figures."""
    with _machine() as machine:
        times: dict[str, list[float]] = {name: [] for name in machine.ways}
        work: dict[str, list[int]] = {name: [] for name in machine.ways}
        sizes: dict[str, float | str] = {
            "trials": TRIALS,
            "syn_interval_s": machine.interval_s(),
            "paper_p99_s": 0.0009,
        }
        with collector_off():
            for number in range(TRIALS):
                bench.say(f"trials: {number} of {TRIALS}")
                for name in machine.ways:
                    took_s, new_bytes = machine.trial(name)
                    times[name].append(took_s)
                    work[name].append(new_bytes)
    middle = {name: float(np.median(values)) for name, values in times.items()}
    late = {name: float(np.percentile(values, 99)) for name, values in times.items()}
    most = {name: max(values) for name, values in work.items()}
    medians = {f"{name}_s": value for name, value in middle.items()}
    p99 = {f"{name}_s": value for name, value in late.items()}
    bytes_found = {f"{name}_bytes": float(value) for name, value in most.items()}

    def figure(line: Line, ratio: float, absolute: dict[str, float]) -> Figure:
        return Figure("killswitch", line, ratio, absolute, TRIALS, sizes)

    yield figure(LINES[0], middle["kill_switch"] / middle["libnftables"], medians)
    yield figure(LINES[1], late["kill_switch"] / late["libnftables"], p99)
    yield figure(LINES[2], middle["kill_switch"] / middle["iptables"], medians)
    yield figure(LINES[3], middle["kill_switch"] / middle["flag"], medians)
    yield figure(LINES[4], most["kill_switch"] / _LEAST_BYTES, bytes_found)
    yield figure(LINES[5], most["libnftables"] / _LEAST_BYTES, bytes_found)


SUITE = Suite("killswitch", LINES, run)
