"""Landlock scopes: processes in a scope cannot connect to abstract sockets, or signal processes, outside the scope.

A scope cannot be joined, only inherited. So one process starts all shims of an attempt (`agent.zygote`), and NCCL's
ranks on one machine, which pass memory through abstract sockets, are in one scope. Uses the standard library only,
because the zygote imports this module.
"""

import ctypes
import os
import struct

_CREATE_RULESET, _RESTRICT_SELF = 444, 446
"""Numbers of the system calls, which are the same on all architectures."""
_ABSTRACT_SOCKETS, _SIGNALS = 1, 2
_PR_SET_NO_NEW_PRIVS = 38
_libc = ctypes.CDLL(None, use_errno=True)


def enter_scope() -> bool:
    """Puts this process, and all that it will start, into a scope of its own. They gain no new privileges.

    Returns False if the kernel has no scopes (before Linux 6.12, or without Landlock).
    """
    attributes = struct.pack("<QQQ", 0, 0, _ABSTRACT_SOCKETS | _SIGNALS)
    rules = _libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if rules < 0:
        return False
    try:
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return bool(_libc.syscall(_RESTRICT_SELF, rules, 0) == 0)
    finally:
        os.close(rules)
