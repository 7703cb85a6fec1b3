"""Finds free TCP ports, and checks that configured ports are free."""

import errno
import itertools
import json
import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from infra.errors import StackError
from infra.files import write_private

# Lower ports may belong to services of the machine; higher ones are in Linux's default ephemeral range.
_FIRST, _EPHEMERAL = 10_000, 32_768
_HIGHEST = 65_535
_NEAR = 100
"""Number of ports, counted from the default port, that a stack tries to find a free one."""
_STORED = TypeAdapter(dict[str, Annotated[int, Field(ge=1, le=_HIGHEST)]])
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


class StackPorts:
    """The ports of an embedded stack. A port that its user has not set may be replaced by a free one.

    The ports are stored, so that a stack that starts again has the same URLs if possible.
    """

    def __init__(self, file: Path) -> None:
        """`file` is where the ports are stored; it need not exist."""
        self._file = file
        self._stored: dict[str, int] = {}
        with suppress(OSError, ValueError):  # Missing, or damaged.
            self._stored = _STORED.validate_json(file.read_bytes())
        self._taken: dict[str, int] = {}
        self.replaced: list[str] = []
        """For each port that was replaced, a message for the user."""

    def take(self, setting: str, host: str, port: int, *, is_set: bool) -> int:
        """Returns the port to listen on: `port`, or a free one near it unless the user has set it (`is_set`).

        `setting` is the name of the setting.

        Raises:
            StackError: the port that the user set is in use, or all ports near the default are, or `host` is not an
                address of this machine.
        """
        found = _error(host, port)
        if is_set or (found is not None and found.errno != errno.EADDRINUSE):
            require_free(setting, host, port)
            self._taken[setting] = port
            return port
        stored = self._stored.get(setting, port)
        last = min(port + _NEAR, _HIGHEST + 1) - 1
        candidates: list[int] = [stored, *range(port, last + 1)]
        for candidate in candidates:
            if candidate not in self._taken.values() and _error(host, candidate) is None:
                self._taken[setting] = candidate
                if candidate != port:
                    why = "as at the last start" if candidate == stored else f"because {port} is in use"
                    self.replaced.append(f"{setting}: {candidate}, {why}")
                return candidate
        raise StackError(f"{setting}: the ports {port} to {last} on {host} are in use; choose another port")

    def store(self) -> None:
        """Stores the ports that were taken for the next start."""
        write_private(self._file, json.dumps(self._taken))


def require_free(setting: str, host: str, port: int) -> None:
    """Checks that this process can listen on `port`. `setting` is the name of the setting for the error message.

    Raises:
        StackError: the port is in use, or cannot be used.
    """
    found = _error(host, port)
    if found is not None:
        why = found.strerror or str(found)
        if found.errno != errno.EADDRINUSE:
            raise StackError(f"{setting}: port {port} on {host} cannot be used ({why}); choose another address or port")
        raise StackError(
            f"{setting}: port {port} on {host} is in use ({why}); stop the process that uses it or choose another port"
        )


def _error(host: str, port: int) -> OSError | None:
    """Returns the error that prevents this process from listening on a port, or None."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
        except OverflowError as error:  # Not the number of a port.
            return OSError(str(error))
    return None
