"""What an installation has once in Temporal, asserted all the time: search attributes, workflows, nights' schedule.

Temporal's state may be lost, or restored from a backup, while workers run. Each round is a handful of calls that change
nothing where all is well.
"""

import asyncio
import logging

from temporalio.client import Client, ScheduleAlreadyRunningError
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy

from activities.night_schedule import night_schedule
from domain import ids
from infra.config import NightlySettings
from infra.search_attributes import register

_log = logging.getLogger(__name__)
SINGLETONS = {
    "SchedulerWorkflow": (ids.SCHEDULER_WORKFLOW_ID, "scans the queue and awards"),
    "HousekeepingWorkflow": (ids.HOUSEKEEPING_WORKFLOW_ID, "reads progress, and deletes what was kept long enough"),
}
"""Workflow to its id and its summary in Temporal's UI."""


async def assert_singletons(client: Client, nightly: NightlySettings) -> None:
    """Starts what is not there.

    Raises:
        RPCError: Temporal does not answer, or refuses.
    """
    await register(client)
    for name, (id_, summary) in SINGLETONS.items():
        await client.start_workflow(
            name,
            id=id_,
            task_queue=ids.CONTROL_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            static_summary=summary,
        )
    try:
        await client.create_schedule(ids.NIGHT_SCHEDULE_ID, night_schedule(nightly))
    except ScheduleAlreadyRunningError:
        return


async def keep_singletons(client: Client, nightly: NightlySettings, interval_s: float) -> None:
    """Asserts them every `interval_s` seconds until cancelled."""
    while True:
        try:
            await assert_singletons(client, nightly)
        except Exception as error:  # Temporal is away, or has no namespace yet: tried again
            _log.warning("Temporal's singletons: %s; trying again", error)
        await asyncio.sleep(interval_s)
