"""Reads and writes pipes and terminals without blocking the event loop."""

import asyncio
import os
from collections.abc import Callable

PIECE_BYTES = 32 << 10


class Descriptor:
    """A pipe, terminal or socket, which it owns. At most one task may read, and one may write."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._is_open = True
        os.set_blocking(number, False)

    async def read(self) -> bytes:
        """Returns the next bytes; none at the end of the stream."""
        loop = asyncio.get_running_loop()
        while self._is_open:
            try:
                return os.read(self._number, PIECE_BYTES)
            except BlockingIOError:
                await self._until(loop.add_reader, loop.remove_reader)
            except OSError:  # No process has the terminal open any more, or the connection was reset.
                return b""
        return b""

    async def write(self, data: bytes) -> None:
        """Writes bytes; waits while the other side does not read.

        Raises:
            BrokenPipeError: the other side is closed.
        """
        loop = asyncio.get_running_loop()
        left = memoryview(data)
        while left:
            if not self._is_open:
                raise BrokenPipeError("closed")
            try:
                left = left[os.write(self._number, left) :]
            except BlockingIOError:
                await self._until(loop.add_writer, loop.remove_writer)
            except OSError as error:
                raise BrokenPipeError(str(error)) from None

    def close(self) -> None:
        """Closes it. No task may be reading or writing."""
        if self._is_open:
            self._is_open = False
            os.close(self._number)

    def fileno(self) -> int:
        """Returns the number of the descriptor."""
        return self._number

    async def _until(self, add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], bool]) -> None:
        ready = asyncio.Event()
        add(self._number, ready.set)
        try:
            await ready.wait()
        finally:
            remove(self._number)
