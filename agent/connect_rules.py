"""Blocks connections of tasks to tasks of other tenants on the machine, and to metadata services of clouds.

Tasks may not listen on ports that the agent reserves for other tasks, either.

Small eBPF programs on a task's cgroup v2. Its sockets get a mark with the number of its tenant, which stays on their
packets while these do not leave the machine; packets with the mark of another tenant are dropped where they arrive. A
task cannot change marks, because that needs a capability. Processes that are no tasks have no such mark: the agent's
probes and balancers reach every task. Packets from other machines have no mark either.

The metadata service of a cloud hands out the credentials of the machine. `connect` and `sendto` to its addresses fail,
except to the port of DNS, which some clouds answer at the same address.

Other machines and balancers connect to the ports that the agent has reserved for a task. A task of another tenant that
listened on such a port first would get these connections. Therefore `bind` to ports of the agent's range fails, except
to those of the own attempt.
"""

import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from ipaddress import ip_address

from agent.bpf import Hook, Instruction, Op, Program, ProgramType, SockAddress, attach_to_cgroup, load

_TAG = 0x6D000000
"""The upper 8 bits of the marks of tasks; the others are the tenant's number."""
_TAG_BITS = 0xFF000000
_SOCK_MARK, _SKB_MARK = 16, 8
"""Offset of the mark in `struct bpf_sock` and in `struct __sk_buff`."""
_DNS = 53
METADATA4 = ("169.254.169.254", "169.254.170.2", "169.254.170.23", "168.63.129.16", "100.100.100.200")
METADATA6 = ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254")
"""Addresses of AWS, Google Cloud, Azure, Oracle, OpenStack and Alibaba Cloud."""


def attach(
    cgroup: str,
    tenant_number: int,
    *,
    metadata: bool,
    reserved: tuple[int, int] | None = None,
    own: Collection[int] = (),
) -> None:
    """Applies the rules to sockets that processes in the cgroup v2 at path `cgroup` create after this call.

    The rules end with the cgroup, and need no running process.

    Args:
        cgroup: the cgroup.
        tenant_number: the number of the tenant.
        metadata: metadata services are allowed.
        reserved: first and last port of the agent's range; None: the processes may listen on any port.
        own: ports in this range on which they may listen.

    Raises:
        OSError: this process may not load or attach eBPF programs, or the kernel does not support them.
    """
    hooks = (*_BY_TENANT, *(() if metadata else _FOR_ALL))
    folder = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with _attaching:
            if len(_programs) + len(hooks) > _MOST_LOADED:
                while _programs:
                    os.close(_programs.popitem()[1])
            attach_to_cgroup(folder, {hook: _loaded(hook, tenant_number) for hook in hooks})
        if reserved is not None:
            for hook in (Hook.BIND4, Hook.BIND6):
                listening = load(_keeps(*reserved, own), ProgramType.CGROUP_SOCK_ADDR, hook, "mizzen_bind")
                try:
                    attach_to_cgroup(folder, {hook: listening})
                finally:
                    os.close(listening)
    finally:
        os.close(folder)


def _loaded(hook: Hook, tenant_number: int) -> int:
    """Returns the descriptor of a program, which stays loaded for the next tasks."""
    by_tenant = hook in _BY_TENANT
    key = (hook, tenant_number if by_tenant else None)
    if key not in _programs:
        kind, program = _BY_TENANT[hook] if by_tenant else _FOR_ALL[hook]
        _programs[key] = load(program(tenant_number), kind, hook, "mizzen_connect")
    return _programs[key]


def _marks(number: int) -> Program:
    return [
        Instruction(Op.CONSTANT, 2, constant=_TAG | number),
        Instruction(Op.STORE, 1, 2, offset=_SOCK_MARK),
        Instruction(Op.CONSTANT, 0, constant=1),
        Instruction(Op.EXIT),
    ]


def _drops_others(number: int) -> Program:
    return [
        Instruction(Op.CONSTANT, 0, constant=1),
        Instruction(Op.LOAD, 2, 1, offset=_SKB_MARK),
        Instruction(Op.JUMP_IF_EQUAL_32, 2, constant=_TAG | number, target="end"),
        Instruction(Op.AND_CONSTANT, 2, constant=_TAG_BITS),
        Instruction(Op.JUMP_UNLESS_EQUAL_32, 2, constant=_TAG, target="end"),
        Instruction(Op.CONSTANT, 0, constant=0),
        "end",
        Instruction(Op.EXIT),
    ]


