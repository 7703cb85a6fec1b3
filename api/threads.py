"""Thread pools by what they are for: work of one kind cannot take the threads of another.

Endpoints share anyio's default pool. Authentication, streams, object stores, archives and health checks have pools of
their own, so each of them goes on while another's threads all wait.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


class Pool:
    """A bounded number of threads for blocking calls. Calls beyond it wait in the order in which they came."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, function: Callable[[], T]) -> T:
        """What `function` returns, called in one of the threads."""
        if self._limiter is None:  # It belongs to the event loop that first uses it.
            self._limiter = anyio.CapacityLimiter(self._threads)
        return await anyio.to_thread.run_sync(function, limiter=self._limiter)


class Threads:
    """The pools of one API process."""

    def __init__(self) -> None:
        self.authentication = Pool(4)
        self.suspects = Pool(1)
        """Looks up keys that come from addresses with too many failed logins."""
        self.streams = Pool(8)
        """Reads Postgres for streams."""
        self.stores = Pool(8)
        """Reads object stores for logs: a store that does not answer holds these and no others."""
        self.archives = Pool(2)
        self.service = Pool(2)
        """For `/readyz` and `/metrics`, which ask for no key."""
        self._probe: asyncio.Task[object] | None = None

    async def serving(self, within_s: float) -> bool:
        """Whether endpoints and authentication get a thread within `within_s`. Calls share a probe that still waits."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._take_one_each())
        done, _ = await asyncio.wait([self._probe], timeout=within_s)
        return bool(done)

    async def _take_one_each(self) -> None:
        await asyncio.gather(anyio.to_thread.run_sync(_nothing), self.authentication.run(_nothing))

    def close(self) -> None:
        """Gives up a probe that still waits."""
        if self._probe is not None:
            self._probe.cancel()


def _nothing() -> None:
    pass
