"""Commands to a running HAProxy, through its runtime socket."""

import asyncio
import contextlib
import os
from pathlib import Path

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
        # The path of a socket has at most 107 bytes, so the folder is named by a descriptor.
        folder = os.open(self._folder, os.O_PATH | os.O_DIRECTORY)
        try:
            path = f"/proc/self/fd/{folder}/{self._name}"
            reader, writer = await asyncio.open_unix_connection(path, limit=_LIMIT_BYTES)
        finally:
            os.close(folder)
        # Setting variables is an experimental command.
        writer.write(b"prompt\n")
        await reader.readuntil(_PROMPT)
        writer.write(b"experimental-mode on\n")
        await reader.readuntil(_PROMPT)
        self._streams = reader, writer
        return self._streams
