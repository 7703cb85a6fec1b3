"""The two eBPF programs on the machine's network interface, and the memory that they share with the agent.

*Ingress* counts the received bytes by DSCP, and while the kill-switch is on it drops each TCP segment that opens a
connection (SYN without ACK) to one of the closed ports. Segments of existing connections pass.

*Egress* finds the migration flow of each packet: by the mark of its socket, else by the cgroup v2 of the socket. It
counts the flow's bytes, writes the DSCP of the flow's class into the packet, and sets the packet's priority to the HTB
class of the flow, so HTB needs no filters. All other packets are counted as flow 0 and not changed.

Both see IPv4 and IPv6. Ingress follows up to `_EXTENSIONS` extension headers of IPv6.
"""

import socket
import struct
from collections.abc import Callable

from agent.bpf import MAP, VALUE, Op, Program, Step

FLOWS = 256
"""Number of flows with counters. Flow 0 is all traffic without a flow."""
ON, DROPPED, RECEIVED, SENT = 0, 8, 64, 576
"""Offsets in the shared memory: the flag, the number of dropped segments, bytes by DSCP, counters by flow."""
SENT_BYTES = 32
"""Size of a flow's counters: bytes on the wire, bytes of TCP payload, packets, unused; 8 bytes each."""
PORTS = SENT + FLOWS * SENT_BYTES
"""Offset of one byte for each port: 1 if the kill-switch closes the port."""
MEMORY_BYTES = PORTS + (1 << 16)
FLOW = struct.Struct("<IIII")
"""A flow in the table: priority (the HTB class), number, DSCP, unused."""
FLOW_KEY = struct.Struct("<Q")
MARKED = 1 << 63
"""Bit of a key that says that it is a socket's mark; otherwise the key is the id of a cgroup v2."""
_EXTENSIONS = 4
_NEXT, _DROP = -1, 2
"""Results for TCX: continue with the next program, or drop the packet."""
_LOAD_RELATIVE, _STORE, _L3_CHECKSUM, _CGROUP_ID, _LOOKUP = 68, 9, 10, 79, 1
"""Numbers of helper functions."""
_LEN, _MARK, _PROTOCOL, _PRIORITY, _WIRE_LEN = 0, 8, 16, 32, 160
"""Offsets of fields of `struct __sk_buff`."""
_HEADER, _KEY, _TRANSPORT, _TCP_OFFSET, _IP_VERSION = -40, -48, -64, -72, -80
"""Offsets on the stack: the IP header, a key, the start of the next header, the offset of the TCP header from the IP
header (0: there is none), and 4 or 6."""
_TCP = 6
_AFTER = {0: "extension", 43: "extension", 60: "extension", 44: "fragment"}
"""Headers of IPv6 that another header follows: hop-by-hop options, routing, destination options, fragment."""


def ingress(memory: int) -> Program:
    """Returns the program for received packets; `memory` is the descriptor of the shared memory."""
    return [
        *_parse(),
        # r8 is the DSCP.
        Step(Op.MAP, 1, VALUE, constant=memory, high=RECEIVED),
        Step(Op.SHIFT_LEFT, 8, constant=3),
        Step(Op.ADD, 1, 8),
        Step(Op.LOAD, 2, 6, offset=_LEN),
        Step(Op.ATOMIC_ADD, 1, 2),
        Step(Op.MAP, 7, VALUE, constant=memory),
        Step(Op.LOAD, 1, 7, offset=ON),
        Step(Op.JUMP_IF_EQUAL, 1, constant=0, target="end"),
        Step(Op.LOAD_DOUBLE, 9, 10, offset=_TCP_OFFSET),
        Step(Op.JUMP_IF_EQUAL, 9, constant=0, target="end"),
        *_copy(_TRANSPORT, 14, lambda to: Step(Op.COPY, to, 9), otherwise="end"),
        Step(Op.LOAD_BYTE, 1, 10, offset=_TRANSPORT + 13),
        Step(Op.AND_CONSTANT, 1, constant=0x12),
        Step(Op.JUMP_UNLESS_EQUAL, 1, constant=0x02, target="end"),
        Step(Op.LOAD_HALF, 1, 10, offset=_TRANSPORT + 2),
        Step(Op.SWAP_HALF, 1, constant=16),
        Step(Op.COPY, 2, 7),
        Step(Op.ADD, 2, 1),
        Step(Op.LOAD_BYTE, 1, 2, offset=PORTS),
        Step(Op.JUMP_IF_EQUAL, 1, constant=0, target="end"),
        Step(Op.CONSTANT, 1, constant=1),
        Step(Op.ATOMIC_ADD, 7, 1, offset=DROPPED),
        Step(Op.CONSTANT, 0, constant=_DROP),
        Step(Op.EXIT),
        "end",
        Step(Op.CONSTANT, 0, constant=_NEXT),
        Step(Op.EXIT),
    ]


