"""eBPF programs written as instructions: assembles and loads them, and creates the maps that they use.

The agent's programs have at most a few dozen instructions each. Written as instructions they need neither a compiler
nor libbpf on the machine (`docs/decisions/0007-port-maps.md`).
"""

import ctypes
import mmap
import os
import platform
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

_SYSCALL = {"x86_64": 321, "aarch64": 280}
"""Number of the system call `bpf` by architecture."""
_MAP_CREATE, _MAP_UPDATE, _MAP_DELETE = 0, 2, 3
_PROG_LOAD, _PROG_ATTACH, _PROG_DETACH = 5, 8, 9
_LINK_CREATE = 28
_HASH, _ARRAY = 1, 2
_MMAPABLE = 1 << 10
_ALLOW_MULTI = 2
"""Flag with which programs of parent cgroups, for example of systemd, stay in force."""
_LOG_BYTES = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)


class Op(IntEnum):
    """Instructions. `JUMP_IF_…_32` compares the lower 32 bits with a constant; constants are sign-extended."""

    JUMP = 0x05
    ADD_CONSTANT = 0x07
    ADD = 0x0F
    JUMP_IF_EQUAL = 0x15
    JUMP_IF_EQUAL_32 = 0x16
    MAP = 0x18
    """Loads the address of the map with the descriptor `constant`. The instruction takes two places."""
    JUMP_IF_SAME = 0x1D
    SUBTRACT = 0x1F
    MULTIPLY_CONSTANT = 0x27
    JUMP_IF_AT_LEAST = 0x3D
    """Compares two registers as unsigned 64-bit numbers."""
    OR = 0x4F
    JUMP_UNLESS_EQUAL = 0x55
    JUMP_UNLESS_EQUAL_32 = 0x56
    AND_CONSTANT = 0x57
    LOAD = 0x61
    STORE = 0x63
    SHIFT_LEFT = 0x67
    LOAD_HALF = 0x69
    STORE_HALF = 0x6B
    LOAD_BYTE = 0x71
    STORE_BYTE = 0x73
    SHIFT_RIGHT = 0x77
    LOAD_DOUBLE = 0x79
    STORE_DOUBLE = 0x7B
    CALL = 0x85
    """Calls helper function number `constant` with registers 1 to 5; the result is in register 0."""
    EXIT = 0x95
    CONSTANT = 0xB7
    COPY = 0xBF
    ATOMIC_ADD = 0xDB
    """Adds a register to 8 bytes in memory."""
    SWAP_HALF = 0xDC
    """Converts a register between network and host byte order; `constant` is the number of bits."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of an eBPF program."""

    op: Op
    to: int = 0
    """Number of the register that is written or compared."""
    source: int = 0
    constant: int = 0
    offset: int = 0
    target: str = ""
    """With a jump: the label to which it jumps."""
    high: int = 0
    """With `Op.MAP`: the offset within the map's first value, if `source` is `VALUE`."""


Program = list[Instruction | str]
"""Instructions and labels. Register 0 is the result, register 1 the argument of the program, register 10 the end of a
stack of 512 bytes."""
MAP, VALUE = 1, 2
"""`Instruction.source` of `Op.MAP`: the map itself, as an argument of a helper function, or the address of its
first value."""


class Hook(IntEnum):
    """Places of the kernel at which programs are attached (`enum bpf_attach_type`)."""

    INET_INGRESS = 0
    INET_SOCK_CREATE = 2
    DEVICE = 6
    BIND4 = 8
    BIND6 = 9
    CONNECT4 = 10
    CONNECT6 = 11
    SENDMSG4 = 14
    SENDMSG6 = 15
    GETSOCKNAME4 = 31
    GETSOCKNAME6 = 32
    SK_LOOKUP = 36
    TCX_INGRESS = 46
    TCX_EGRESS = 47


class SockAddress(IntEnum):
    """Offset of a field of `struct bpf_sock_addr`. Addresses and the port are in network byte order."""

    IP4 = 4
    IP6 = 8
    PORT = 24
    TYPE = 32


class ProgramType(IntEnum):
    """Types of programs (`enum bpf_prog_type`)."""

    SCHED_CLS = 3
    """Sees the packets of a network interface."""
    CGROUP_SKB = 8
    """Sees the packets of sockets."""
    CGROUP_SOCK = 9
    """Sees and changes new sockets."""
    CGROUP_DEVICE = 15
    """Sees which device is opened or made."""
    CGROUP_SOCK_ADDR = 18
    """Sees and changes the address in a system call of a socket."""
    SK_LOOKUP = 30
    """Chooses the listening socket of a new connection in a network namespace."""


