"""Free and taken ports on loopback."""

import socket

from infra.errors import StackError


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
