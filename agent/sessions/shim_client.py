"""The agent's side of the socket to the shim of a session."""

import asyncio
import json
import os
import socket
from typing import Any

from agent.sessions.session_shim import MESSAGE_BYTES

_DESCRIPTORS = 3


class CannotStart(Exception):
    """The session cannot begin in the task. The message says why."""


class ShimClient:
    """The connection to the shim of a session. The session ends when it is closed."""

    def __init__(self, shim: socket.socket) -> None:
        shim.setblocking(False)
        self._shim = shim

    async def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Returns the next message, and the descriptors with it.

        Raises:
            CannotStart: the shim has ended, or sends an error.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                flags = socket.MSG_CMSG_CLOEXEC
                text, descriptors, _, _ = socket.recv_fds(self._shim, MESSAGE_BYTES, _DESCRIPTORS, flags)
                break
            except BlockingIOError:
                ready = asyncio.Event()
                loop.add_reader(self._shim, ready.set)
                try:
                    await ready.wait()
                finally:
                    loop.remove_reader(self._shim)
            except OSError as error:
                raise CannotStart(f"the session's process has ended: {error}") from None
        if not text:
            raise CannotStart("the session's process was killed")
        message: dict[str, Any] = json.loads(text)
        if "error" in message:
            for descriptor in descriptors:
                os.close(descriptor)
            raise CannotStart(str(message["error"]))
        return message, descriptors

    async def send(self, **message: Any) -> None:
        """Sends a message. Does nothing if the shim has ended."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._shim, json.dumps(message).encode())
        except OSError:
            return

    def close(self) -> None:
        """Ends the session and its processes."""
        self._shim.close()
