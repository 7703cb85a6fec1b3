"""Runs the array elements of a runner's attempt: leases them in chunks, and lets the agent run each chunk."""

import asyncio
from contextlib import suppress
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, FailureError, TimeoutError

with workflow.unsafe.imports_passed_through():
    from domain import ids
    from domain.protocol.activities import Activity
    from domain.protocol.leases import (
        CancelElements,
        ElementResult,
        ElementsRun,
        LeasedElement,
        LeaseRequest,
        RunElements,
    )
    from domain.protocol.workloads import LaunchPlan
    from workflows.activity_calls import give_up, record

_RUN_S = 3650 * 86400.0
_CANCEL_S = 30.0
_MOST_EVENTS = 4000
"""With a history of this many events, the runner ends; the scheduler places another one if elements wait."""


class Lane:
    """Leases and runs the chunks of a runner's attempt, on its one machine."""

    def __init__(self, workload_id: str, attempt: int, plan: LaunchPlan) -> None:
        self._id = workload_id
        self._attempt = attempt
        self._plan = plan
        self._machine = plan.nodes[0].machine
        self._results: list[ElementResult] = []
        """The elements of the last chunk."""
        self._going: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts with the first lease."""
        self._going = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        took_s = 0.0
        while True:
            ends = workflow.info().get_current_history_length() > _MOST_EVENTS
            request = LeaseRequest(self._id, self._attempt, self._results, took_s, ends)
            leased = await record(Activity.LEASE_ELEMENTS, request, list[LeasedElement])
            self._results, began_s = [], workflow.time()
            run = await self._chunk(leased)
            self._results, took_s = run.results, workflow.time() - began_s
            if run.is_over or not leased:
                return

    async def _chunk(self, leased: list[LeasedElement]) -> ElementsRun:
        """Lets the agent run a chunk; an empty one ends the runner. Returns known results if the machine is lost."""
        try:
            run: ElementsRun = await workflow.execute_activity(
                Activity.RUN_ELEMENTS.value,
                RunElements(self._id, self._attempt, self._machine, leased),
                task_queue=ids.agent_queue(self._machine),
                result_type=ElementsRun,
                schedule_to_start_timeout=timedelta(seconds=self._plan.node_lost_after_s),
                start_to_close_timeout=timedelta(seconds=_RUN_S),
                heartbeat_timeout=timedelta(seconds=self._plan.heartbeat_timeout_s),
                retry_policy=RetryPolicy(
                    initial_interval=timedelta(milliseconds=500), maximum_interval=timedelta(seconds=5)
                ),
            )
        except ActivityError as error:
            return ElementsRun(_heard(error), is_over=True)
        return run

    async def cancel(self, indexes: list[int]) -> None:
        """Lets the agent stop elements of the chunk; all of them if `indexes` is empty."""
        with suppress(ActivityError):  # The machine is lost: the release of the attempt ends the elements.
            await workflow.execute_activity(
                Activity.CANCEL_ELEMENTS.value,
                CancelElements(self._id, self._attempt, self._machine, indexes),
                task_queue=ids.agent_queue(self._machine),
                schedule_to_close_timeout=timedelta(seconds=_CANCEL_S),
                retry_policy=RetryPolicy(maximum_attempts=3),
            )

    async def settle(self, reported: list[ElementResult], *, silent: bool) -> list[ElementResult]:
        """Returns the known results of the last chunk after the end of the attempt.

        Args:
            reported: the results that the agent reported at the end of the attempt.
            silent: whether the agent did not report the end. The chunk then ends when its heartbeats time out.
        """
        if self._going is not None:
            if not silent:
                give_up(self._going)
            else:
                with suppress(FailureError, asyncio.CancelledError):
                    await self._going
        known = {(one.index, one.attempt): one for one in (*self._results, *reported)}
        return list(known.values())


def _heard(error: BaseException) -> list[ElementResult]:
    """Returns the results in the last heartbeat before an activity timed out."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, TimeoutError) and found.last_heartbeat_details:
            body = found.last_heartbeat_details[0]
            return [ElementResult(**one) for one in body["results"]]
        found = found.__cause__
    return []
