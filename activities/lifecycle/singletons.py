"""Ensures that the singletons of an installation exist in Temporal: search attributes, workflows and the schedule.

Temporal's state may be lost, or restored from a backup, while workers run. If nothing is missing, a round consists of
two calls that only read.
"""

import asyncio
import itertools
import logging

from sqlalchemy import Engine
from temporalio.client import Client, ScheduleAlreadyRunningError, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from activities.data.placement_schedule import placement_schedule
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
