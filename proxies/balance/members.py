"""The servers of one running HAProxy, which are made equal to the list of replicas by runtime commands."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from proxies.balance.configuration import ProxyLimits, server_line, variables
from proxies.balance.runtime import RuntimeSocket
from proxies.balance.seats import Seat
from proxies.balance.values import Service


@dataclass
class _Draining:
    seat: Seat
    ends_s: float
    """The monotonic time at which the remaining requests are closed."""


class Members:
    """The servers of one HAProxy process. A new process needs a new instance.

    A removed server is drained: it gets no new requests, its running requests may finish for `drain_s`, then they are
    closed and the server is deleted.
    """

    def __init__(self, socket: RuntimeSocket, limits: ProxyLimits, service: Service, seats: Iterable[Seat]) -> None:
        """`service` and `seats` are those of the configuration with which the process was started."""
        self._socket = socket
        self._limits = limits
        self._active = {seat.path: seat for seat in seats}
        self._draining: dict[str, _Draining] = {}
        self._variables = variables(service)

    @property
    def draining(self) -> int:
        """The number of servers that are being drained."""
        return len(self._draining)

    async def apply(self, service: Service, seats: Iterable[Seat]) -> None:
        """Adds and drains servers, and sets the variables that differ.

        Raises:
            RuntimeSocketError: HAProxy refused a command, or did not answer. A later call continues.
        """
        wanted = {seat.path: seat for seat in seats}
        for path, seat in wanted.items():
            if path not in self._active:
                await self._add(seat)
        # The variables follow the added servers: a new policy must find servers in its backend.
        for name, value in variables(service).items():
            if self._variables[name] != value:
                await self._socket.do(f"set var {name} {value}")
                self._variables[name] = value
        for path in [path for path in self._active if path not in wanted]:
            await self._socket.do(f"set server {path} state drain")
            self._draining[path] = _Draining(self._active.pop(path), time.monotonic() + service.drain_s)

    async def remove_drained(self) -> None:
        """Deletes the drained servers that have no requests, and those whose time is over.

        Raises:
            RuntimeSocketError: HAProxy did not answer.
        """
        for path, draining in list(self._draining.items()):
            await self._socket.do(f"set server {path} state maint")
            if time.monotonic() >= draining.ends_s:
                await self._socket.do(f"shutdown sessions server {path}")
            # Refused while the server has a connection; then the next call tries again.
            if (await self._socket.ask(f"del server {path}")).startswith("Server deleted"):
                del self._draining[path]

    async def _add(self, seat: Seat) -> None:
        if seat.path not in self._draining:
            await self._socket.do(f"add server {seat.path} {server_line(seat, self._limits)}", "New server registered")
            # Until both commands have succeeded, the server counts as draining, so that an error leaves none behind.
            self._draining[seat.path] = _Draining(seat, time.monotonic())
        await self._socket.do(f"enable health {seat.path}")
        await self._socket.do(f"set server {seat.path} state ready")
        self._active[seat.path] = self._draining.pop(seat.path).seat