def _keeps(first: int, last: int, own: Collection[int]) -> Program:
    return [
        Instruction(Op.CONSTANT, 0, constant=1),
        Instruction(Op.LOAD, 2, 1, offset=SockAddress.PORT),
        Instruction(Op.SWAP_HALF, 2, constant=16),
        Instruction(Op.CONSTANT, 3, constant=last + 1),
        Instruction(Op.JUMP_IF_AT_LEAST, 2, 3, target="end"),
        *(Instruction(Op.JUMP_IF_EQUAL_32, 2, constant=port, target="end") for port in sorted(own)),
        Instruction(Op.CONSTANT, 3, constant=first),
        Instruction(Op.JUMP_IF_AT_LEAST, 2, 3, target="refuse"),
        Instruction(Op.JUMP, target="end"),
        *_ends(),
    ]


def _refuses4() -> Program:
    return [*_unless_dns(), Instruction(Op.LOAD, 2, 1, offset=SockAddress.IP4), *_compare4(), *_ends()]


def _refuses6() -> Program:
    program: Program = [*_unless_dns()]
    for number, address in enumerate(METADATA6):
        for word, value in enumerate(_words(address)):
            program += [
                Instruction(Op.LOAD, 2, 1, offset=SockAddress.IP6 + 4 * word),
                Instruction(Op.JUMP_UNLESS_EQUAL_32, 2, constant=value, target=f"not {number}"),
            ]
        program += [Instruction(Op.JUMP, target="refuse"), f"not {number}"]
    for word, value in enumerate(_words("::ffff:0.0.0.0")[:3]):  # IPv4 addresses in IPv6.
        program += [
            Instruction(Op.LOAD, 2, 1, offset=SockAddress.IP6 + 4 * word),
            Instruction(Op.JUMP_UNLESS_EQUAL_32, 2, constant=value, target="end"),
        ]
    return [*program, Instruction(Op.LOAD, 2, 1, offset=SockAddress.IP6 + 12), *_compare4(), *_ends()]


def _unless_dns() -> Program:
    """Allows the port of DNS. Register 0 is 1: the call is allowed."""
    return [
        Instruction(Op.CONSTANT, 0, constant=1),
        Instruction(Op.LOAD, 2, 1, offset=SockAddress.PORT),
        Instruction(Op.JUMP_IF_EQUAL_32, 2, constant=socket.htons(_DNS), target="end"),
    ]


def _compare4() -> Program:
    """Compares the IPv4 address in register 2."""
    jumps = [Instruction(Op.JUMP_IF_EQUAL_32, 2, constant=_words(address)[0], target="refuse") for address in METADATA4]
    return [*jumps, Instruction(Op.JUMP, target="end")]


def _ends() -> Program:
    return ["refuse", Instruction(Op.CONSTANT, 0, constant=0), "end", Instruction(Op.EXIT)]


def _words(address: str) -> list[int]:
    """Returns an address as numbers of 4 bytes in network byte order, as programs load them on this machine."""
    packed = ip_address(address).packed
    return [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]


_BY_TENANT: Mapping[Hook, tuple[ProgramType, Callable[[int], Program]]] = {
    Hook.INET_SOCK_CREATE: (ProgramType.CGROUP_SOCK, _marks),
    Hook.INET_INGRESS: (ProgramType.CGROUP_SKB, _drops_others),
}
_FOR_ALL: Mapping[Hook, tuple[ProgramType, Callable[[int], Program]]] = {
    Hook.CONNECT4: (ProgramType.CGROUP_SOCK_ADDR, lambda _: _refuses4()),
    Hook.SENDMSG4: (ProgramType.CGROUP_SOCK_ADDR, lambda _: _refuses4()),
    Hook.CONNECT6: (ProgramType.CGROUP_SOCK_ADDR, lambda _: _refuses6()),
    Hook.SENDMSG6: (ProgramType.CGROUP_SOCK_ADDR, lambda _: _refuses6()),
}
_MOST_LOADED = 64
"""The largest number of programs that stay loaded for later tasks. Beyond it, all descriptors are closed; programs that
are attached to a cgroup continue to apply."""
_attaching = threading.Lock()
_programs: dict[tuple[Hook, int | None], int] = {}