def egress(memory: int, flows: int, link_bytes: int) -> Program:
    """Returns the program for packets that are sent.

    `memory` and `flows` are the descriptors of the shared memory and of the table of flows; `link_bytes` is the length
    of the interface's link-layer header.
    """
    return [
        *_parse(),
        # Find the flow: by the mark, then by the cgroup. r7 becomes its number.
        Step(Op.CONSTANT, 7, constant=0),
        Step(Op.LOAD, 1, 6, offset=_MARK),
        Step(Op.JUMP_IF_EQUAL, 1, constant=0, target="cgroup"),
        Step(Op.CONSTANT, 2, constant=1),
        Step(Op.SHIFT_LEFT, 2, constant=63),
        Step(Op.OR, 1, 2),
        Step(Op.STORE_DOUBLE, 10, 1, offset=_KEY),
        *_look_up(flows),
        Step(Op.JUMP_UNLESS_EQUAL, 0, constant=0, target="found"),
        "cgroup",
        Step(Op.COPY, 1, 6),
        Step(Op.CALL, constant=_CGROUP_ID),
        Step(Op.STORE_DOUBLE, 10, 0, offset=_KEY),
        *_look_up(flows),
        Step(Op.JUMP_IF_EQUAL, 0, constant=0, target="count"),
        "found",
        Step(Op.LOAD, 1, 0, offset=0),
        Step(Op.STORE, 6, 1, offset=_PRIORITY),
        Step(Op.LOAD, 7, 0, offset=4),
        Step(Op.AND_CONSTANT, 7, constant=FLOWS - 1),
        Step(Op.LOAD, 9, 0, offset=8),
        Step(Op.JUMP_IF_SAME, 9, 8, target="count"),
        *_write_dscp(link_bytes),
        "count",
        Step(Op.MAP, 8, VALUE, constant=memory, high=SENT),
        Step(Op.SHIFT_LEFT, 7, constant=SENT_BYTES.bit_length() - 1),
        Step(Op.ADD, 8, 7),
        Step(Op.LOAD, 1, 6, offset=_WIRE_LEN),
        Step(Op.ATOMIC_ADD, 8, 1),
        Step(Op.CONSTANT, 1, constant=1),
        Step(Op.ATOMIC_ADD, 8, 1, offset=16),
        # The payload is what follows the TCP header.
        Step(Op.LOAD_DOUBLE, 9, 10, offset=_TCP_OFFSET),
        Step(Op.JUMP_IF_EQUAL, 9, constant=0, target="end"),
        *_copy(_TRANSPORT, 14, lambda to: Step(Op.COPY, to, 9), otherwise="end"),
        Step(Op.LOAD_BYTE, 2, 10, offset=_TRANSPORT + 12),
        Step(Op.SHIFT_RIGHT, 2, constant=4),
        Step(Op.SHIFT_LEFT, 2, constant=2),
        Step(Op.LOAD, 1, 6, offset=_LEN),
        Step(Op.SUBTRACT, 1, 2),
        Step(Op.SUBTRACT, 1, 9),
        Step(Op.ADD_CONSTANT, 1, constant=-link_bytes),
        Step(Op.ATOMIC_ADD, 8, 1, offset=8),
        "end",
        Step(Op.CONSTANT, 0, constant=_NEXT),
        Step(Op.EXIT),
    ]


