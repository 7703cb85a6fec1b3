"""A session that forwards ports: connections that a process in the task's isolation opens for the client."""

import asyncio
import contextlib
import socket

from websockets.exceptions import ConnectionClosed

from agent.sessions.shim_client import CannotStart, ShimClient
from mizzen_client.tunnel import BadFrame, ByteChannel, Channels, Frame, FrameKind, control
from mizzen_client.tunnel.channels import Send
from mizzen_client.tunnel.splice import splice

MOST_CONNECTIONS = 128
"""Maximum number of open connections of a session."""


class ForwardSession:
    """Connections to ports of a task. `send` sends a message to the client."""

    def __init__(self, shim: ShimClient, send: Send) -> None:
        self._shim = shim
        self._send = send
        self._channels = Channels(send)
        self._asking = asyncio.Lock()
        self._works: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Runs until it is cancelled.

        Raises:
            CannotStart: no process can be started in the task.
        """
        await self._shim.receive()
        await self._send(control("started"))
        try:
            forever: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            return await forever
        finally:
            self._channels.close("the session has ended")
            for work in self._works:
                work.cancel()
            if self._works:
                await asyncio.wait(self._works)

    async def receive(self, frame: Frame) -> None:
        """Handles a frame of the client.

        Raises:
            BadFrame: the frame violates the protocol.
        """
        if frame.kind is FrameKind.CONTROL:
            raise BadFrame("a session that forwards ports has no terminal and gets no signals")
        if frame.kind is not FrameKind.OPEN:
            self._channels.receive(frame)
            return
        port = frame.number()
        if not 0 < port < 1 << 16:
            raise BadFrame(f"port {port}: must be 1 to 65535")
        channel = self._channels.open(frame.channel)
        work = asyncio.create_task(self._connect(channel, port))
        self._works.add(work)
        work.add_done_callback(self._works.discard)

    async def _connect(self, channel: ByteChannel, port: int) -> None:
        try:
            with contextlib.suppress(ConnectionClosed):
                if len(self._channels) > MOST_CONNECTIONS:
                    await channel.reset(f"{MOST_CONNECTIONS} connections are open, the maximum of a session")
                    return
                try:
                    reader, writer = await asyncio.open_connection(sock=await self._connected(port))
                except (CannotStart, OSError) as error:
                    await channel.reset(str(error))
                    return
                await splice(channel, reader, writer)
        finally:
            self._channels.forget(channel)

    async def _connected(self, port: int) -> socket.socket:
        """Returns a connection to a port as the task could open it."""
        async with self._asking:
            await self._shim.send(connect=port)
            _, numbers = await self._shim.receive()
        if not numbers:
            raise CannotStart("the session's process in the task has ended")
        return socket.socket(fileno=numbers[0])
