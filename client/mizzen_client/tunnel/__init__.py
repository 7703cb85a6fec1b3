"""The protocol of sessions in running tasks: frames on WebSockets, and channels with flow control.

The client and the agent of the task's machine talk to each other through the API, which forwards each message.
"""

from mizzen_client.tunnel.channels import ByteChannel, ChannelReset, Channels
from mizzen_client.tunnel.frames import BadFrame, Frame, FrameKind, control, pack, unpack

__all__ = [
    "BadFrame",
    "ByteChannel",
    "ChannelReset",
    "Channels",
    "Frame",
    "FrameKind",
    "control",
    "pack",
    "unpack",
]
