"""Free and taken ports on loopback."""

import itertools
import random
import socket
from pathlib import Path

from infra.errors import StackError

# Below these are the ports of services that the machine may have; above Linux's default, the system's own.
_FIRST, _EPHEMERAL = 10_000, 32_768
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _candidates() -> range:
    """Ports that no outgoing connection is given, so that a server may stop and find its port again."""
    try:
        first_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_ephemeral = _EPHEMERAL
    return range(_FIRST, first_ephemeral) if first_ephemeral - _FIRST >= 1000 else range(_FIRST, 65_536)


# Processes begin at different places and never return to a port before they have been through all.
_turns = itertools.count(random.SystemRandom().randrange(1 << 16))


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago, that the system gives to nobody and that this process is not
    given again.

    Raises:
        StackError: all are taken.
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
    raise StackError(f"no free port on 127.0.0.1 from {ports.start} to {ports.stop - 1}; stop what uses them")


def require_free(setting: str, host: str, port: int) -> None:
    """Checks that `port` can be listened on.

    Raises:
        StackError: it is taken; `setting` names what to change.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StackError(
                f"{setting}: port {port} on {host} is taken ({error.strerror}); stop what uses it or choose another"
            ) from None
