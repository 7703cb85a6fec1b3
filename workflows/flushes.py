"""Released attempts of a workload whose tasks still save their last checkpoint."""

import asyncio
from collections.abc import Coroutine

from temporalio import workflow

_SLACK_S = 5.0
"""Extra time after the grace of the tasks. Tasks that still run afterwards are fenced."""


class PendingSaves:
    """The released attempts whose tasks are still saving; usually none. The object is true while there are any."""

    def __init__(self) -> None:
        self._going: list[asyncio.Task[None]] = []
        self._by_s = 0.0
        """The latest deadline of the attempts (workflow time)."""

    def __bool__(self) -> bool:
        return bool(self._going)

    def begin(self, work: Coroutine[None, None, None], grace_s: float) -> None:
        """Starts `work`, which stops an attempt's tasks within `grace_s`, concurrently with the next attempt."""
        self._going.append(asyncio.ensure_future(work))
        self._by_s = max(self._by_s, workflow.time() + grace_s + _SLACK_S)

    async def saved(self) -> None:
        """Waits until the tasks have saved and ended, or until the deadline."""
        left_s = max(0.0, self._by_s - workflow.time())
        try:
            await workflow.wait_condition(lambda: all(task.done() for task in self._going), timeout=left_s)
        except TimeoutError:
            return
        await self.ended()

    async def ended(self) -> None:
        """Waits until all attempts have ended and been recorded, without a deadline."""
        while self._going:
            await self._going[0]
            del self._going[0]
