"""Limits the bandwidth with which a container engine fetches images.

The engine fetches in a process of its own, which does not limit itself. So while an image is fetched, a small eBPF
program on the engine's cgroup v2 drops packets that arrive faster, and TCP then sends slower. It is a token bucket: a
shared number holds the time up to which the allowance is used. Containers have cgroups of their own, and are not
affected. The kernel removes the program when the fetch, or the agent, ends.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from agent.bpf import VALUE, Hook, Instruction, Op, Program, ProgramType, SharedMemory, link, load
from agent.cgroups import unified_cgroup_of

_BURST_NS = 50_000_000
"""What was not used in this time may be used later."""
_UNIT_BITS = 10
"""Costs are computed for 1024 bytes, because a byte takes less than a nanosecond on fast links."""
_LENGTH = 0
"""Offset of the length in `struct __sk_buff`."""
_KTIME_GET_NS = 5
_LISTENS = "00010000"
"""Flags of a listening socket in `/proc/net/unix`."""


@contextlib.contextmanager
def limited(socket: str, bytes_s: float) -> Iterator[None]:
    """Limits what the engine that listens on `socket` receives, in bytes per second, until the block ends.

    Raises:
        OSError: the engine has no cgroup v2 of its own, or this process may not attach eBPF programs.
    """
    cgroup = _engine_cgroup(socket)
    with contextlib.ExitStack() as closing:
        folder = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        closing.callback(os.close, folder)
        used = SharedMemory(8, "mizzen_pull")
        closing.callback(used.close)
        program = load(_polices(used.map, bytes_s), ProgramType.CGROUP_SKB, Hook.INET_INGRESS, "mizzen_pull")
        closing.callback(os.close, program)
        closing.callback(os.close, link(program, folder, Hook.INET_INGRESS))
        yield


def _engine_cgroup(socket: str) -> str:
    """Returns the cgroup v2 of the engine, which must be its own."""
    pid = _listener(os.path.realpath(socket))
    if pid is None:
        raise FileNotFoundError(f"no process that listens on {socket} is visible")
    path = unified_cgroup_of(pid)
    if path is None or path == unified_cgroup_of(os.getpid()):
        raise FileNotFoundError(f"the engine (pid {pid}) is in no cgroup v2 of its own; run it as a systemd service")
    return path


def _listener(path: str) -> int | None:
    """Returns the pid of the process that listens on a Unix socket, without systemd, which may only have opened it."""
    inodes = set[str]()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) > 7 and fields[3] == _LISTENS and os.path.realpath(fields[7]) == path:
            inodes.add(f"socket:[{fields[6]}]")
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            pid = int(folder.parent.name)
            if pid > 1 and any(os.readlink(file) in inodes for file in folder.iterdir()):  # noqa: PTH115 - faster
                return pid
    return None


def _polices(used: int, bytes_s: float) -> Program:
    """Returns the program. Register 8 has the address of the time until which the allowance is used."""
    cost_ns = max(1, round((1e9 * (1 << _UNIT_BITS)) / bytes_s))
    return [
        Instruction(Op.LOAD, 6, 1, offset=_LENGTH),
        Instruction(Op.MULTIPLY_CONSTANT, 6, constant=cost_ns),
        Instruction(Op.SHIFT_RIGHT, 6, constant=_UNIT_BITS),
        Instruction(Op.MAP, 8, VALUE, constant=used),
        Instruction(Op.CALL, constant=_KTIME_GET_NS),
        Instruction(Op.LOAD_DOUBLE, 2, 8),
        Instruction(Op.COPY, 3, 0),
        Instruction(Op.ADD_CONSTANT, 3, constant=-_BURST_NS),
        Instruction(Op.JUMP_IF_AT_LEAST, 2, 3, target="recent"),
        Instruction(Op.COPY, 2, 3),
        "recent",
        Instruction(Op.JUMP_IF_AT_LEAST, 2, 0, target="drop"),
        Instruction(Op.ADD, 2, 6),
        Instruction(Op.STORE_DOUBLE, 8, 2),
        Instruction(Op.CONSTANT, 0, constant=1),
        Instruction(Op.EXIT),
        "drop",
        Instruction(Op.CONSTANT, 0, constant=0),
        Instruction(Op.EXIT),
    ]
