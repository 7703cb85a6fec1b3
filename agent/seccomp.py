"""The system calls that a task in a sandbox may not use: a seccomp filter, and no new privileges.

The filter refuses system calls that lead out of the sandbox or around its rules: new user namespaces, which would give
a task capabilities again; families of sockets to which rules for connections do not apply, such as those of the
hypervisor (AF_VSOCK) and of clusters (AF_TIPC, AF_SMC); events about processes of the machine; keyrings, which belong
to users and not to sandboxes; asynchronous calls (io_uring), which no filter sees; and kernel interfaces for
administrators (eBPF, performance events, page faults, the kernel's log). Calls that need capabilities are not in the
list, because a task has none. Uses the standard library only, because the shim imports this module.
"""

import contextlib
import ctypes
import errno
import os
import platform
import struct
from functools import cache

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`. Arguments have 8 bytes each, the lower half first."""
_NEW_NAMESPACES = 0x7E020080
"""All `CLONE_NEW…` flags. The bit of time namespaces belongs to the signal in `clone`, and is 0 in all of them."""
_FAMILIES = (1, 2, 10)
"""Families of sockets that tasks may use, in addition to AF_NETLINK: AF_UNIX, AF_INET, AF_INET6."""
_NETLINK, _NETLINK_CONNECTOR = 16, 11
"""AF_NETLINK, and its protocol by which the kernel reports starts and ends of all processes."""
_X32 = 0x40000000
# Architecture of the audit subsystem, then the system calls by name. aarch64 has the generic numbers.
_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (0xC000003E, {
        "clone": 56, "unshare": 272, "clone3": 435, "socket": 41, "socketpair": 53, "add_key": 248, "request_key": 249,
        "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "syslog": 103, "io_uring_setup": 425,
        "io_uring_enter": 426, "io_uring_register": 427,
    }),
    "aarch64": (0xC00000B7, {
        "clone": 220, "unshare": 97, "clone3": 435, "socket": 198, "socketpair": 199, "add_key": 217,
        "request_key": 218, "keyctl": 219, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "syslog": 116,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    }),
}  # fmt: skip
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def prepare() -> None:
    """Builds the filter, if there is one for this machine, so that forks of this process inherit the built filter."""
    with contextlib.suppress(OSError):
        _filter(platform.machine())


def program() -> bytes:
    """Returns the filter, in the form of `struct sock_filter`.

    Raises:
        OSError: the machine is of another architecture than those in the list.
    """
    return _filter(platform.machine())


def restrict() -> None:
    """Permanently applies the filter to this process and its children. They also gain no privileges by set-user-id
    programs or file capabilities.

    Raises:
        OSError: the kernel does not support it, or the machine is of another architecture than those in the list.
    """
    code = _filter(platform.machine())
    program = _Program(len(code) // 8, code)
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or (
        _prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0) != 0
    ):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")


@cache
def _filter(machine: str) -> bytes:
    """Returns the filter for an architecture, in the form of `struct sock_filter`."""
    if machine not in _CALLS:
        raise OSError(errno.ENOSYS, f"seccomp: no list of system calls for {machine}")
    architecture, numbers = _CALLS[machine]
    by_flags = ("clone", "unshare")
    by_family = ("socket", "socketpair")
    refused = [number for name, number in numbers.items() if name not in (*by_flags, *by_family, "clone3")]
    fail = _FAIL | errno.EPERM
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),  # 32-bit programs: their calls have other numbers.
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_GREATER_EQUAL, 0, 1, _X32),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
        # The flags of clone3 are in memory, which no filter can read. Libraries then use clone.
        (_JUMP_EQUAL, 0, 1, numbers["clone3"]),
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for name in by_flags:
        code += [
            (_JUMP_EQUAL, 0, 4, numbers[name]),
            (_LOAD, 0, 0, _ARGUMENTS),
            (_JUMP_SET, 0, 1, _NEW_NAMESPACES),
            (_RETURN, 0, 0, fail),
            (_RETURN, 0, 0, _ALLOW),
        ]
    count = len(_FAMILIES)
    for name in by_family:
        code += [
            (_JUMP_EQUAL, 0, count + 6, numbers[name]),
            (_LOAD, 0, 0, _ARGUMENTS),
            *((_JUMP_EQUAL, count - place + 3, 0, family) for place, family in enumerate(_FAMILIES)),
            (_JUMP_EQUAL, 0, 2, _NETLINK),
            (_LOAD, 0, 0, _ARGUMENTS + 2 * 8),
            (_JUMP_EQUAL, 0, 1, _NETLINK_CONNECTOR),
            (_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT),
            (_RETURN, 0, 0, _ALLOW),
        ]
    for number in sorted(refused):
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, fail)]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *one) for one in code)
