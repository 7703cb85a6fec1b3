"""The rounds of housekeeping, and copies of tables."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest
import pytest_asyncio
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner

import workflows.housekeeping
from domain.ids import CONTROL_QUEUE, region_queue
from domain.protocol.activities import Activity
from domain.protocol.data import ReplicateTable
from tests.workflows.agents import until
from tests.workflows.lab import serving
from tests.workflows.servers import skipping_server
from tests.workflows.stand_ins import Housekeeping
from workflows.housekeeping import HousekeepingWorkflow
from workflows.replica import ReplicaWorkflow

Server = tuple[WorkflowEnvironment, Client]


@pytest_asyncio.fixture(loop_scope="session")
async def server() -> AsyncIterator[Server]:
    """A test server whose time can be skipped."""
    async with skipping_server() as opened:
        yield opened


async def test_rounds_rest_and_delete(server: Server) -> None:
    """Each round first waits for the time that the previous round returned, and then deletes."""
    environment, client = server
    house = Housekeeping()
    async with serving(client, CONTROL_QUEUE, [HousekeepingWorkflow], house.all()):
        await client.start_workflow(HousekeepingWorkflow.run, id="house", task_queue=CONTROL_QUEUE)
        await environment.sleep(timedelta(seconds=290))
        assert house.names() == []
        await environment.sleep(timedelta(seconds=11))
        await until(lambda: len(house.calls) >= 2, "the first round is done")
        while len(house.calls) < 6:
            await environment.sleep(timedelta(seconds=2))
    assert house.names()[:6] == 3 * ["house.expire", "house.remove_replicas"]


async def test_what_fails_is_left_for_the_next_round(server: Server) -> None:
    """If an activity keeps failing, the round continues with the next activity, and the next round tries again."""
    environment, client = server
    house = Housekeeping()
    house.errors[Activity.EXPIRE] = [RuntimeError("no such table") for _ in range(3)]
    async with serving(client, CONTROL_QUEUE, [HousekeepingWorkflow], house.all()):
        await client.start_workflow(HousekeepingWorkflow.run, id="house", task_queue=CONTROL_QUEUE)
        while len(house.calls) < 6:
            await environment.sleep(timedelta(seconds=60))
    assert house.names()[:6] == ["house.expire"] * 3 + [
        "house.remove_replicas",
        "house.expire",
        "house.remove_replicas",
    ]


async def test_housekeeping_goes_on_in_a_new_history(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `ROUNDS` rounds housekeeping continues as new."""
    # No sandbox: sandboxed workflows have their own copies of modules, which cannot be patched.
    monkeypatch.setattr(workflows.housekeeping, "ROUNDS", 2)
    environment, client = server
    house = Housekeeping()
    runner = UnsandboxedWorkflowRunner()
    async with serving(client, CONTROL_QUEUE, [HousekeepingWorkflow], house.all(), runner):
        handle = await client.start_workflow(HousekeepingWorkflow.run, id="house", task_queue=CONTROL_QUEUE)
        while len(house.calls) < 5:
            await environment.sleep(timedelta(seconds=60))
        assert (await client.get_workflow_handle("house").describe()).run_id != handle.first_execution_run_id
    assert house.names()[:4] == 2 * ["house.expire", "house.remove_replicas"]


async def test_a_table_is_copied_by_the_region_that_gets_it(client: Client) -> None:
    """The target region's worker copies the table, retries on failure, and the workflow returns the copied bytes."""
    house = Housekeeping()
    house.errors[Activity.COPY_TABLE] = [RuntimeError("broken pipe")]
    request = ReplicateTable("digits", "east", "north")
    async with (
        serving(client, "copies", [ReplicaWorkflow], []),
        serving(client, region_queue("north"), [], [house.copy_table]),
    ):
        copied = await asyncio.wait_for(
            client.execute_workflow(ReplicaWorkflow.run, request, id="replica/digits/north", task_queue="copies"), 20.0
        )
    assert copied == 1 << 30
    assert house.requests(Activity.COPY_TABLE) == [request, request]


async def test_a_replica_that_is_wanted_again_meanwhile_is_looked_at_again(client: Client) -> None:
    """A request during the copy causes one more copy afterwards; a request before its start does not."""
    tries: list[ReplicateTable] = []
    goes_on = asyncio.Event()

    @activity.defn(name=Activity.COPY_TABLE.value)
    async def copy_table(request: ReplicateTable) -> int:
        tries.append(request)
        await goes_on.wait()
        return len(tries)

    request = ReplicateTable("digits", "east", "south")
    async with (
        serving(client, "again", [ReplicaWorkflow], []),
        serving(client, region_queue("south"), [], [copy_table]),
    ):
        handle = await client.start_workflow(
            ReplicaWorkflow.run, request, id="replica/digits/south", task_queue="again", start_signal="asked"
        )
        await until(lambda: len(tries) == 1, "the first try has started")
        await handle.signal(ReplicaWorkflow.asked)
        goes_on.set()
        assert await asyncio.wait_for(handle.result(), 20.0) == 2
    assert tries == [request, request]


async def test_a_cancelled_copy_ends_when_nobody_copies_any_more(client: Client) -> None:
    """A cancelled workflow ends after its activity, which gets the cancellation with a heartbeat."""
    lived: list[str] = []

    @activity.defn(name=Activity.COPY_TABLE.value)
    async def copy_table(request: ReplicateTable) -> int:
        lived.append("began")
        try:
            while True:
                activity.heartbeat()
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            lived.append("ended")
            raise

    request = ReplicateTable("digits", "east", "moon")
    async with (
        serving(client, "cancelled", [ReplicaWorkflow], []),
        serving(client, region_queue("moon"), [], [copy_table]),
    ):
        handle = await client.start_workflow(
            ReplicaWorkflow.run, request, id="replica/digits/moon", task_queue="cancelled"
        )
        await until(lambda: lived == ["began"], "the copy has started")
        await handle.cancel()
        with pytest.raises(WorkflowFailureError):
            await asyncio.wait_for(handle.result(), 40.0)
    assert lived == ["began", "ended"]
