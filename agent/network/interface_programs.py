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

from agent.bpf import MAP, VALUE, Instruction, Op, Program

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
        Instruction(Op.MAP, 1, VALUE, constant=memory, high=RECEIVED),
        Instruction(Op.SHIFT_LEFT, 8, constant=3),
        Instruction(Op.ADD, 1, 8),
        Instruction(Op.LOAD, 2, 6, offset=_LEN),
        Instruction(Op.ATOMIC_ADD, 1, 2),
        Instruction(Op.MAP, 7, VALUE, constant=memory),
        Instruction(Op.LOAD, 1, 7, offset=ON),
        Instruction(Op.JUMP_IF_EQUAL, 1, constant=0, target="end"),
        Instruction(Op.LOAD_DOUBLE, 9, 10, offset=_TCP_OFFSET),
        Instruction(Op.JUMP_IF_EQUAL, 9, constant=0, target="end"),
        *_copy(_TRANSPORT, 14, lambda to: Instruction(Op.COPY, to, 9), otherwise="end"),
        Instruction(Op.LOAD_BYTE, 1, 10, offset=_TRANSPORT + 13),
        Instruction(Op.AND_CONSTANT, 1, constant=0x12),
        Instruction(Op.JUMP_UNLESS_EQUAL, 1, constant=0x02, target="end"),
        Instruction(Op.LOAD_HALF, 1, 10, offset=_TRANSPORT + 2),
        Instruction(Op.SWAP_HALF, 1, constant=16),
        Instruction(Op.COPY, 2, 7),
        Instruction(Op.ADD, 2, 1),
        Instruction(Op.LOAD_BYTE, 1, 2, offset=PORTS),
        Instruction(Op.JUMP_IF_EQUAL, 1, constant=0, target="end"),
        Instruction(Op.CONSTANT, 1, constant=1),
        Instruction(Op.ATOMIC_ADD, 7, 1, offset=DROPPED),
        Instruction(Op.CONSTANT, 0, constant=_DROP),
        Instruction(Op.EXIT),
        "end",
        Instruction(Op.CONSTANT, 0, constant=_NEXT),
        Instruction(Op.EXIT),
    ]


def egress(memory: int, flows: int, link_bytes: int) -> Program:
    """Returns the program for packets that are sent.

    `memory` and `flows` are the descriptors of the shared memory and of the table of flows; `link_bytes` is the length
    of the interface's link-layer header.
    """
    return [
        *_parse(),
        # Find the flow: by the mark, then by the cgroup. r7 becomes its number.
        Instruction(Op.CONSTANT, 7, constant=0),
        Instruction(Op.LOAD, 1, 6, offset=_MARK),
        Instruction(Op.JUMP_IF_EQUAL, 1, constant=0, target="cgroup"),
        Instruction(Op.CONSTANT, 2, constant=1),
        Instruction(Op.SHIFT_LEFT, 2, constant=63),
        Instruction(Op.OR, 1, 2),
        Instruction(Op.STORE_DOUBLE, 10, 1, offset=_KEY),
        *_look_up(flows),
        Instruction(Op.JUMP_UNLESS_EQUAL, 0, constant=0, target="found"),
        "cgroup",
        Instruction(Op.COPY, 1, 6),
        Instruction(Op.CALL, constant=_CGROUP_ID),
        Instruction(Op.STORE_DOUBLE, 10, 0, offset=_KEY),
        *_look_up(flows),
        Instruction(Op.JUMP_IF_EQUAL, 0, constant=0, target="count"),
        "found",
        Instruction(Op.LOAD, 1, 0, offset=0),
        Instruction(Op.STORE, 6, 1, offset=_PRIORITY),
        Instruction(Op.LOAD, 7, 0, offset=4),
        Instruction(Op.AND_CONSTANT, 7, constant=FLOWS - 1),
        Instruction(Op.LOAD, 9, 0, offset=8),
        Instruction(Op.JUMP_IF_SAME, 9, 8, target="count"),
        *_write_dscp(link_bytes),
        "count",
        Instruction(Op.MAP, 8, VALUE, constant=memory, high=SENT),
        Instruction(Op.SHIFT_LEFT, 7, constant=SENT_BYTES.bit_length() - 1),
        Instruction(Op.ADD, 8, 7),
        Instruction(Op.LOAD, 1, 6, offset=_WIRE_LEN),
        Instruction(Op.ATOMIC_ADD, 8, 1),
        Instruction(Op.CONSTANT, 1, constant=1),
        Instruction(Op.ATOMIC_ADD, 8, 1, offset=16),
        # The payload is what follows the TCP header.
        Instruction(Op.LOAD_DOUBLE, 9, 10, offset=_TCP_OFFSET),
        Instruction(Op.JUMP_IF_EQUAL, 9, constant=0, target="end"),
        *_copy(_TRANSPORT, 14, lambda to: Instruction(Op.COPY, to, 9), otherwise="end"),
        Instruction(Op.LOAD_BYTE, 2, 10, offset=_TRANSPORT + 12),
        Instruction(Op.SHIFT_RIGHT, 2, constant=4),
        Instruction(Op.SHIFT_LEFT, 2, constant=2),
        Instruction(Op.LOAD, 1, 6, offset=_LEN),
        Instruction(Op.SUBTRACT, 1, 2),
        Instruction(Op.SUBTRACT, 1, 9),
        Instruction(Op.ADD_CONSTANT, 1, constant=-link_bytes),
        Instruction(Op.ATOMIC_ADD, 8, 1, offset=8),
        "end",
        Instruction(Op.CONSTANT, 0, constant=_NEXT),
        Instruction(Op.EXIT),
    ]


