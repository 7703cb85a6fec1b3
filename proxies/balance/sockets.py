"""Opens the listening sockets. They stay open while HAProxy restarts, so new connections wait in the kernel's queue.

A service manager such as systemd may own them instead. Then they also stay open while the balancer itself restarts.
"""

import os
import socket
import time
from collections.abc import MutableMapping

from infra.errors import ConfigurationError, StackError

BACKLOG = 4096
_IN_USE_S = 5.0
"""After the supervisor was killed, its HAProxy may need a moment to end and to release the port."""

_FIRST_DESCRIPTOR = 3
"""The first descriptor of the sockets that systemd passes (`sd_listen_fds`)."""


def passed_sockets(environ: MutableMapping[str, str]) -> dict[str, socket.socket]:
    """Returns the listening sockets that the service manager passed, by the name of the service.

    The names are those of `FileDescriptorName=` in the socket units. The variables are removed from `environ`, so that
    other processes do not take the sockets for theirs.

    Raises:
        ConfigurationError: two sockets have the same name, or a descriptor is not a listening socket.
    """
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdecimal():
        return {}
    found: dict[str, socket.socket] = {}
    for at in range(int(count)):
        name = names[at] if at < len(names) else ""
        if name in found:
            raise ConfigurationError(
                f"LISTEN_FDNAMES: {name!r} is given twice: each socket needs the name of its service"
            )
        try:
            one = socket.socket(fileno=_FIRST_DESCRIPTOR + at)
            is_listening = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError as error:
            raise ConfigurationError(f"LISTEN_FDS: descriptor {_FIRST_DESCRIPTOR + at}: {error.strerror}") from None
        if not is_listening:
            raise ConfigurationError(f"LISTEN_FDS: descriptor {_FIRST_DESCRIPTOR + at} is not a listening socket")
        one.set_inheritable(False)
        found[name] = one
    return found


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket.

    Raises:
        StackError: the address cannot be used, or stays in use for 5 s.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise StackError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    deadline_s = time.monotonic() + _IN_USE_S
    while True:
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            opened.listen(BACKLOG)
            return opened
        except OSError as error:
            opened.close()
            if time.monotonic() >= deadline_s:
                raise StackError(f"cannot listen on {host}:{port}: {error.strerror}") from None
            time.sleep(0.05)