def _parse() -> Program:
    """Copies the IP header to the stack. Afterwards r6 is the packet and r8 its DSCP.

    Jumps to `end` if the packet is neither IPv4 nor IPv6.
    """
    return [
        Step(Op.COPY, 6, 1),
        Step(Op.CONSTANT, 9, constant=0),
        Step(Op.STORE_DOUBLE, 10, 9, offset=_TCP_OFFSET),
        Step(Op.LOAD, 2, 6, offset=_PROTOCOL),
        Step(Op.JUMP_IF_EQUAL, 2, constant=socket.htons(0x0800), target="ip4"),
        Step(Op.JUMP_UNLESS_EQUAL, 2, constant=socket.htons(0x86DD), target="end"),
        *_parse_ip6(),
        "ip4",
        *_copy(_HEADER, 20, lambda to: Step(Op.CONSTANT, to, constant=0), otherwise="end"),
        Step(Op.CONSTANT, 1, constant=4),
        Step(Op.STORE_DOUBLE, 10, 1, offset=_IP_VERSION),
        Step(Op.LOAD_BYTE, 8, 10, offset=_HEADER + 1),
        Step(Op.SHIFT_RIGHT, 8, constant=2),
        Step(Op.LOAD_HALF, 1, 10, offset=_HEADER + 6),
        Step(Op.AND_CONSTANT, 1, constant=socket.htons(0x1FFF)),
        Step(Op.JUMP_UNLESS_EQUAL, 1, constant=0, target="parsed"),  # A later fragment has no TCP header.
        Step(Op.LOAD_BYTE, 9, 10, offset=_HEADER),
        Step(Op.AND_CONSTANT, 9, constant=0x0F),
        Step(Op.SHIFT_LEFT, 9, constant=2),
        Step(Op.LOAD_BYTE, 7, 10, offset=_HEADER + 9),
        "transport",
        Step(Op.JUMP_UNLESS_EQUAL, 7, constant=_TCP, target="parsed"),
        Step(Op.STORE_DOUBLE, 10, 9, offset=_TCP_OFFSET),
        "parsed",
    ]


def _parse_ip6() -> Program:
    """Parses IPv6, and continues at `transport` with the next header in r7 and its offset in r9."""
    program: Program = [
        *_copy(_HEADER, 40, lambda to: Step(Op.CONSTANT, to, constant=0), otherwise="end"),
        Step(Op.CONSTANT, 1, constant=6),
        Step(Op.STORE_DOUBLE, 10, 1, offset=_IP_VERSION),
        # The traffic class is in the second and third half byte; its upper six bits are the DSCP.
        Step(Op.LOAD_HALF, 8, 10, offset=_HEADER),
        Step(Op.SWAP_HALF, 8, constant=16),
        Step(Op.SHIFT_RIGHT, 8, constant=6),
        Step(Op.AND_CONSTANT, 8, constant=0x3F),
        Step(Op.LOAD_BYTE, 7, 10, offset=_HEADER + 6),
        Step(Op.CONSTANT, 9, constant=40),
    ]
    for number in range(_EXTENSIONS):
        program += [
            *(Step(Op.JUMP_IF_EQUAL, 7, constant=h, target=f"{kind}{number}") for h, kind in _AFTER.items()),
            Step(Op.JUMP, target="transport"),
            f"fragment{number}",
            *_copy(_TRANSPORT, 8, lambda to: Step(Op.COPY, to, 9), otherwise="parsed"),
            Step(Op.LOAD_HALF, 1, 10, offset=_TRANSPORT + 2),
            Step(Op.AND_CONSTANT, 1, constant=socket.htons(0xFFF8)),
            Step(Op.JUMP_UNLESS_EQUAL, 1, constant=0, target="parsed"),
            Step(Op.CONSTANT, 1, constant=0),
            Step(Op.JUMP, target=f"next{number}"),
            f"extension{number}",
            *_copy(_TRANSPORT, 8, lambda to: Step(Op.COPY, to, 9), otherwise="parsed"),
            Step(Op.LOAD_BYTE, 1, 10, offset=_TRANSPORT + 1),
            Step(Op.SHIFT_LEFT, 1, constant=3),
            f"next{number}",
            Step(Op.ADD_CONSTANT, 1, constant=8),
            Step(Op.ADD, 9, 1),
            Step(Op.LOAD_BYTE, 7, 10, offset=_TRANSPORT),
        ]
    return [*program, Step(Op.JUMP, target="transport")]


