"""Maps a fixed port of a task to another port of the machine, so that several tasks can listen on the same fixed port.

Small eBPF programs on the task's cgroup v2 replace the port in system calls of the task's processes: in `bind`, in
`connect` to a loopback address, and in the result of `getsockname`. The task listens on the other port without any
change of its own; the network of the machine is not changed, and there is no proxy. Only TCP is mapped.
`docs/decisions/0007-port-maps.md` has the reasons.
"""

import os
import socket

from agent.bpf import Hook, Instruction, Op, Program, ProgramType, SockAddress, attach_to_cgroup, load

_HOOKS = (Hook.BIND4, Hook.BIND6, Hook.CONNECT4, Hook.CONNECT6, Hook.GETSOCKNAME4, Hook.GETSOCKNAME6)


def map_port(cgroup: str, inside: int, outside: int) -> None:
    """Makes processes in the cgroup v2 at path `cgroup` that bind port `inside` listen on port `outside` instead.

    The map applies to sockets that are created after this call. It ends with the cgroup, and needs no process.

    Raises:
        OSError: this process may not load or attach eBPF programs, or the kernel does not support them.
    """
    programs: dict[Hook, int] = {}
    folder = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for hook in _HOOKS:
            programs[hook] = load(_program(hook, inside, outside), ProgramType.CGROUP_SOCK_ADDR, hook, "mizzen_port")
        attach_to_cgroup(folder, programs)
    finally:
        for descriptor in (folder, *programs.values()):
            os.close(descriptor)


def _program(hook: Hook, inside: int, outside: int) -> Program:
    """Returns a program that replaces one port: `inside` by `outside`, or the reverse for `getsockname`."""
    old, new = (outside, inside) if hook in (Hook.GETSOCKNAME4, Hook.GETSOCKNAME6) else (inside, outside)
    conditions = {Hook.CONNECT4: _if_loopback4(), Hook.CONNECT6: _if_loopback6()}.get(hook, [])
    return [
        Instruction(Op.CONSTANT, 0, constant=1),  # Allow the system call, whether the port is replaced or not.
        Instruction(Op.LOAD, 2, 1, offset=SockAddress.TYPE),
        Instruction(Op.JUMP_UNLESS_EQUAL_32, 2, constant=socket.SOCK_STREAM, target="end"),
        Instruction(Op.LOAD, 2, 1, offset=SockAddress.PORT),
        Instruction(Op.JUMP_UNLESS_EQUAL_32, 2, constant=socket.htons(old), target="end"),
        *conditions,
        "replace",
        Instruction(Op.CONSTANT, 2, constant=socket.htons(new)),
        Instruction(Op.STORE, 1, 2, offset=SockAddress.PORT),
        "end",
        Instruction(Op.EXIT),
    ]


def _if_loopback4() -> Program:
    """Jumps to `replace` if the address is 127.0.0.0/8 or 0.0.0.0, which also connects to loopback; else to `end`."""
    return [Instruction(Op.LOAD, 2, 1, offset=SockAddress.IP4), *_if_ip4_loopback()]


def _if_ip4_loopback() -> Program:
    """Jumps like `_if_loopback4`, for the IPv4 address in register 2."""
    return [
        Instruction(Op.JUMP_IF_EQUAL_32, 2, constant=0, target="replace"),
        Instruction(Op.AND_CONSTANT, 2, constant=0xFF),
        Instruction(Op.JUMP_IF_EQUAL_32, 2, constant=127, target="replace"),
        Instruction(Op.JUMP, target="end"),
    ]


def _if_loopback6() -> Program:
    """Jumps to `replace` if the address is `::1`, `::`, or an IPv4 loopback address in IPv6; else to `end`."""
    return [
        Instruction(Op.LOAD, 2, 1, offset=SockAddress.IP6),
        Instruction(Op.LOAD, 3, 1, offset=SockAddress.IP6 + 4),
        Instruction(Op.OR, 2, 3),
        Instruction(Op.JUMP_UNLESS_EQUAL_32, 2, constant=0, target="end"),
        Instruction(Op.LOAD, 3, 1, offset=SockAddress.IP6 + 8),
        Instruction(Op.LOAD, 2, 1, offset=SockAddress.IP6 + 12),
        Instruction(Op.JUMP_IF_EQUAL_32, 3, constant=socket.htonl(0xFFFF), target="ip4"),
        Instruction(Op.JUMP_UNLESS_EQUAL_32, 3, constant=0, target="end"),
        Instruction(Op.JUMP_IF_EQUAL_32, 2, constant=socket.htonl(1), target="replace"),
        Instruction(Op.JUMP_IF_EQUAL_32, 2, constant=0, target="replace"),
        Instruction(Op.JUMP, target="end"),
        "ip4",
        *_if_ip4_loopback(),
    ]
