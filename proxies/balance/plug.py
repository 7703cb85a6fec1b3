"""Occupies the only connection slot of the server `plug`, so that HAProxy queues requests while no replica is up."""

import asyncio
import contextlib
from pathlib import Path

from proxies.balance.configuration import PLUG, PLUG_SOCKET
from proxies.balance.counts import STATISTICS, read_rows
from proxies.balance.runtime import RuntimeSocket, open_socket

_TRIES, _PAUSE_S = 100, 0.02


class Plug:
    """The request that occupies the plug of one HAProxy process. Without it requests are refused instead of queued."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def fill(self, runtime: RuntimeSocket) -> None:
        """Occupies the plug, unless it is occupied.

        Raises:
            RuntimeSocketError: HAProxy refused a command, or did not answer. The next call tries again.
        """
        if self._streams is not None and not self._streams[0].at_eof():
            return
        await runtime.do(f"set server hold/{PLUG} weight 0")
        self.close()
        with contextlib.suppress(OSError):
            self._streams = await open_socket(self._folder, PLUG_SOCKET)
            self._streams[1].write(b"GET / HTTP/1.1\r\nHost: plug\r\n\r\n")
            for _ in range(_TRIES):
                rows = read_rows(await runtime.ask(STATISTICS))
                if any(row["svname"] == PLUG and row["scur"] == "1" for row in rows):
                    await runtime.do(f"set server hold/{PLUG} weight 1")
                    return
                await asyncio.sleep(_PAUSE_S)
            self.close()

    def close(self) -> None:
        """Ends the request."""
        if self._streams is not None:
            with contextlib.suppress(RuntimeError):  # The event loop may be closed.
                self._streams[1].close()
            self._streams = None
