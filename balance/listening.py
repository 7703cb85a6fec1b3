"""Opens the listening sockets. They stay open while HAProxy restarts, so new connections wait in the kernel's queue."""

import socket
import time

from infra.errors import ConfigurationError, StackError

BACKLOG = 4096
_IN_USE_S = 5.0
"""After the supervisor was killed, its HAProxy may need a moment to end and to release the port."""


def parse_address(text: str) -> tuple[str, int]:
    """Returns host and port of `HOST:PORT`. An IPv6 address is in brackets.

    Raises:
        ConfigurationError: the text has another form.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65_536 or (":" in host and not host.startswith("[")):
        raise ConfigurationError(f"{text!r} is not an address to listen on: must be HOST:PORT, such as 0.0.0.0:8000")
    return host.removeprefix("[").removesuffix("]") or "0.0.0.0", int(port)


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
