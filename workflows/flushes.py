"""Attempts of a workload that were given up while their tasks save their last checkpoint."""

import asyncio
from collections.abc import Coroutine

from temporalio import workflow

_SLACK_S = 5.0
"""After the grace of the tasks: what runs on then is fenced."""


class Flushes:
    """Those that go on, usually none. True while there is one."""

    def __init__(self) -> None:
        self._going: list[asyncio.Task[None]] = []
        self._by_s = 0.0
        """When the last of them must be done (workflow time)."""

    def __bool__(self) -> bool:
        return bool(self._going)

    def begin(self, work: Coroutine[None, None, None], grace_s: float) -> None:
        """Lets `work`, which stops an attempt's tasks within `grace_s`, go on beside the workload's life."""
        self._going.append(asyncio.ensure_future(work))
        self._by_s = max(self._by_s, workflow.time() + grace_s + _SLACK_S)

    async def saved(self) -> None:
        """Until the tasks have saved and ended, or their time is over."""
        left_s = max(0.0, self._by_s - workflow.time())
        try:
            await workflow.wait_condition(lambda: all(task.done() for task in self._going), timeout=left_s)
        except TimeoutError:
            return
        await self.ended()

    async def ended(self) -> None:
        """Until all is known of them, however long that takes."""
        while self._going:
            await self._going[0]
            del self._going[0]
