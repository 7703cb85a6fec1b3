"""Ensures that the singletons of an installation exist in Temporal: search attributes, workflows and the schedule.

Temporal's state may be lost, or restored from a backup, while workers run. If nothing is missing, a round consists of
two calls that only read.
"""

import asyncio
import itertools
import logging
from datetime import timedelta

from sqlalchemy import Engine
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleAlreadyRunningError,
    ScheduleCalendarSpec,
    ScheduleOverlapPolicy,
    SchedulePolicy,
    ScheduleRange,
    ScheduleSpec,
    ScheduleUpdate,
    ScheduleUpdateInput,
    WorkflowExecutionStatus,
)
from temporalio.service import RPCError, RPCStatusCode

from activities.rounds import RoundLog
from activities.workflow_start import ensure_workflow
from domain import ids
from infra.config.data import NightlySettings
from infra.search_attributes import register

_log = logging.getLogger(__name__)
_ALL_EVERY = 12
_LATE_S = 600.0
SINGLETONS = {
    "SchedulerWorkflow": (ids.SCHEDULER_WORKFLOW_ID, "scans the queue and awards workloads"),
    "HousekeepingWorkflow": (ids.HOUSEKEEPING_WORKFLOW_ID, "deletes data whose retention time has passed"),
}
"""The singleton workflows, each with its id and its summary in Temporal's UI."""


async def assert_singletons(client: Client, nightly: NightlySettings) -> None:
    """Creates and starts the singletons that are missing.

    Raises:
        RPCError: Temporal does not answer, or refuses a request.
    """
    await register(client)
    await _start(client)
    try:
        await client.create_schedule(ids.PLACEMENT_SCHEDULE_ID, placement_schedule(nightly))
    except ScheduleAlreadyRunningError:
        return


async def _start(client: Client) -> None:
    """Starts the singleton workflows that are not running."""
    for name, (id_, summary) in SINGLETONS.items():
        await ensure_workflow(client, name, id_, summary=summary)


async def _runs(client: Client) -> list[str | None]:
    """Returns the run ids of the singleton workflows, or None for one that is not running. Sends only read requests."""
    runs: list[str | None] = []
    for id_, _ in SINGLETONS.values():
        try:
            found = await client.get_workflow_handle(id_).describe()
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            runs.append(None)
        else:
            runs.append(found.run_id if found.status == WorkflowExecutionStatus.RUNNING else None)
    return runs


async def keep_singletons(engine: Engine, client: Client, nightly: NightlySettings, interval_s: float) -> None:
    """Checks the singleton workflows every `interval_s` seconds until cancelled.

    All singletons are ensured every `_ALL_EVERY` rounds, and whenever a workflow has a new run id: Temporal's state was
    lost.
    """
    known: list[str | None] = []
    rounds = RoundLog(engine, "singleton workflows", max(_LATE_S, _ALL_EVERY * interval_s))
    for number in itertools.count():
        try:
            async with rounds.one_async():
                if number % _ALL_EVERY == 0:
                    known = []
                if not known or None in known or await _runs(client) != known:
                    await assert_singletons(client, nightly)
                    known = await _runs(client)
        except Exception as error:  # Temporal does not answer, or its namespace does not exist yet.
            _log.warning("singleton workflows in Temporal: %s; trying again", error)
        await asyncio.sleep(interval_s)


def placement_schedule(nightly: NightlySettings) -> Schedule:
    """Returns a schedule with one start a day, in the time zone of the settings. It skips starts during a run."""
    calendars = []
    if nightly.start is not None:
        hour, minute = (int(part) for part in nightly.start.split(":"))
        calendars.append(ScheduleCalendarSpec(hour=[ScheduleRange(hour)], minute=[ScheduleRange(minute)]))
    return Schedule(
        action=ScheduleActionStartWorkflow(
            "PlacementRunWorkflow",
            id=ids.PLACEMENT_RUN_WORKFLOW_ID,
            task_queue=ids.CONTROL_QUEUE,
            static_summary="plans the placement of tables and moves them",
        ),
        spec=ScheduleSpec(
            calendars=calendars,
            jitter=timedelta(seconds=nightly.jitter_s),
            time_zone_name=nightly.time_zone,
        ),
        policy=SchedulePolicy(
            overlap=ScheduleOverlapPolicy.SKIP, catchup_window=timedelta(seconds=nightly.catch_up_s)
        ),
    )  # fmt: skip


async def set_schedule(client: Client, nightly: NightlySettings) -> None:
    """Creates the schedule, or updates the existing one. Whether it is paused in Temporal does not change."""
    wanted = placement_schedule(nightly)
    try:
        await client.create_schedule(ids.PLACEMENT_SCHEDULE_ID, wanted)
    except ScheduleAlreadyRunningError:

        def change(found: ScheduleUpdateInput) -> ScheduleUpdate:
            wanted.state = found.description.schedule.state
            return ScheduleUpdate(wanted)

        await client.get_schedule_handle(ids.PLACEMENT_SCHEDULE_ID).update(change)
