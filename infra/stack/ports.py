"""Finds free TCP ports on 127.0.0.1, and checks that configured ports are free."""

import itertools
import random
import socket
from pathlib import Path

from infra.errors import StackError

# Ports below the first may belong to services of the machine; from the second on is Linux's default ephemeral range.
_FIRST, _EPHEMERAL = 10_000, 32_768
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _candidates() -> range:
    """Returns ports outside the ephemeral range: no outgoing connection can take the port of a restarting server."""
    try:
        first_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_ephemeral = _EPHEMERAL
    return range(_FIRST, first_ephemeral) if first_ephemeral - _FIRST >= 1000 else range(_FIRST, 65_536)


# Each process starts at a random port and tries all others before it returns to a port.
_turns = itertools.count(random.SystemRandom().randrange(1 << 16))


def free_port() -> int:
    """Returns a TCP port on 127.0.0.1 that is free now and outside the ephemeral range, and that earlier calls of this
    process did not return.

    Raises:
        StackError: all ports are in use.
    """
    ports = _candidates()
    for _ in ports:
        port = ports[next(_turns) % len(ports)]
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise StackError(
        f"no free port on 127.0.0.1 from {ports.start} to {ports.stop - 1}; stop the processes that use them"
    )


def require_free(setting: str, host: str, port: int) -> None:
    """Checks that this process can listen on `port`. `setting` is the name of the setting for the error message.

    Raises:
        StackError: the port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StackError(
                f"{setting}: port {port} on {host} is in use ({error.strerror}); stop the process that uses it or"
                " choose another port"
            ) from None
