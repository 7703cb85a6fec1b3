"""Channels: independent byte streams on one connection, each with its own flow control.

A sender may have `WINDOW_BYTES` under way on a channel. The receiver grants more as its consumer reads. So a slow
consumer stops its own sender, and neither fills the memory of a process nor delays other channels.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from mizzen_client.tunnel.frames import MAX_DATA_BYTES, WINDOW_BYTES, BadFrame, Frame, FrameKind, pack

Send = Callable[[bytes], Awaitable[None]]


class ChannelReset(Exception):
    """The channel was closed by the other side or with the connection. The message says why."""


class ByteChannel:
    """One channel. Each direction must be used by one task only."""

    def __init__(self, number: int, send: Send) -> None:
        self.number = number
        self._send = send
        self._pieces: deque[bytes] = deque()
        self._held = 0
        """Number of bytes in `_pieces`, and of bytes that were read but not yet granted again."""
        self._read_bytes = 0
        self._credit = WINDOW_BYTES
        self._has_ended = False
        self._reset: str | None = None
        self.failure: str | None = None
        """Why the other side has closed the channel before its end; None: it has not."""
        self._changed = asyncio.Event()
        self._granted = asyncio.Event()

    async def read(self) -> bytes:
        """Returns the next bytes; none at the end of the stream.

        Raises:
            ChannelReset: the channel was closed before the end.
        """
        while not self._pieces:
            if self._has_ended:
                return b""
            self._require_open()
            self._changed.clear()
            await self._changed.wait()
        piece = self._pieces.popleft()
        self._read_bytes += len(piece)
        if self._read_bytes >= WINDOW_BYTES // 2:
            granted, self._read_bytes = self._read_bytes, 0
            self._held -= granted
            await self._send(pack(FrameKind.CREDIT, self.number, granted.to_bytes(4, "big")))
        return piece

    async def write(self, data: bytes) -> None:
        """Sends bytes; waits while the receiver has not used the earlier ones.

        Raises:
            ChannelReset: the channel was closed.
        """
        left = memoryview(data)
        while left:
            while self._credit == 0:
                self._require_open()
                self._granted.clear()
                await self._granted.wait()
            self._require_open()
            piece = left[: min(self._credit, MAX_DATA_BYTES)]
            left = left[len(piece) :]
            self._credit -= len(piece)
            await self._send(pack(FrameKind.DATA, self.number, bytes(piece)))

    async def end(self) -> None:
        """Ends the sending direction: no more bytes follow."""
        if self._reset is None:
            await self._send(pack(FrameKind.END, self.number))

    async def reset(self, why: str) -> None:
        """Closes the channel in both directions."""
        if self._reset is None:
            self.close(why)
            await self._send(pack(FrameKind.RESET, self.number, why.encode()[:MAX_DATA_BYTES]))

    def close(self, why: str) -> None:
        """Closes this side of the channel only. Bytes that have arrived can still be read."""
        self._reset = why
        self._changed.set()
        self._granted.set()

    def receive(self, frame: Frame) -> None:
        """Handles a frame of the channel from the other side.

        Raises:
            BadFrame: the frame violates the protocol.
        """
        if frame.kind is FrameKind.DATA:
            self._held += len(frame.body)
            if self._held > WINDOW_BYTES or self._has_ended:
                raise BadFrame(f"channel {frame.channel}: more data than was granted")
            if frame.body:
                self._pieces.append(frame.body)
                self._changed.set()
        elif frame.kind is FrameKind.END:
            self._has_ended = True
            self._changed.set()
        elif frame.kind is FrameKind.CREDIT:
            self._credit += frame.number()
            if self._credit > WINDOW_BYTES:
                raise BadFrame(f"channel {frame.channel}: credit {self._credit} bytes: must be at most {WINDOW_BYTES}")
            self._granted.set()
        elif frame.kind is FrameKind.RESET:
            self.failure = frame.body.decode(errors="replace") or "closed by the other side"
            self.close(self.failure)

    def _require_open(self) -> None:
        if self._reset is not None:
            raise ChannelReset(self._reset)


class Channels:
    """The channels of one connection. `send` sends one message and waits while the connection is slow."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._open: dict[int, ByteChannel] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, number: int) -> ByteChannel:
        """Returns a new channel.

        Raises:
            BadFrame: the number is in use.
        """
        if number in self._open:
            raise BadFrame(f"channel {number} is open already")
        channel = self._open[number] = ByteChannel(number, self._send)
        return channel

    def forget(self, channel: ByteChannel) -> None:
        """Drops a channel. Later frames of it are ignored: the other side may not have received its end yet."""
        self._open.pop(channel.number, None)

    def receive(self, frame: Frame) -> None:
        """Passes a frame to its channel.

        Raises:
            BadFrame: the frame violates the protocol.
        """
        channel = self._open.get(frame.channel)
        if channel is not None:
            channel.receive(frame)

    def close(self, why: str) -> None:
        """Closes all channels on this side, because the connection has ended."""
        for channel in self._open.values():
            channel.close(why)
