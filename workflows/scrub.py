"""Verifies a region's copies of tables, over and over."""

import asyncio
from contextlib import suppress
from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.protocol import Activity, Scrub
    from workflows.effects import on_region

ROUNDS = 500
"""After so many rounds the history is continued in a new one."""
_ROUND_S = 24 * 3600.0


@workflow.defn(name="ScrubWorkflow")
class ScrubWorkflow:
    """One for each region. What is due is in Postgres, so a new one goes on where another stopped."""

    def __init__(self) -> None:
        self._asked = False

    @workflow.signal
    def look(self) -> None:
        """Something is due now."""
        self._asked = True

    @workflow.run
    async def run(self, request: Scrub) -> None:
        """Rounds of verification; each says how long to rest."""
        for _ in range(ROUNDS):
            self._asked = False
            rest_s = await on_region(Activity.SCRUB, request, request.region, start_to_close_s=_ROUND_S)
            with suppress(asyncio.TimeoutError):
                await workflow.wait_condition(lambda: self._asked, timeout=timedelta(seconds=max(rest_s, 1)))
        workflow.continue_as_new(request)
