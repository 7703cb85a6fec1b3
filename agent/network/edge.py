"""Attaches the eBPF programs of a machine's network interface, and reads and writes their shared memory.

The programs are attached by TCX links (Linux 6.6 or newer). The kernel detaches the programs when this process ends for
any reason, so nothing remains on the interface. A flow is the traffic of one migration; its key says which packets
belong to it, its mark the class of its traffic (P3, section VII of ReclaimNet).
"""

import fcntl
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agent.bpf import HashMap, Hook, ProgramType, SharedMemory, link, load
from agent.network import interface_programs
from agent.network.interface_programs import FLOW, FLOW_KEY, FLOWS, MARKED
from domain.traffic import TrafficClass


@dataclass(frozen=True)
class MigrationFlow:
    """The traffic of one migration that leaves this machine."""

    name: str
    """Name in messages, for example the id of the run."""
    traffic: TrafficClass
    key: bytes
    """The key of the flow in the table of the egress program."""

    @classmethod
    def of_cgroup(cls, name: str, traffic: TrafficClass, path: Path | str) -> Self:
        """Returns the flow of all sockets that processes of the cgroup v2 at `path` create; not of child cgroups.

        A task cannot leave its cgroup, so a task cannot change its class.

        Raises:
            OSError: the cgroup does not exist.
        """
        return cls(name, _migration(traffic), FLOW_KEY.pack(Path(path).stat().st_ino))

    @classmethod
    def of_mark(cls, name: str, traffic: TrafficClass, mark: int) -> Self:
        """Returns the flow of the sockets with this mark (`SO_MARK`), which only root can set: for tests and benches.

        Raises:
            ValueError: `mark` is not a positive number of 32 bits.
        """
        if not 0 < mark < 1 << 32:
            raise ValueError(f"mark {mark}: must be within 1 to {(1 << 32) - 1}")
        return cls(name, _migration(traffic), FLOW_KEY.pack(mark | MARKED))


def _migration(traffic: TrafficClass) -> TrafficClass:
    if traffic is TrafficClass.RESEARCH:
        raise ValueError(f"traffic {traffic.value!r}: research traffic has no flow; use another class")
    return traffic


_SIOCGIFHWADDR = 0x8927
_LINK_BYTES = {1: 14, 65534: 0}
"""Length of the link-layer header by type of interface (`ARPHRD_ETHER`, `ARPHRD_NONE`)."""


@dataclass(frozen=True)
class Sent:
    """The bytes sent on the interface since the programs were attached."""

    wire_bytes: int
    """Bytes with the headers of IP, TCP and the link layer."""
    payload_bytes: int
    """Bytes of TCP payload, including retransmissions."""
    packets: int
    """Number of packets as the network stack hands them to the interface; one may be split into many on the wire."""


class KillSwitch:
    """Refuses new connections to the closed ports of this machine. Existing connections continue.

    The flag is a word in memory that the kernel's program reads for each packet, so switching takes one store. The flag
    ends with this process: after a restart, the agent switches it on again from its own durable record.
    """

    def __init__(self, memory: memoryview, *, in_kernel: bool) -> None:
        self._flag = memory[interface_programs.ON : interface_programs.ON + 4].cast("I")
        self._dropped = memory[interface_programs.DROPPED : interface_programs.DROPPED + 8].cast("Q")
        self.in_kernel = in_kernel
        """Whether the kernel drops packets. Otherwise the flag is only for the agent's own checks."""

    def on(self) -> None:
        """Refuses new connections from now on."""
        self._flag[0] = 1

    def off(self) -> None:
        """Permits new connections again."""
        self._flag[0] = 0

    @property
    def is_on(self) -> bool:
        """Whether new connections are refused."""
        return bool(self._flag[0])

    @property
    def dropped(self) -> int:
        """Number of segments that were dropped since the programs were attached."""
        return self._dropped[0]


class Edge:
    """The programs on one interface. Thread-safe except for `add`, `drop` and `close`."""

    def __init__(self, interface: str, ports: Iterable[int]) -> None:
        """Attaches the programs to an interface of this network namespace. The kill-switch closes `ports`.

        Raises:
            OSError: the interface does not exist, or it is not an Ethernet or tunnel interface; or this process is not
                root; or the kernel is older than 6.6.
            ValueError: one of the ports is invalid.
        """
        self.interface = interface
        link_bytes = _link_bytes(interface)
        with ExitStack() as opened:
            shared = SharedMemory(interface_programs.MEMORY_BYTES, "mizzen_edge")
            opened.callback(shared.close)
            self._flows = HashMap(FLOW_KEY.size, FLOW.size, FLOWS, "mizzen_flows")
            opened.callback(self._flows.close)
            memory = shared.memory
            for port in ports:
                if not 0 < port < 1 << 16:
                    raise ValueError(f"port {port}: must be within 1 to 65535")
                memory[interface_programs.PORTS + port] = 1
            index = socket.if_nametoindex(interface)
            for hook, program in (
                (Hook.TCX_INGRESS, interface_programs.ingress(shared.map)),
                (Hook.TCX_EGRESS, interface_programs.egress(shared.map, self._flows.map, link_bytes)),
            ):
                descriptor = load(program, ProgramType.SCHED_CLS, hook, "mizzen_edge")
                try:
                    opened.callback(os.close, link(descriptor, index, hook))
                finally:
                    os.close(descriptor)
            self._opened = opened.pop_all()
        self.kill_switch = KillSwitch(memory, in_kernel=True)
        self._received = memory[interface_programs.RECEIVED : interface_programs.SENT].cast("Q")
        self._sent = memory[interface_programs.SENT : interface_programs.PORTS].cast("Q")

    def add(self, flow: MigrationFlow, number: int, priority: int) -> None:
        """Puts the packets of `flow` in an HTB class (`priority`), and counts them as `number` (1 to `FLOWS` - 1).

        Raises:
            OSError: there are too many flows.
        """
        self._flows.put(flow.key, FLOW.pack(priority, number, flow.traffic.dscp, 0))

    def drop(self, flow: MigrationFlow) -> None:
        """Ends a flow: its packets are no longer changed.

        Raises:
            OSError: there is no such flow.
        """
        self._flows.drop(flow.key)

    def received_bytes(self, traffic: TrafficClass) -> int:
        """Returns the bytes of IP packets with the DSCP of this class that arrived since the programs were attached."""
        return self._received[traffic.dscp]

    def sent(self, number: int = 0) -> Sent:
        """Returns the bytes sent by flow `number`; 0: by all traffic without a flow. Costs no system call."""
        return Sent(*self._sent[number * 4 : number * 4 + 3])

    def close(self) -> None:
        """Detaches the interface_programs. Idempotent."""
        self._opened.close()


def _link_bytes(interface: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFHWADDR, struct.pack("16s24x", interface.encode()))
        except OSError as error:
            raise OSError(error.errno, f"interface {interface}: {os.strerror(error.errno or 0)}") from None
    kind: int = struct.unpack_from("<H", answer, 16)[0]
    if kind not in _LINK_BYTES:
        raise OSError(f"interface {interface}: type {kind} is not supported; use an Ethernet or tunnel interface")
    return _LINK_BYTES[kind]