def _parse() -> Program:
    """Copies the IP header to the stack. Afterwards r6 is the packet and r8 its DSCP.

    Jumps to `end` if the packet is neither IPv4 nor IPv6.
    """
    return [
        Instruction(Op.COPY, 6, 1),
        Instruction(Op.CONSTANT, 9, constant=0),
        Instruction(Op.STORE_DOUBLE, 10, 9, offset=_TCP_OFFSET),
        Instruction(Op.LOAD, 2, 6, offset=_PROTOCOL),
        Instruction(Op.JUMP_IF_EQUAL, 2, constant=socket.htons(0x0800), target="ip4"),
        Instruction(Op.JUMP_UNLESS_EQUAL, 2, constant=socket.htons(0x86DD), target="end"),
        *_parse_ip6(),
        "ip4",
        *_copy(_HEADER, 20, lambda to: Instruction(Op.CONSTANT, to, constant=0), otherwise="end"),
        Instruction(Op.CONSTANT, 1, constant=4),
        Instruction(Op.STORE_DOUBLE, 10, 1, offset=_IP_VERSION),
        Instruction(Op.LOAD_BYTE, 8, 10, offset=_HEADER + 1),
        Instruction(Op.SHIFT_RIGHT, 8, constant=2),
        Instruction(Op.LOAD_HALF, 1, 10, offset=_HEADER + 6),
        Instruction(Op.AND_CONSTANT, 1, constant=socket.htons(0x1FFF)),
        Instruction(Op.JUMP_UNLESS_EQUAL, 1, constant=0, target="parsed"),  # A later fragment has no TCP header.
        Instruction(Op.LOAD_BYTE, 9, 10, offset=_HEADER),
        Instruction(Op.AND_CONSTANT, 9, constant=0x0F),
        Instruction(Op.SHIFT_LEFT, 9, constant=2),
        Instruction(Op.LOAD_BYTE, 7, 10, offset=_HEADER + 9),
        "transport",
        Instruction(Op.JUMP_UNLESS_EQUAL, 7, constant=_TCP, target="parsed"),
        Instruction(Op.STORE_DOUBLE, 10, 9, offset=_TCP_OFFSET),
        "parsed",
    ]


def _parse_ip6() -> Program:
    """Parses IPv6, and continues at `transport` with the next header in r7 and its offset in r9."""
    program: Program = [
        *_copy(_HEADER, 40, lambda to: Instruction(Op.CONSTANT, to, constant=0), otherwise="end"),
        Instruction(Op.CONSTANT, 1, constant=6),
        Instruction(Op.STORE_DOUBLE, 10, 1, offset=_IP_VERSION),
        # The traffic class is in the second and third half byte; its upper six bits are the DSCP.
        Instruction(Op.LOAD_HALF, 8, 10, offset=_HEADER),
        Instruction(Op.SWAP_HALF, 8, constant=16),
        Instruction(Op.SHIFT_RIGHT, 8, constant=6),
        Instruction(Op.AND_CONSTANT, 8, constant=0x3F),
        Instruction(Op.LOAD_BYTE, 7, 10, offset=_HEADER + 6),
        Instruction(Op.CONSTANT, 9, constant=40),
    ]
    for number in range(_EXTENSIONS):
        program += [
            *(Instruction(Op.JUMP_IF_EQUAL, 7, constant=h, target=f"{kind}{number}") for h, kind in _AFTER.items()),
            Instruction(Op.JUMP, target="transport"),
            f"fragment{number}",
            *_copy(_TRANSPORT, 8, lambda to: Instruction(Op.COPY, to, 9), otherwise="parsed"),
            Instruction(Op.LOAD_HALF, 1, 10, offset=_TRANSPORT + 2),
            Instruction(Op.AND_CONSTANT, 1, constant=socket.htons(0xFFF8)),
            Instruction(Op.JUMP_UNLESS_EQUAL, 1, constant=0, target="parsed"),
            Instruction(Op.CONSTANT, 1, constant=0),
            Instruction(Op.JUMP, target=f"next{number}"),
            f"extension{number}",
            *_copy(_TRANSPORT, 8, lambda to: Instruction(Op.COPY, to, 9), otherwise="parsed"),
            Instruction(Op.LOAD_BYTE, 1, 10, offset=_TRANSPORT + 1),
            Instruction(Op.SHIFT_LEFT, 1, constant=3),
            f"next{number}",
            Instruction(Op.ADD_CONSTANT, 1, constant=8),
            Instruction(Op.ADD, 9, 1),
            Instruction(Op.LOAD_BYTE, 7, 10, offset=_TRANSPORT),
        ]
    return [*program, Instruction(Op.JUMP, target="transport")]