def load(program: Program, kind: ProgramType, hook: Hook, name: str) -> int:
    """Loads a program into the kernel, and returns its descriptor, which is closed on exec.

    Raises:
        OSError: this process may not load eBPF programs, or the kernel does not accept this one.
    """
    code = _encode(program)
    body = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"Apache-2.0")

    def attributes(log: "ctypes.Array[ctypes.c_char] | None" = None) -> bytes:
        # Type, number of instructions, their address, licence, log (level, size, address), kernel version, flags, name,
        # network interface, and the hook.
        addresses = ctypes.addressof(body), ctypes.addressof(licence)
        told = (0, 0, 0) if log is None else (1, _LOG_BYTES, ctypes.addressof(log))
        rest = 0, 0, name.encode(), 0, hook
        return struct.pack("<IIQQIIQII16sII", kind, len(code) // 8, *addresses, *told, *rest)

    try:
        return _bpf(_PROG_LOAD, attributes())
    except OSError as error:
        log = ctypes.create_string_buffer(_LOG_BYTES)
        try:  # Load it again with the log enabled, to get the verifier's reason.
            return _bpf(_PROG_LOAD, attributes(log))
        except OSError:
            lines = log.value.decode(errors="replace").strip().splitlines()
            reason = next(
                (line for line in reversed(lines) if line and not line.startswith(("processed", "verif"))), ""
            )
            raise OSError(
                error.errno, f"{error.strerror} (program {name}: {reason})" if reason else error.strerror
            ) from None


def attach_to_cgroup(cgroup: int, programs: dict[Hook, int]) -> None:
    """Attaches programs to the cgroup v2 with descriptor `cgroup`: all of them or none. They end with the cgroup.

    Raises:
        OSError: this process may not attach programs, or the kernel does not have one of the hooks.
    """
    attached: list[Hook] = []
    try:
        for hook, program in programs.items():
            _bpf(_PROG_ATTACH, struct.pack("<IIII", cgroup, program, hook, _ALLOW_MULTI))
            attached.append(hook)
    except OSError:
        for hook in attached:
            _bpf(_PROG_DETACH, struct.pack("<IIII", cgroup, programs[hook], hook, 0))
        raise


def link(program: int, target: int, hook: Hook) -> int:
    """Attaches a program to a network interface (its index) or a network namespace (a descriptor); returns the link.

    The kernel detaches the program when the last copy of the link's descriptor is closed, for example at the end of the
    process. The descriptor is closed on exec.

    Raises:
        OSError: this process may not attach programs, or the kernel does not have the hook.
    """
    return _bpf(_LINK_CREATE, struct.pack("<IIII16x", program, target, hook, 0))


class SharedMemory:
    """A value that is shared with programs: a program has its address, and this process maps it into memory."""

    def __init__(self, size_bytes: int, name: str) -> None:
        """Creates the value, which is zero.

        Raises:
            OSError: this process may not create maps, or the kernel does not support them.
        """
        self.map = _create(_ARRAY, 4, size_bytes, 1, name, _MMAPABLE)
        try:
            self._mapped = mmap.mmap(self.map, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except OSError:
            os.close(self.map)
            raise
        self.memory = memoryview(self._mapped)[:size_bytes]

    def close(self) -> None:
        """Closes the descriptor of the map. `memory` stays mapped; the kernel keeps the map while a program uses it."""
        os.close(self.map)


class HashMap:
    """A table with keys and values of fixed sizes, which programs read."""

    def __init__(self, key_bytes: int, value_bytes: int, entries: int, name: str) -> None:
        """Creates an empty table for at most `entries` entries.

        Raises:
            OSError: this process may not create maps.
        """
        self.map = _create(_HASH, key_bytes, value_bytes, entries, name, 0)

    def put(self, key: bytes, value: bytes) -> None:
        """Adds or replaces an entry.

        Raises:
            OSError: the table is full.
        """
        self._change(_MAP_UPDATE, key, value)

    def drop(self, key: bytes) -> None:
        """Removes an entry.

        Raises:
            OSError: there is no such entry.
        """
        self._change(_MAP_DELETE, key)

    def close(self) -> None:
        """Closes the table; programs that use it keep it."""
        os.close(self.map)

    def _change(self, command: int, *parts: bytes) -> None:
        buffers = [ctypes.create_string_buffer(data, len(data)) for data in parts]
        addresses = [ctypes.addressof(buffer) for buffer in buffers]
        _bpf(command, struct.pack(f"<I4x{len(addresses)}Q", self.map, *addresses))


def _create(kind: int, key_bytes: int, value_bytes: int, entries: int, name: str, flags: int) -> int:
    attributes = struct.pack("<IIIIIII16s", kind, key_bytes, value_bytes, entries, flags, 0, 0, name.encode())
    return _bpf(_MAP_CREATE, attributes)


def _encode(program: Iterable[Instruction | str]) -> bytes:
    steps: list[Instruction] = []
    labels: dict[str, int] = {}
    places: list[int] = []
    size = 0
    for item in program:
        if isinstance(item, str):
            labels[item] = size
        else:
            steps.append(item)
            places.append(size)
            size += 2 if item.op is Op.MAP else 1
    code = b""
    for step, place in zip(steps, places, strict=True):
        offset = labels[step.target] - place - 1 if step.target else step.offset
        code += struct.pack("<BBhi", step.op, step.to | step.source << 4, offset, _signed(step.constant))
        if step.op is Op.MAP:
            code += struct.pack("<BBhi", 0, 0, 0, step.high)
    return code


def _signed(constant: int) -> int:
    return constant - (1 << 32) if constant >= 1 << 31 else constant


def _bpf(command: int, attributes: bytes) -> int:
    if platform.machine() not in _SYSCALL or sys.byteorder != "little":
        raise OSError(f"eBPF programs are not supported on {platform.machine()}")
    body = ctypes.create_string_buffer(attributes, len(attributes))
    result: int = _libc.syscall(_SYSCALL[platform.machine()], command, body, len(attributes))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)} (a request to the kernel to load or attach an eBPF program)")
    return result
