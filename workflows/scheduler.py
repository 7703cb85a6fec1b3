"""The scheduling loop: scan the queue, request bids from every region, award. The workflow itself keeps no state."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, FailureError

with workflow.unsafe.imports_passed_through():
    from domain import ids
    from domain.protocol.activities import Activity
    from domain.protocol.scheduling import (
        AwardRequest,
        AwardResult,
        BidRequest,
        DryRunRequest,
        DryRunResult,
        ScanTicket,
    )
    from workflows.activity_calls import record

LONG_HISTORY_EVENTS = 4000
"""The workflow continues as new between two ticks once its history has this many events."""
_TRIES = 3
_AFTER_ERROR_S = 5.0


@workflow.defn(name="SchedulerWorkflow")
class SchedulerWorkflow:
    """The scheduling loop of the installation. It ticks at every scan interval, and after changes that may matter.

    Several changes may be combined into one tick.
    """

    def __init__(self) -> None:
        self._woken = True
        self._probes: set[asyncio.Future[bool]] = set()

    @workflow.signal
    def wake(self) -> None:
        """Signals a change that may allow a queued workload to be placed."""
        self._woken = True

    @workflow.run
    async def run(self) -> None:
        """Ticks until its history is long, then continues as new."""
        while workflow.info().get_current_history_length() < LONG_HISTORY_EVENTS:
            self._woken = False
            rest_s = await self._tick()
            try:
                await workflow.wait_condition(lambda: self._woken, timeout=timedelta(seconds=rest_s))
            except TimeoutError:
                continue
        await workflow.wait_condition(workflow.all_handlers_finished)
        workflow.continue_as_new()

    async def _tick(self) -> float:
        """Runs one scan and the auctions of its queue; returns the seconds until the next tick without a signal.

        An error ends this tick only.
        """
        try:
            ticket = await record(Activity.SCAN, None, ScanTicket, tries=_TRIES)
            self._probe(ticket)
            rest_s = ticket.interval_s if ticket.rest_s is None else min(ticket.interval_s, ticket.rest_s)
            regions, missed = list(ticket.regions), list[str]()
            for first in range(0, ticket.queued, ticket.batch):
                late = await _late(ticket, regions, first)
                # A region that misses the deadline gets no more requests in the same pass.
                regions, missed = [r for r in regions if r not in late], missed + late
                result = await _award(ticket, first, missed)
                rest_s = min(rest_s, ticket.interval_s if result.rest_s is None else result.rest_s)
                if result.over or workflow.info().get_current_history_length() > 2 * LONG_HISTORY_EVENTS:
                    break  # Temporal limits the length of histories: the next pass starts at the head of the queue.
        except FailureError as error:
            workflow.logger.warning("the scheduling tick failed: %s", error.cause or error)
            return _AFTER_ERROR_S
        return rest_s

    def _probe(self, ticket: ScanTicket) -> None:
        """Sends bid requests to silent regions, concurrently with the pass. An answer wakes the loop."""
        for region in ticket.probed:
            probe = asyncio.ensure_future(_bid(ticket, region, 0, ticket.probe_timeout_s))
            self._probes.add(probe)
            probe.add_done_callback(self._probed)

    def _probed(self, probe: asyncio.Future[bool]) -> None:
        self._probes.discard(probe)
        if not probe.cancelled() and probe.exception() is None and probe.result():
            self._woken = True


async def _late(ticket: ScanTicket, regions: Sequence[str], first: int) -> list[str]:
    """Requests concurrent bids on a batch from all regions (MAST 4.3); returns the regions that missed the deadline."""
    answers = await asyncio.gather(*(_bid(ticket, region, first, ticket.bid_timeout_s) for region in regions))
    return [r for r, answered in zip(regions, answers, strict=True) if not answered]


async def _award(ticket: ScanTicket, first: int, missed: Sequence[str]) -> AwardResult:
    """Awards the plans of a batch in queue order, in the regions that answered."""
    request = AwardRequest(ticket.scan, first, [*ticket.silent, *missed], ticket.bid_timeout_s)
    return await record(Activity.AWARD, request, AwardResult, tries=_TRIES)


async def _bid(ticket: ScanTicket, region: str, first: int, timeout_s: float) -> bool:
    try:
        await workflow.execute_activity(
            Activity.BID.value,
            BidRequest(region, ticket.scan, first),
            task_queue=ids.region_queue(region),
            result_type=int,
            schedule_to_close_timeout=timedelta(seconds=timeout_s),
            start_to_close_timeout=timedelta(seconds=timeout_s),
            retry_policy=RetryPolicy(initial_interval=timedelta(milliseconds=200)),
        )
    except ActivityError:
        return False
    return True


@workflow.defn(name="DryRunWorkflow")
class DryRunWorkflow:
    """Computes what would happen to a workload if it were submitted now."""

    @workflow.run
    async def run(self, request: DryRunRequest) -> DryRunResult:
        """Runs one dry run. Nothing is written."""
        result: DryRunResult = await workflow.execute_local_activity(
            Activity.DRY_RUN.value,
            request,
            result_type=DryRunResult,
            start_to_close_timeout=timedelta(seconds=20),
            retry_policy=RetryPolicy(maximum_attempts=3),
        )
        return result
