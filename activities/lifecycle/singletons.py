"""What an installation has once in Temporal, asserted all the time: search attributes, workflows, nights' schedule.

Temporal's state may be lost, or restored from a backup, while workers run. Each round is two calls that change nothing
where all is well.
"""

import asyncio
import itertools
import logging

from temporalio.client import Client, ScheduleAlreadyRunningError, WorkflowExecutionStatus
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.service import RPCError, RPCStatusCode

from activities.data.night_schedule import night_schedule
from domain import ids
from infra.config import NightlySettings
from infra.search_attributes import register

_log = logging.getLogger(__name__)
_ALL_EVERY = 12
SINGLETONS = {
    "SchedulerWorkflow": (ids.SCHEDULER_WORKFLOW_ID, "scans the queue and awards"),
    "HousekeepingWorkflow": (ids.HOUSEKEEPING_WORKFLOW_ID, "deletes what was kept long enough"),
}
"""Workflow to its id and its summary in Temporal's UI."""


async def assert_singletons(client: Client, nightly: NightlySettings) -> None:
    """Makes and starts what is not there.

    Raises:
        RPCError: Temporal does not answer, or refuses.
    """
    await register(client)
    await _start(client)
    try:
        await client.create_schedule(ids.NIGHT_SCHEDULE_ID, night_schedule(nightly))
    except ScheduleAlreadyRunningError:
        return


async def _start(client: Client) -> None:
    """Starts the workflows that do not run."""
    for name, (id_, summary) in SINGLETONS.items():
        await client.start_workflow(
            name,
            id=id_,
            task_queue=ids.CONTROL_QUEUE,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            static_summary=summary,
        )


async def _runs(client: Client) -> list[str | None]:
    """The ids of the workflows' runs; None: it does not run. Reads only: where all is well it is asked for ever."""
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


async def keep_singletons(client: Client, nightly: NightlySettings, interval_s: float) -> None:
    """Asserts the workflows every `interval_s` seconds until cancelled.

    The rest is asserted where one of them has another run than before, which tells that Temporal's state was lost, and
    now and then.
    """
    known: list[str | None] = []
    for number in itertools.count():
        try:
            if number % _ALL_EVERY == 0:
                known = []
            if not known or None in known or await _runs(client) != known:
                await assert_singletons(client, nightly)
                known = await _runs(client)
        except Exception as error:  # Temporal is away, or has no namespace yet: tried again
            _log.warning("Temporal's singletons: %s; trying again", error)
        await asyncio.sleep(interval_s)
