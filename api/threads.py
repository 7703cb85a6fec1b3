"""Separate thread pools for different kinds of work, so that one kind cannot use up the threads of another.

Endpoints share anyio's default pool. Authentication, streams, object stores, archives and health checks have their own
pools, so each of them continues even if all threads of another pool are blocked.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


class ThreadPool:
    """A bounded number of threads for blocking calls. Further calls wait in first-in, first-out order."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, function: Callable[[], T]) -> T:
        """Calls `function` in one of the threads and returns its result."""
        if self._limiter is None:  # A limiter belongs to the event loop that first uses it.
            self._limiter = anyio.CapacityLimiter(self._threads)
        return await anyio.to_thread.run_sync(function, limiter=self._limiter)


class Threads:
    """The thread pools of one API process."""

    def __init__(self) -> None:
        self.authentication = ThreadPool(4)
        self.suspects = ThreadPool(1)
        """For key lookups of addresses with too many failed logins."""
        self.streams = ThreadPool(8)
        """For reading Postgres for streams."""
        self.stores = ThreadPool(16)
        """For reading logs from object stores; a store that does not respond blocks only these threads."""
        self.archives = ThreadPool(2)
        self.service = ThreadPool(2)
        """For `/readyz` and `/metrics`, which need no key."""
        self._probe: asyncio.Task[object] | None = None

    async def serving(self, within_s: float) -> bool:
        """Returns whether endpoints and authentication get a thread in time. Concurrent calls share one probe."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._take_one_each())
        done, _ = await asyncio.wait([self._probe], timeout=within_s)
        return bool(done)

    async def _take_one_each(self) -> None:
        await asyncio.gather(anyio.to_thread.run_sync(_nothing), self.authentication.run(_nothing))

    def close(self) -> None:
        """Cancels a probe that is still waiting."""
        if self._probe is not None:
            self._probe.cancel()


def _nothing() -> None:
    pass
