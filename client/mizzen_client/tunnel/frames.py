"""Frames: each binary WebSocket message of a session is one.

    byte 0          kind
    bytes 1 to 4    number of the channel, big-endian
    then            the body

A session that runs a command has the channels `STDIN`, `STDOUT` and `STDERR`. In a session that forwards ports, the
client opens a channel for each connection.
"""

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

STDIN, STDOUT, STDERR = 0, 1, 2
MAX_DATA_BYTES = 32 << 10
"""Maximum number of bytes in one data frame."""
MAX_FRAME_BYTES = 64 << 10
"""Maximum size of a frame in bytes. A longer message is a protocol error."""
WINDOW_BYTES = 256 << 10
"""Maximum number of bytes in flight on a channel: sent, but not used by the receiver."""
_HEADER = struct.Struct(">BI")


class FrameKind(IntEnum):
    """Kinds of frames."""

    DATA = 0
    """Bytes of a channel."""
    END = 1
    """No more bytes come on this channel in this direction."""
    CREDIT = 2
    """The receiver has used bytes of a channel; the body is their number."""
    OPEN = 3
    """The client opens a channel; the body is the port to connect to."""
    RESET = 4
    """The channel is closed in both directions; the body says why."""
    CONTROL = 5
    """A JSON object with a `type`; it belongs to no channel."""


class BadFrame(Exception):
    """The other side has sent something that is not part of the protocol."""


@dataclass(frozen=True)
class Frame:
    """One frame."""

    kind: FrameKind
    channel: int
    body: bytes

    def message(self) -> dict[str, Any]:
        """Returns the body as a JSON object.

        Raises:
            BadFrame: it is not one.
        """
        try:
            found = json.loads(self.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise BadFrame("a control frame contains no JSON object")
        return found

    def number(self) -> int:
        """Returns the body as a number of 4 bytes.

        Raises:
            BadFrame: it is not one.
        """
        if len(self.body) != 4:
            raise BadFrame(f"a frame of kind {self.kind.name} has a body of {len(self.body)} bytes; must be 4")
        return int.from_bytes(self.body, "big")


def pack(kind: FrameKind, channel: int = 0, body: bytes = b"") -> bytes:
    """Returns a frame as a message."""
    return _HEADER.pack(kind, channel) + body


def control(type_: str, **values: Any) -> bytes:
    """Returns a frame of kind `CONTROL` as a message."""
    return pack(FrameKind.CONTROL, body=json.dumps({"type": type_, **values}).encode())


def unpack(message: bytes | str) -> Frame:
    """Returns the frame of a message.

    Raises:
        BadFrame: the message is not a valid frame.
    """
    if isinstance(message, str) or not _HEADER.size <= len(message) <= MAX_FRAME_BYTES:
        raise BadFrame(f"a message must be binary and have {_HEADER.size} to {MAX_FRAME_BYTES} bytes")
    kind, channel = _HEADER.unpack_from(message)
    if kind > max(FrameKind):
        raise BadFrame(f"unknown kind of frame {kind}")
    return Frame(FrameKind(kind), channel, message[_HEADER.size :])
