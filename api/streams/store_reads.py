"""Reads logs from object stores, with a time limit for each read."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from api.threads import ThreadPool

T = TypeVar("T")
ANSWER_S = 20.0
"""How long a read may take."""
_MOST_LATE = 2


class StoreReads:
    """Reads in threads of a pool. A store that does not answer occupies at most a few of them."""

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._late: Counter[str] = Counter()
        """Number of timed-out reads that still occupy a thread, by URL of the store."""

    async def run(self, url: str, read: Callable[[], T]) -> T:
        """Calls `read`, which reads from the store at `url`, in a thread and returns its result.

        A timed-out read continues in its thread, so the caller must not use the objects again that it reads with.

        Raises:
            TimeoutError: the read takes more than `ANSWER_S`, or too many reads of this store have timed out.
        """
        if self._late[url] >= _MOST_LATE:
            raise TimeoutError("the store does not answer")
        call = asyncio.ensure_future(self._pool.run(read))
        done, _ = await asyncio.wait([call], timeout=ANSWER_S)
        if done:
            return call.result()
        self._late[url] += 1
        call.add_done_callback(lambda _: self._ended(url, call))
        raise TimeoutError(f"the store did not answer within {ANSWER_S:g} s")

    def _ended(self, url: str, call: "asyncio.Future[T]") -> None:
        self._late[url] -= 1
        if not call.cancelled():
            call.exception()
