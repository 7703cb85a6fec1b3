"""Workflow histories that no worker can replay, as after a rollback of Temporal's database."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from temporalio import activity, workflow
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from activities.lifecycle.singletons import assert_singletons
from activities.roles import control_worker
from domain import ids
from tests.activities.world import World

_MARKER = "marker_recorded_event_attributes"


@activity.defn
async def nothing() -> None:
    """Writes a marker to the history."""


@workflow.defn(name="MachineWorkflow")
class Other:
    """A workflow of this name whose history does not match the real workflow's code."""

    @workflow.run
    async def run(self, machine: str) -> None:
        """Runs a local activity that the real workflow would not run, then waits."""
        await workflow.execute_local_activity(nothing, start_to_close_timeout=timedelta(seconds=5))
        await workflow.wait_condition(lambda: False)


@workflow.defn(name="HousekeepingWorkflow")
class OtherHouse(Other):
    """The same for a workflow of which an installation has exactly one."""

    @workflow.run
    async def run(self) -> None:  # type: ignore[override]
        """Runs a local activity that the real workflow would not run, then waits."""
        await workflow.execute_local_activity(nothing, start_to_close_timeout=timedelta(seconds=5))
        await workflow.wait_condition(lambda: False)


@pytest.mark.parametrize(("name", "arguments"), [("MachineWorkflow", ["r/c/m"]), ("HousekeepingWorkflow", [])])
async def test_a_history_that_cannot_be_replayed_ends_its_workflow(
    town: World, client: Client, name: str, arguments: list[str]
) -> None:
    """A workflow that cannot be replayed fails instead of being retried forever; a new one is then started."""
    id_ = ids.HOUSEKEEPING_WORKFLOW_ID if name == "HousekeepingWorkflow" else ids.machine_workflow_id(arguments[0])
    others = Worker(
        client,
        task_queue=ids.CONTROL_QUEUE,
        workflows=[Other, OtherHouse],
        activities=[nothing],
        workflow_runner=UnsandboxedWorkflowRunner(),
    )
    async with others:
        poisoned = await client.start_workflow(name, args=arguments, id=id_, task_queue=ids.CONTROL_QUEUE)

        async with asyncio.timeout(30):
            while not any([e.HasField(_MARKER) async for e in poisoned.fetch_history_events()]):
                await asyncio.sleep(0.05)
    with ThreadPoolExecutor(8) as threads:
        async with control_worker(client, town.engine, town.settings, threads):
            # A signal makes a worker replay the history, because no worker has it in memory.
            await poisoned.signal("hello", args=[])

            async with asyncio.timeout(30):
                while (await poisoned.describe()).status != WorkflowExecutionStatus.FAILED:
                    await asyncio.sleep(0.05)
            await assert_singletons(client, town.settings.tetris.nightly)
            house = await client.get_workflow_handle(ids.HOUSEKEEPING_WORKFLOW_ID).describe()
            assert house.status == WorkflowExecutionStatus.RUNNING
            assert house.run_id != poisoned.result_run_id
