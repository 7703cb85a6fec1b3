"""Commands to a running HAProxy that update its servers to match the list of replicas."""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from proxies.balance.configuration import STICKY, ProxyLimits, Seat, server_line, sticky_pattern, variables
from proxies.balance.values import Service

_PROMPT = b"\n> "
_ANSWER_S = 5.0
_LIMIT_BYTES = 1 << 24


class RuntimeSocketError(Exception):
    """HAProxy refused a command, or did not answer."""


class RuntimeSocket:
    """A connection to the runtime socket, opened at the first command. After an error the next command reconnects."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()

    async def ask(self, command: str) -> str:
        """Sends a command and returns the answer, without the messages that HAProxy also writes to its log.

        A command that ends with `<<` may be followed by the lines of a payload, the last one with a line end.

        Raises:
            RuntimeSocketError: HAProxy does not answer.
        """
        first_line = command.partition("\n")[0]  # The lines after it may be a private key.
        async with self._lock:
            try:
                async with asyncio.timeout(_ANSWER_S):
                    reader, writer = self._streams or await self._open()
                    writer.write(command.encode() + b"\n")
                    answer = await reader.readuntil(_PROMPT)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                self.close()
                raise RuntimeSocketError(f"{first_line}: no answer from HAProxy ({error!r})") from None
        # HAProxy prompts with "+ " for each line of a payload.
        text = answer.removesuffix(_PROMPT).decode("utf-8", "replace").lstrip("+ ")
        lines = text.splitlines()
        return "\n".join(one for one in lines if not one.startswith(("[NOTICE]", "[WARNING]", "[ALERT]"))).strip()

    async def do(self, command: str, expected: str = "") -> None:
        """Sends a command whose answer must begin with `expected`; by default the answer must be empty.

        Raises:
            RuntimeSocketError: HAProxy does not answer, or answers something else.
        """
        answer = await self.ask(command)
        if not (answer.startswith(expected) if expected else not answer):
            raise RuntimeSocketError(f"{command}: {answer}")

    def close(self) -> None:
        """Closes the connection."""
        if self._streams is not None:
            with contextlib.suppress(RuntimeError):  # The event loop may be closed.
                self._streams[1].close()
            self._streams = None

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await open_socket(self._folder, self._name)
        # Setting variables is an experimental command.
        writer.write(b"prompt\n")
        await reader.readuntil(_PROMPT)
        writer.write(b"experimental-mode on\n")
        await reader.readuntil(_PROMPT)
        self._streams = reader, writer
        return self._streams


async def open_socket(folder: Path, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to a Unix socket in a folder.

    Raises:
        OSError: no process listens on it.
    """
    # The path of a socket has at most 107 bytes, so the folder is named by a descriptor.
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{descriptor}/{name}", limit=_LIMIT_BYTES)
    finally:
        os.close(descriptor)


@dataclass
class _Draining:
    seat: Seat
    ends_s: float
    """The monotonic time at which the remaining requests are closed."""


class Members:
    """The servers of one HAProxy process. A new process needs a new instance.

    A removed server is drained: it gets no new requests, its running requests may finish for `drain_s`, then they are
    closed and the server is deleted. The requests of a replica that moves to another backend are not closed.
    """

    def __init__(self, socket: RuntimeSocket, limits: ProxyLimits, service: Service, seats: Iterable[Seat]) -> None:
        """`service` and `seats` are those of the configuration with which the process was started."""
        self._socket = socket
        self._limits = limits
        self._active = {seat.path: seat for seat in seats}
        self._draining: dict[str, _Draining] = {}
        self._variables = variables(service)
        self._pattern = sticky_pattern(service)
        self._percents: dict[str, int] = {}
        """The weight of limited replicas in percent of the usual one, by the name of their seats."""
        self._shares: dict[str, int] = {}
        """The weight of replicas that are slower than others in percent, by the name of their seats."""

    @property
    def names(self) -> set[str]:
        """The names of the replicas that may get requests."""
        return {seat.name for seat in self._active.values()}

    async def limit(self, name: str, percent: int) -> None:
        """Sets the weight of a replica, in percent of the usual weight. With 0 % it gets no new requests.

        With less than 100 % it gets one request at a time. Requests whose key belongs to the replica are not limited.

        Raises:
            RuntimeSocketError: HAProxy refused a command, or did not answer.
        """
        self._percents[name] = percent
        await self._set_weights(name)

    async def share(self, name: str, percent: int) -> None:
        """Sets the percentage of the usual requests that a replica gets because of its speed, from 1 to 100.

        Raises:
            RuntimeSocketError: HAProxy refused a command, or did not answer.
        """
        if self._shares.get(name, 100) != percent:
            self._shares[name] = percent
            await self._set_weights(name)

    async def _set_weights(self, name: str) -> None:
        for seat in list(self._active.values()):
            if seat.name == name:
                await self._set_weight(seat)

    async def _set_weight(self, seat: Seat) -> None:
        percent = self._percents.get(seat.name, 100)
        if not percent:
            await self._socket.do(f"set server {seat.path} state drain")
            return
        await self._socket.do(f"set server {seat.path} state ready")
        if seat.backend != "sticky":  # There, requests would wait for the one that has the place.
            most = self._limits.concurrency if percent == 100 else 1
            await self._socket.do(f"set maxconn server {seat.path} {most}")
        percent = max(1, percent * self._shares.get(seat.name, 100) // 100)
        await self._socket.do(f"set server {seat.path} weight {percent}%")

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
        if (pattern := sticky_pattern(service)) != self._pattern:
            await self._socket.do(f"clear map {STICKY}")
            self._pattern = ""
            if pattern:
                await self._socket.do(f"add map {STICKY} " + pattern.replace("\\", r"\\"))
            self._pattern = pattern
        # The variables follow the added servers: a new policy must find servers in its backend.
        for name, value in variables(service).items():
            if self._variables[name] != value:
                await self._socket.do(f"set var {name} {value}")
                self._variables[name] = value
        for path in [path for path in self._active if path not in wanted]:
            await self._socket.do(f"set server {path} state drain")
            self._draining[path] = _Draining(self._active.pop(path), math.inf)
        there = self.names
        for one in self._draining.values():
            if one.seat.name not in there:  # Otherwise the replica only moves to another backend.
                one.ends_s = min(one.ends_s, time.monotonic() + service.drain_s)
        self._percents = {name: percent for name, percent in self._percents.items() if name in there}
        self._shares = {name: percent for name, percent in self._shares.items() if name in there}

    async def remove_drained(self) -> None:
        """Deletes the drained servers that have no requests, and those whose time has expired.

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
        await self._set_weight(seat)
        self._active[seat.path] = self._draining.pop(seat.path).seat
