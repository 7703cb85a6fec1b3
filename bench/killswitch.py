"""killswitch: the time until new connections are refused, and the new work that still arrives.

A machine and a peer are network namespaces, connected by a veth pair. The peer streams SYNs to one port without pause,
on a CPU of its own; the stream and the refusing process have a high priority. In addition the peer opens real
connections to another port one after the other, with a request on each. In each trial, new connections are refused in
four ways, one after the other, and permitted again:

- the kill-switch of the agent: one store to memory that the eBPF program reads;
- libnftables in this process: a rule is added to a chain that exists;
- `iptables`: a command that inserts a rule;
- a flag in the server, which it checks after each accept; it then closes its listening socket.

The time is from before the call until the last SYN that was let through: an eBPF program where the kernel looks up the
listening socket, after all filters, stores the time of each SYN. It is 0 if no SYN was let through after the call
began. For the flag it is the time until the listening socket was closed. New work is the bytes of requests that the
server read from connections that were opened after the call had returned; for comparison, after it began.

The agent itself receives new work through its poll of Temporal. The bytes of launch requests that it still reads are
measured on a stack (`bench.killswitch_launches`); the most of them and of the new work on connections count together.
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agent.bpf import VALUE, Hook, Instruction, Op, Program, ProgramType, SharedMemory, link, load
from agent.network.edge import Edge
from bench import killswitch_launches
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, collector_off
from bench.killswitch_server import (
    BEGUN_BYTES,
    BEGUN_NS,
    CLOSED_NS,
    DONE_BYTES,
    DONE_NS,
    FLAG,
    SERVED,
    SHARED_BYTES,
    shared,
)
from bench.killswitch_traffic import PRIORITY, REQUEST_BYTES
from bench.network_lab import SUBNET, ip, lab, nodes
from domain.traffic import TrafficClass

TRIALS = 500
_ADDRESS = f"{SUBNET}.1"
_WORK_PORT, _STREAM_PORT = 7000, 7001
_PORTS = range(7000, 7010)
_RULE = "tcp dport 7000-7009 tcp flags & (syn | ack) == syn drop"
_WORK_BYTES = 500
"""The bound on new work."""
_SETTLE_S = 0.004
_FRESH_NS = 20_000
_PATIENCE_S = 10.0
_GET_TIME = 5
"""Number of the helper function that returns the time of the monotonic clock."""
LINES = (
    Line("time to the last SYN, kill-switch over libnftables: median of 500", 1 / 20),
    Line("time to the last SYN, kill-switch over libnftables: P99 of 500", 1 / 5),
    Line("time to the last SYN, kill-switch over iptables: median of 500", None),
    Line("time to refusal, kill-switch over a flag in the server: median of 500", None),
    Line("most bytes of new work after the kill-switch in 500 trials, over 500", 1.0),
    Line("bytes of new work since the call began, kill-switch over libnftables: mean of 500", None),
    Line(f"most bytes of new work and of launch requests read ({killswitch_launches.TRIALS} trials), over 500", 1.0),
)


@dataclass(frozen=True)
class _Way:
    """A way to refuse new connections."""

    on: Callable[[], object]
    off: Callable[[], object]


@dataclass(frozen=True)
class _Trial:
    took_s: float
    begun_bytes: int
    """New work on connections that were opened after the call began."""
    done_bytes: int
    """New work on connections that were opened after the call had returned."""


class _Nftables:
    """libnftables in this process, as in a program that uses the library instead of the command `nft`."""

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

    def trial(self, name: str) -> _Trial:
        """Refuses connections in one way, and permits them again."""
        way, values = self.ways[name], self._values
        self._flowing()
        values[BEGUN_BYTES] = values[DONE_BYTES] = 0
        values[BEGUN_NS] = time.monotonic_ns()
        begun_ns = time.monotonic_ns()
        way.on()
        values[DONE_NS] = time.monotonic_ns()
        if name == "flag":
            self._until(lambda: values[CLOSED_NS] > 0, "the server closes its listening socket")
            last_ns = values[CLOSED_NS]
        else:
            time.sleep(_SETTLE_S)
            last_ns = self._seen[0]
            self._refused(name)
        trial = _Trial(max(0.0, (last_ns - begun_ns) / 1e9), values[BEGUN_BYTES], values[DONE_BYTES])
        way.off()
        values[BEGUN_NS] = values[DONE_NS] = 0
        return trial

    def interval_s(self) -> float:
        """Returns the mean time between two SYNs of the stream."""
        before, begin_s = self._seen[1], time.monotonic()
        time.sleep(0.5)
        return (time.monotonic() - begin_s) / (self._seen[1] - before)

    def _flag(self, value: int) -> None:
        self._values[FLAG] = value

    def _flowing(self) -> None:
        """Waits until SYNs and requests arrive, then for a random time, then until a SYN has just been let through.

        It does not sleep at the end, because other processes could then run first.
        """
        seen, served = self._seen[1], self._values[SERVED]
        self._until(lambda: self._seen[1] > seen + 10 and self._values[SERVED] > served, "SYNs and requests arrive")
        ready_ns = time.monotonic_ns() + random.randint(500_000, 1_500_000)
        while time.monotonic_ns() < ready_ns or time.monotonic_ns() - self._seen[0] > _FRESH_NS:
            pass

    def _refused(self, name: str) -> None:
        """Checks that no SYN is let through any more although SYNs arrive."""
        seen, arrived = self._seen[1], self._edge.received_bytes(TrafficClass.RESEARCH)
        self._until(lambda: self._edge.received_bytes(TrafficClass.RESEARCH) > arrived, "SYNs arrive")
        if self._seen[1] != seen:
            raise InvalidBenchmark(f"{name} let {self._seen[1] - seen} SYNs through after {_SETTLE_S} s")

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        give_up_s = time.monotonic() + _PATIENCE_S
        while not holds():
            if time.monotonic() > give_up_s:
                raise InvalidBenchmark(f"a condition was not met within {_PATIENCE_S:.0f} s: {what}")
            time.sleep(0.0002)


def _observer(memory: int) -> Program:
    """Returns a program that stores the time of each new connection and counts them, and lets them pass."""
    return [
        Instruction(Op.CALL, constant=_GET_TIME),
        Instruction(Op.MAP, 1, VALUE, constant=memory),
        Instruction(Op.STORE_DOUBLE, 1, 0, offset=0),
        Instruction(Op.CONSTANT, 2, constant=1),
        Instruction(Op.ATOMIC_ADD, 1, 2, offset=8),
        Instruction(Op.CONSTANT, 0, constant=1),
        Instruction(Op.EXIT),
    ]


@contextmanager
def _machine() -> Iterator[_Machine]:
    if shutil.which("iptables") is None:
        raise InvalidBenchmark("iptables is not installed: apt-get install libnftables1 iptables")
    with ExitStack() as stack:
        stack.enter_context(lab())
        stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
        machine_cpu, peer_cpu = _two_cpus()
        os.sched_setaffinity(0, {machine_cpu})
        (peer,) = stack.enter_context(nodes(1, "bench.killswitch_traffic"))
        ip("addr", "add", f"{_ADDRESS}/24", "dev", peer.port)
        edge = Edge(peer.port, _PORTS)
        stack.callback(edge.close)
        memory = SharedMemory(16, "lab_seen")
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        stack.callback(os.close, namespace)
        program = load(_observer(memory.map), ProgramType.SK_LOOKUP, Hook.SK_LOOKUP, "lab_seen")
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
            peer("stream", target=own.getsockname()[4].hex(), address=_ADDRESS, port=_STREAM_PORT, cpu=peer_cpu)
        peer("work", address=_ADDRESS, port=_WORK_PORT)
        # The call itself must not wait for a CPU: that would measure the other load of this computer.
        thread, before = threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, thread, PRIORITY)
        stack.callback(os.setpriority, os.PRIO_PROCESS, thread, before)
        yield _Machine(edge, memory.memory.cast("Q"), shared(path))


def _two_cpus() -> tuple[int, int]:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise InvalidBenchmark("the machine and its peer need two CPUs: this process may use only one")
    return cpus[0], cpus[1]


def run(bench: Bench) -> Iterable[Figure]:
    """Yields the figures."""
    with _machine() as machine:
        trials: dict[str, list[_Trial]] = {name: [] for name in machine.ways}
        sizes: dict[str, float | str] = {"trials": TRIALS, "request_bytes": REQUEST_BYTES, "paper_p99_s": 0.0009}
        sizes["syn_interval_s"] = machine.interval_s()
        with collector_off():
            for number in range(TRIALS):
                bench.say(f"trials: {number} of {TRIALS}")
                for name, found in trials.items():
                    found.append(machine.trial(name))

    def each(statistic: Callable[[list[_Trial]], object]) -> dict[str, float]:
        return {name: float(np.asarray(statistic(found))) for name, found in trials.items()}

    def figure(number: int, values: dict[str, float], unit: str, over: str) -> Figure:
        absolute = {f"{name}_{unit}": value for name, value in values.items()}
        return Figure("killswitch", LINES[number], values["kill_switch"] / values[over], absolute, TRIALS, sizes)

    middle = each(lambda found: np.median([t.took_s for t in found]))
    late = each(lambda found: np.percentile([t.took_s for t in found], 99))
    yield figure(0, middle, "s", "libnftables")
    yield figure(1, late, "s", "libnftables")
    yield figure(2, middle, "s", "iptables")
    yield figure(3, middle, "s", "flag")
    most = each(lambda found: max(t.done_bytes for t in found))
    yield figure(4, most | {"bound": _WORK_BYTES}, "bytes", "bound")
    yield figure(5, each(lambda found: np.mean([t.begun_bytes for t in found])), "bytes", "libnftables")
    read = killswitch_launches.measure(bench.say)
    both = {"kill_switch": most["kill_switch"] + max(read), "bound": _WORK_BYTES, "launches": max(read)}
    both |= {"launches_median": float(np.median(read)), "launches_mean": float(np.mean(read))}
    sizes |= {"launch_trials": len(read), "gpus": killswitch_launches.GPUS}
    yield figure(6, both, "bytes", "bound")


SUITE = Suite("killswitch", LINES, run)
