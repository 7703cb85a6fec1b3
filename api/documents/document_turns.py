"""Large documents take turns, so that parsing and validating them does not slow down the requests of others."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool

from api.auth import Caller
from api.threads import ThreadPool

T = TypeVar("T")
_LARGE_BYTES = 64 << 10
"""A smaller document takes a few milliseconds of CPU time."""


class Turns:
    """The processing of documents in one API process. Must be used from one event loop only."""

    def __init__(self) -> None:
        self._threads = ThreadPool(2)
        self._locks: dict[str, asyncio.Lock] = {}
        self._asked: Counter[str] = Counter()

    async def run(self, caller: Caller, body: bytes, work: Callable[[], T]) -> T:
        """Calls `work`, which parses and checks the document `body`, in a thread and returns its result.

        At most one large document of each tenant, and two of all tenants, are processed at a time. The others wait;
        tenants take turns.
        """
        if len(body) <= _LARGE_BYTES:
            return await run_in_threadpool(work)
        owner = f"tenant {caller.tenant}" if caller.tenant is not None else f"key {caller.id}"
        self._asked[owner] += 1
        try:
            async with self._locks.setdefault(owner, asyncio.Lock()):
                return await self._threads.run(work)
        finally:
            self._asked[owner] -= 1
            if not self._asked[owner]:
                del self._asked[owner], self._locks[owner]
