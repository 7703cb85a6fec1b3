"""Verifies a region's copies of tables continuously."""

import asyncio
from contextlib import suppress
from datetime import timedelta

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from domain.protocol.activities import Activity
    from domain.protocol.data import Scrub
    from workflows.activity_calls import on_region

ROUNDS = 500
"""The workflow continues as new after this many rounds."""
_ROUND_S = 24 * 3600.0


@workflow.defn(name="ScrubWorkflow")
class ScrubWorkflow:
    """The verification loop of one region. The due checks are in Postgres, so a replacement workflow continues them."""

    def __init__(self) -> None:
        self._asked = False

    @workflow.signal
    def refresh(self) -> None:
        """Signals that a check is due now."""
        self._asked = True

    @workflow.run
    async def run(self, request: Scrub) -> None:
        """Repeats rounds of verification. Each round returns the time to sleep after it."""
        for _ in range(ROUNDS):
            self._asked = False
            rest_s = await on_region(Activity.SCRUB, request, request.region, start_to_close_s=_ROUND_S)
            with suppress(asyncio.TimeoutError):
                await workflow.wait_condition(lambda: self._asked, timeout=timedelta(seconds=max(rest_s, 1)))
        workflow.continue_as_new(request)
