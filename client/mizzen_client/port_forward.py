"""Forwards local ports to ports of a running task."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from mizzen_client.remote_command import SessionClosed, connect
from mizzen_client.tunnel import Channels, FrameKind, control, pack, unpack
from mizzen_client.tunnel.splice import splice

if TYPE_CHECKING:
    from mizzen_client.client import Client
    from mizzen_client.views import Session


def forward_ports(
    client: "Client",
    session: "Session",
    ports: Sequence[tuple[int, int]],
    *,
    address: str = "127.0.0.1",
    on_listening: Callable[[int, int], None] = lambda port, local: None,
    on_failure: Callable[[int, str], None] = lambda port, why: None,
) -> None:
    """Forward local ports to ports of a task until the session ends.

    Args:
        client: the client of the API.
        session: a session of the kind `forward`.
        ports: pairs of a port of the task and a local port; 0: any free one.
        address: the local address.
        on_listening: called with the task's and the local port when connections are accepted.
        on_failure: called with the task's port and why a connection to it has failed.

    Raises:
        SessionClosed: the session has ended.
        Unreachable: the API does not answer, or refuses the session.
        OSError: a local port is in use.
    """
    asyncio.run(_Forwarding(ports, address, on_listening, on_failure).run(client, session))


class _Forwarding:
    def __init__(
        self,
        ports: Sequence[tuple[int, int]],
        address: str,
        on_listening: Callable[[int, int], None],
        on_failure: Callable[[int, str], None],
    ) -> None:
        self._ports = ports
        self._address = address
        self._on_listening = on_listening
        self._on_failure = on_failure
        self._numbers = count()
        self._works: set[asyncio.Task[None]] = set()

    async def run(self, client: "Client", session: "Session") -> None:
        connection = await connect(client, session)
        channels = Channels(connection.send)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(connection.close)
            await connection.send(control("begin"))
            try:
                while True:
                    frame = unpack(await connection.recv())
                    if frame.kind is not FrameKind.CONTROL:
                        channels.receive(frame)
                        continue
                    said = frame.message()
                    if said["type"] == "started":
                        await self._listen(stack, connection, channels)
                    elif said["type"] == "closed":
                        raise SessionClosed(said["because"])
            except ConnectionClosed:
                raise SessionClosed("the connection to the API was lost") from None
            finally:
                channels.close("the session has ended")
                for work in self._works:
                    work.cancel()

    async def _listen(self, stack: contextlib.AsyncExitStack, connection: ClientConnection, channels: Channels) -> None:
        for port, local in self._ports:

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port) -> None:
                work = asyncio.current_task()
                assert work is not None
                self._works.add(work)
                try:
                    await self._forward(port, reader, writer, connection, channels)
                except asyncio.CancelledError:
                    pass  # The session has ended. Until Python 3.12, asyncio prints a traceback for this error.
                finally:
                    self._works.discard(work)

            server = await asyncio.start_server(accept, self._address, local)
            stack.callback(server.close)
            self._on_listening(port, server.sockets[0].getsockname()[1])

    async def _forward(
        self,
        port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: ClientConnection,
        channels: Channels,
    ) -> None:
        channel = channels.open(next(self._numbers))
        try:
            with contextlib.suppress(ConnectionClosed):
                await connection.send(pack(FrameKind.OPEN, channel.number, port.to_bytes(4, "big")))
                await splice(channel, reader, writer)
            if channel.failure is not None:
                self._on_failure(port, channel.failure)
        finally:
            channels.forget(channel)
