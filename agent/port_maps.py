"""Maps a fixed port of a task to another port of the machine, so that several tasks can listen on the same fixed port.

Small eBPF programs on the task's cgroup v2 replace the port in system calls of the task's processes: in `bind`, in
`connect` to a loopback address, and in the result of `getsockname`. The task listens on the other port without any
change of its own; the network of the machine is not changed, and there is no proxy. Only TCP is mapped.
`docs/decisions/0007-port-maps.md` has the reasons.
"""

import ctypes
import os
import platform
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

_SYSCALL = {"x86_64": 321, "aarch64": 280}
"""Number of the system call `bpf` by architecture."""
_PROG_LOAD, _PROG_ATTACH, _PROG_DETACH = 5, 8, 9
_CGROUP_SOCK_ADDR = 18
"""Type of programs that see and change the address in a system call of a socket."""
_ALLOW_MULTI = 2
"""Programs of other cgroups above, for example of systemd, stay in force."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Hook(IntEnum):
    BIND4 = 8
    BIND6 = 9
    CONNECT4 = 10
    CONNECT6 = 11
    GETSOCKNAME4 = 31
    GETSOCKNAME6 = 32


class _Field(IntEnum):
    """Offset of a field of `struct bpf_sock_addr`. Addresses and the port are in network byte order."""

    IP4 = 4
    IP6 = 8
    PORT = 24
    TYPE = 32


class _Op(IntEnum):
    """Instructions of eBPF. Conditional jumps compare 32 bits with a constant."""

    JUMP = 0x05
    JUMP_IF_EQUAL = 0x16
    OR = 0x4F
    JUMP_UNLESS_EQUAL = 0x56
    AND_CONSTANT = 0x57
    LOAD = 0x61
    STORE = 0x63
    EXIT = 0x95
    CONSTANT = 0xB7


@dataclass(frozen=True)
class _Step:
    op: _Op
    to: int = 0
    """Number of the register that is written or compared."""
    source: int = 0
    constant: int = 0
    offset: int = 0
    target: str = ""
    """With a jump: the label to which it jumps."""


_Program = list[_Step | str]
"""Instructions and labels. Register 0 is the result, register 1 points to the address of the system call."""


def map_port(cgroup: str, inside: int, outside: int) -> None:
    """Makes processes in the cgroup v2 at path `cgroup` that bind port `inside` listen on port `outside` instead.

    The map applies to sockets that are created after this call. It ends with the cgroup, and needs no process.

    Raises:
        OSError: this process may not load or attach eBPF programs, or the kernel does not support them.
    """
    if platform.machine() not in _SYSCALL or sys.byteorder != "little":
        raise OSError(f"port maps are not supported on {platform.machine()}")
    programs: dict[_Hook, int] = {}
    attached: list[_Hook] = []
    folder = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for hook in _Hook:
            programs[hook] = _load(_program(hook, inside, outside), hook)
        for hook, program in programs.items():
            _bpf(_PROG_ATTACH, struct.pack("<IIII", folder, program, hook, _ALLOW_MULTI))
            attached.append(hook)
    except OSError:
        for hook in attached:
            _bpf(_PROG_DETACH, struct.pack("<IIII", folder, programs[hook], hook, 0))
        raise
    finally:
        for descriptor in (folder, *programs.values()):
            os.close(descriptor)


def _program(hook: _Hook, inside: int, outside: int) -> _Program:
    """Returns a program that replaces one port: `inside` by `outside`, or the reverse for `getsockname`."""
    old, new = (outside, inside) if hook in (_Hook.GETSOCKNAME4, _Hook.GETSOCKNAME6) else (inside, outside)
    conditions = {_Hook.CONNECT4: _if_loopback4(), _Hook.CONNECT6: _if_loopback6()}.get(hook, [])
    return [
        _Step(_Op.CONSTANT, 0, constant=1),  # Allow the system call, whether the port is replaced or not.
        _Step(_Op.LOAD, 2, 1, offset=_Field.TYPE),
        _Step(_Op.JUMP_UNLESS_EQUAL, 2, constant=socket.SOCK_STREAM, target="end"),
        _Step(_Op.LOAD, 2, 1, offset=_Field.PORT),
        _Step(_Op.JUMP_UNLESS_EQUAL, 2, constant=socket.htons(old), target="end"),
        *conditions,
        "replace",
        _Step(_Op.CONSTANT, 2, constant=socket.htons(new)),
        _Step(_Op.STORE, 1, 2, offset=_Field.PORT),
        "end",
        _Step(_Op.EXIT),
    ]


def _if_loopback4() -> _Program:
    """Jumps to `replace` if the address is 127.0.0.0/8 or 0.0.0.0, which also connects to loopback; else to `end`."""
    return [_Step(_Op.LOAD, 2, 1, offset=_Field.IP4), *_if_ip4_loopback()]


def _if_ip4_loopback() -> _Program:
    """Jumps like `_if_loopback4`, for the IPv4 address in register 2."""
    return [
        _Step(_Op.JUMP_IF_EQUAL, 2, constant=0, target="replace"),
        _Step(_Op.AND_CONSTANT, 2, constant=0xFF),
        _Step(_Op.JUMP_IF_EQUAL, 2, constant=127, target="replace"),
        _Step(_Op.JUMP, target="end"),
    ]


def _if_loopback6() -> _Program:
    """Jumps to `replace` if the address is `::1`, `::`, or an IPv4 loopback address in IPv6; else to `end`."""
    return [
        _Step(_Op.LOAD, 2, 1, offset=_Field.IP6),
        _Step(_Op.LOAD, 3, 1, offset=_Field.IP6 + 4),
        _Step(_Op.OR, 2, 3),
        _Step(_Op.JUMP_UNLESS_EQUAL, 2, constant=0, target="end"),
        _Step(_Op.LOAD, 3, 1, offset=_Field.IP6 + 8),
        _Step(_Op.LOAD, 2, 1, offset=_Field.IP6 + 12),
        _Step(_Op.JUMP_IF_EQUAL, 3, constant=socket.htonl(0xFFFF), target="ip4"),
        _Step(_Op.JUMP_UNLESS_EQUAL, 3, constant=0, target="end"),
        _Step(_Op.JUMP_IF_EQUAL, 2, constant=socket.htonl(1), target="replace"),
        _Step(_Op.JUMP_IF_EQUAL, 2, constant=0, target="replace"),
        _Step(_Op.JUMP, target="end"),
        "ip4",
        *_if_ip4_loopback(),
    ]


def _encode(program: Iterable[_Step | str]) -> bytes:
    steps: list[_Step] = []
    labels: dict[str, int] = {}
    for item in program:
        if isinstance(item, str):
            labels[item] = len(steps)
        else:
            steps.append(item)
    code = b""
    for position, step in enumerate(steps):
        offset = labels[step.target] - position - 1 if step.target else step.offset
        code += struct.pack("<BBhI", step.op, step.to | step.source << 4, offset, step.constant)
    return code


def _load(program: _Program, hook: _Hook) -> int:
    """Loads a program into the kernel, and returns its descriptor."""
    code = _encode(program)
    body = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"Apache-2.0")
    addresses = (ctypes.addressof(body), ctypes.addressof(licence))
    # Type, number of instructions, their address, licence, log (three fields, unused), kernel version, flags, name,
    # network interface, and the hook.
    attributes = struct.pack(
        "<IIQQIIQII16sII", _CGROUP_SOCK_ADDR, len(code) // 8, *addresses, 0, 0, 0, 0, 0, b"mizzen_port", 0, hook
    )
    return _bpf(_PROG_LOAD, attributes)


def _bpf(command: int, attributes: bytes) -> int:
    body = ctypes.create_string_buffer(attributes, len(attributes))
    result: int = _libc.syscall(_SYSCALL[platform.machine()], command, body, len(attributes))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf: {os.strerror(code)}")
    return result