def _copy(to: int, size_bytes: int, offset: Callable[[int], Instruction], otherwise: str) -> Program:
    """Copies bytes of the packet to the stack, or jumps to `otherwise` if the packet is too short.

    `offset` returns the step that loads the offset from the IP header into a register.
    """
    return [
        Instruction(Op.COPY, 1, 6),
        offset(2),
        Instruction(Op.COPY, 3, 10),
        Instruction(Op.ADD_CONSTANT, 3, constant=to),
        Instruction(Op.CONSTANT, 4, constant=size_bytes),
        Instruction(Op.CONSTANT, 5, constant=1),  # Relative to the IP header.
        Instruction(Op.CALL, constant=_LOAD_RELATIVE),
        Instruction(Op.JUMP_UNLESS_EQUAL, 0, constant=0, target=otherwise),
    ]


def _look_up(flows: int) -> Program:
    return [
        Instruction(Op.MAP, 1, MAP, constant=flows),
        Instruction(Op.COPY, 2, 10),
        Instruction(Op.ADD_CONSTANT, 2, constant=_KEY),
        Instruction(Op.CALL, constant=_LOOKUP),
    ]


def _write_dscp(link_bytes: int) -> Program:
    """Writes the DSCP in r9 into the packet, with the checksum of IPv4. Keeps r6 and r7."""
    return [
        Instruction(Op.LOAD_DOUBLE, 1, 10, offset=_IP_VERSION),
        Instruction(Op.LOAD_HALF, 8, 10, offset=_HEADER),
        Instruction(Op.JUMP_IF_EQUAL, 1, constant=6, target="dscp6"),
        Instruction(Op.LOAD_BYTE, 1, 10, offset=_HEADER + 1),
        Instruction(Op.AND_CONSTANT, 1, constant=0x03),
        Instruction(Op.SHIFT_LEFT, 9, constant=2),
        Instruction(Op.OR, 1, 9),
        Instruction(Op.STORE_BYTE, 10, 1, offset=_HEADER + 1),
        # The checksum changes by the difference of the first two bytes, before (r8) and after.
        Instruction(Op.COPY, 1, 6),
        Instruction(Op.CONSTANT, 2, constant=link_bytes + 10),
        Instruction(Op.COPY, 3, 8),
        Instruction(Op.LOAD_HALF, 4, 10, offset=_HEADER),
        Instruction(Op.CONSTANT, 5, constant=2),
        Instruction(Op.CALL, constant=_L3_CHECKSUM),
        Instruction(Op.JUMP, target="store"),
        "dscp6",
        Instruction(Op.SWAP_HALF, 8, constant=16),
        Instruction(Op.AND_CONSTANT, 8, constant=0xF03F),
        Instruction(Op.SHIFT_LEFT, 9, constant=6),
        Instruction(Op.OR, 8, 9),
        Instruction(Op.SWAP_HALF, 8, constant=16),
        Instruction(Op.STORE_HALF, 10, 8, offset=_HEADER),
        "store",
        Instruction(Op.COPY, 1, 6),
        Instruction(Op.CONSTANT, 2, constant=link_bytes),
        Instruction(Op.COPY, 3, 10),
        Instruction(Op.ADD_CONSTANT, 3, constant=_HEADER),
        Instruction(Op.CONSTANT, 4, constant=2),
        Instruction(Op.CONSTANT, 5, constant=0),
        Instruction(Op.CALL, constant=_STORE),
    ]