def _copy(to: int, size_bytes: int, offset: Callable[[int], Step], otherwise: str) -> Program:
    """Copies bytes of the packet to the stack, or jumps to `otherwise` if the packet is too short.

    `offset` returns the step that loads the offset from the IP header into a register.
    """
    return [
        Step(Op.COPY, 1, 6),
        offset(2),
        Step(Op.COPY, 3, 10),
        Step(Op.ADD_CONSTANT, 3, constant=to),
        Step(Op.CONSTANT, 4, constant=size_bytes),
        Step(Op.CONSTANT, 5, constant=1),  # Relative to the IP header.
        Step(Op.CALL, constant=_LOAD_RELATIVE),
        Step(Op.JUMP_UNLESS_EQUAL, 0, constant=0, target=otherwise),
    ]


def _look_up(flows: int) -> Program:
    return [
        Step(Op.MAP, 1, MAP, constant=flows),
        Step(Op.COPY, 2, 10),
        Step(Op.ADD_CONSTANT, 2, constant=_KEY),
        Step(Op.CALL, constant=_LOOKUP),
    ]


def _write_dscp(link_bytes: int) -> Program:
    """Writes the DSCP in r9 into the packet, with the checksum of IPv4. Keeps r6 and r7."""
    return [
        Step(Op.LOAD_DOUBLE, 1, 10, offset=_IP_VERSION),
        Step(Op.LOAD_HALF, 8, 10, offset=_HEADER),
        Step(Op.JUMP_IF_EQUAL, 1, constant=6, target="dscp6"),
        Step(Op.LOAD_BYTE, 1, 10, offset=_HEADER + 1),
        Step(Op.AND_CONSTANT, 1, constant=0x03),
        Step(Op.SHIFT_LEFT, 9, constant=2),
        Step(Op.OR, 1, 9),
        Step(Op.STORE_BYTE, 10, 1, offset=_HEADER + 1),
        # The checksum changes by the difference of the first two bytes, before (r8) and after.
        Step(Op.COPY, 1, 6),
        Step(Op.CONSTANT, 2, constant=link_bytes + 10),
        Step(Op.COPY, 3, 8),
        Step(Op.LOAD_HALF, 4, 10, offset=_HEADER),
        Step(Op.CONSTANT, 5, constant=2),
        Step(Op.CALL, constant=_L3_CHECKSUM),
        Step(Op.JUMP, target="store"),
        "dscp6",
        Step(Op.SWAP_HALF, 8, constant=16),
        Step(Op.AND_CONSTANT, 8, constant=0xF03F),
        Step(Op.SHIFT_LEFT, 9, constant=6),
        Step(Op.OR, 8, 9),
        Step(Op.SWAP_HALF, 8, constant=16),
        Step(Op.STORE_HALF, 10, 8, offset=_HEADER),
        "store",
        Step(Op.COPY, 1, 6),
        Step(Op.CONSTANT, 2, constant=link_bytes),
        Step(Op.COPY, 3, 10),
        Step(Op.ADD_CONSTANT, 3, constant=_HEADER),
        Step(Op.CONSTANT, 4, constant=2),
        Step(Op.CONSTANT, 5, constant=0),
        Step(Op.CALL, constant=_STORE),
    ]
