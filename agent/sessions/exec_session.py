"""A session that runs a command: its terminal or pipes on one side, the channels of the client on the other."""

import asyncio
import contextlib
import signal
from typing import Any

from agent.sessions.descriptors import Descriptor
from agent.sessions.session_shim import set_size
from agent.sessions.shim_client import ShimClient
from mizzen_client.tunnel import BadFrame, ByteChannel, ChannelReset, Channels, Frame, FrameKind, control
from mizzen_client.tunnel.channels import Send
from mizzen_client.tunnel.frames import STDERR, STDIN, STDOUT

_END_OF_FILE = b"\x04"
_SIGNALS = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})
"""The signals that a client may send. SIGKILL ends the session."""
_MOST = 10_000


class ExecSession:
    """A command in a task. `send` sends a message to the client."""

    def __init__(self, shim: ShimClient, send: Send, *, terminal: bool) -> None:
        self._shim = shim
        self._send = send
        self._terminal = terminal
        self._channels = Channels(send)
        self._stdin, self._stdout = self._channels.open(STDIN), self._channels.open(STDOUT)
        self._stderr = None if terminal else self._channels.open(STDERR)
        self._size: Descriptor | None = None

    async def run(self) -> int:
        """Runs until the command has ended, and all of its output was sent. Returns its status.

        Raises:
            CannotStart: the command cannot be started.
        """
        _, numbers = await self._shim.receive()
        streams = [Descriptor(number) for number in numbers]
        self._size = streams[0] if self._terminal else None
        await self._send(control("started"))
        stdin = asyncio.create_task(self._feed(streams[0]))
        sources = [(streams[0] if self._terminal else streams[1], self._stdout)]
        if self._stderr is not None:
            sources.append((streams[2], self._stderr))
        outputs = [asyncio.create_task(_drain(source, channel)) for source, channel in sources]
        try:
            ended, _ = await self._shim.receive()
            await asyncio.gather(*outputs)
            return int(ended["exit"])
        finally:
            self._size = None
            for work in (stdin, *outputs):
                work.cancel()
            await asyncio.wait([stdin, *outputs])
            for stream in streams:
                stream.close()

    async def receive(self, frame: Frame) -> None:
        """Handles a frame of the client.

        Raises:
            BadFrame: the frame violates the protocol.
        """
        if frame.kind is FrameKind.CONTROL:
            await self._control(frame.message())
        else:
            self._channels.receive(frame)

    async def _control(self, message: dict[str, Any]) -> None:
        if message.get("type") == "resize" and self._size is not None:
            rows, columns = (_count(message, name) for name in ("rows", "columns"))
            with contextlib.suppress(OSError):
                set_size(self._size.fileno(), rows, columns)
        elif message.get("type") == "signal":
            if message.get("number") not in _SIGNALS:
                raise BadFrame(f"signal: {message.get('number')!r} is not allowed")
            await self._shim.send(signal=message["number"])

    async def _feed(self, stdin: Descriptor) -> None:
        """Writes the client's input. Its end closes a pipe; on a terminal it is the character for the end of a file."""
        with contextlib.suppress(ChannelReset, BrokenPipeError):
            while data := await self._stdin.read():
                await stdin.write(data)
            if self._terminal:
                await stdin.write(_END_OF_FILE)
        if not self._terminal:
            stdin.close()
        # Input that the command does not read is dropped, so that the client is not held up.
        with contextlib.suppress(ChannelReset):
            while await self._stdin.read():
                pass


def _count(message: dict[str, Any], name: str) -> int:
    found = message.get(name)
    if not isinstance(found, int) or not 1 <= found <= _MOST:
        raise BadFrame(f"resize: {name} is {found!r}; must be 1 to {_MOST}")
    return found


async def _drain(source: Descriptor, channel: ByteChannel) -> None:
    """Sends all remaining output to the client."""
    with contextlib.suppress(ChannelReset):
        while data := await source.read():
            await channel.write(data)
        await channel.end()
