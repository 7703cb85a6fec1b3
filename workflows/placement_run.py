"""The nightly run of Tetris: plans the placement of tables, then moves a few tables at a time (MAST 3.4, 3.5)."""

import asyncio
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, FailureError

with workflow.unsafe.imports_passed_through():
    from domain.placement_runs import MoveOrder, MoveRef, NextMove, PlacementRunRef, PlacementRunTicket
    from domain.protocol.activities import Activity
    from domain.protocol.data import NIGHTLY, ReplicateTable
    from workflows.activity_calls import give_up, on_region, record

LONG_HISTORY_EVENTS = 10_000
"""The workflow continues as new once its history has this many events and the running moves are finished."""
_TRIES = 3
_COPY_TRIES = 10
_COPY_S = 24 * 3600.0
_GATHERING_S = 2 * 3600.0


@workflow.defn(name="PlacementRunWorkflow")
class PlacementRunWorkflow:
    """The workflow of one placement run. Its plan and moves are in Postgres, so a replacement workflow continues it."""

    def __init__(self) -> None:
        self._paused = False
        self._told = False

    @workflow.signal
    def refresh(self) -> None:
        """Signals that moves were paused or resumed."""
        self._told = True

    @workflow.run
    async def run(self) -> None:
        """Plans if there is no plan yet, then moves tables until all moves are done or the deadline has passed."""
        placement_run = workflow.info().workflow_id
        ticket = await record(Activity.OPEN_PLACEMENT_RUN, PlacementRunRef(placement_run), PlacementRunTicket)
        problem = (
            await _in_peace(Activity.PLAN_PLACEMENT_RUN, PlacementRunRef(placement_run), ticket)
            if ticket.state == "planning"
            else None
        )
        if ticket.state not in ("planning", "moving"):
            return
        if problem is None:
            watching = asyncio.create_task(self._watch())
            await asyncio.gather(*(self._lane(NextMove(placement_run, lane)) for lane in range(ticket.lanes)))
            give_up(watching)
            if _is_long():
                workflow.continue_as_new()
            await _in_peace(Activity.ASSIGN_PARTITIONS, PlacementRunRef(placement_run), ticket)
        await record(Activity.END_PLACEMENT_RUN, PlacementRunRef(placement_run, problem))

    async def _watch(self) -> None:
        while True:
            await workflow.wait_condition(lambda: self._told)
            self._told = False
            self._paused = await record(Activity.PLACEMENT_PAUSED, None, bool)

    async def _lane(self, ask: NextMove) -> None:
        while not _is_long():
            order = await record(Activity.NEXT_MOVE, ask, MoveOrder)
            if order.over:
                return
            if order.paused:
                self._paused = True
                await workflow.wait_condition(lambda: not self._paused or _is_long())
                continue
            await self._move(ask.placement_run, order)

    async def _move(self, placement_run: str, order: MoveOrder) -> None:
        """Copies a table and finishes its move. Copies again if the table was appended to meanwhile.

        Returns without finishing the move if moves are paused.
        """
        problem = None
        finished = False
        while not finished and problem is None:
            try:
                if not await self._copied(order):
                    return
            except ActivityError as error:
                problem = str(error.cause or error)
            finished = await record(Activity.FINISH_MOVE, MoveRef(placement_run, order.number, problem), bool)

    async def _copied(self, order: MoveOrder) -> bool:
        """Copies the table of a move; returns False if moves were paused, which cancels the copy."""
        request = ReplicateTable(order.table, order.source_region, order.target_region, NIGHTLY)
        copy = asyncio.ensure_future(
            on_region(Activity.COPY_TABLE, request, order.target_region, start_to_close_s=_COPY_S, tries=_COPY_TRIES)
        )
        pause = asyncio.ensure_future(workflow.wait_condition(lambda: self._paused))
        await workflow.wait([copy, pause], return_when=asyncio.FIRST_COMPLETED)
        give_up(pause)
        if not copy.done():
            give_up(copy)
            return False
        copy.result()
        return True


async def _in_peace(activity: Activity, ref: PlacementRunRef, ticket: PlacementRunTicket) -> str | None:
    """Runs the planning activity, possibly for hours; returns its error message, or None on success."""
    try:
        await workflow.execute_activity(
            activity.value,
            ref,
            start_to_close_timeout=timedelta(seconds=_GATHERING_S + 4 * ticket.solve_s),
            heartbeat_timeout=timedelta(seconds=60),
            retry_policy=RetryPolicy(maximum_attempts=_TRIES),
        )
    except FailureError as error:
        cause = error.cause or error
        return cause.message if isinstance(cause, ApplicationError) else str(cause)
    return None


def _is_long() -> bool:
    return workflow.info().get_current_history_length() > LONG_HISTORY_EVENTS
