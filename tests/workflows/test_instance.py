"""The life of an instance: the order of its steps on a Temporal server. `tests/capacity` tests their effects."""

import itertools
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner

import workflows.instance
from domain.lifecycle.instances import LATEST_INSTANCES
from domain.protocol.activities import Activity
from domain.protocol.instances import InstanceInput
from tests.workflows.agents import until
from tests.workflows.lab import handled, serving
from tests.workflows.replays import replay
from tests.workflows.stand_ins import LedgerActivities
from workflows.instance import InstanceWorkflow

_NUMBERS = itertools.count(1)


class Instance:
    """One instance's workflow and its ledger."""

    def __init__(self, client: Client, id_: str) -> None:
        self.id = id_
        self.ledger = LedgerActivities()
        self._client = client

    async def begins(self, phase: str = "requested", **more: float) -> None:
        """Starts the workflow as the dispatcher does."""
        times = {"join_s": 60.0, "drain_s": 60.0, **more}
        self.handle: WorkflowHandle[InstanceWorkflow, None] = await self._client.start_workflow(
            InstanceWorkflow.run,
            InstanceInput(self.id, phase, LATEST_INSTANCES, **times),
            id=f"instance/{self.id}",
            task_queue=self.id,
            start_signal="refresh",
        )

    async def told(self, **facts: bool) -> None:
        """Changes the facts in the ledger and signals the workflow to read them."""
        self.ledger.facts = replace(self.ledger.facts, **facts)
        await self.handle.signal(InstanceWorkflow.refresh)

    async def comes_to(self, *phases: str) -> None:
        """Waits until the instance has gone through exactly these phases and its workflow is idle."""
        await until(
            lambda: len(self.ledger.phases()) >= len(phases),
            f"the phases are {phases}; phases so far: {self.ledger.phases()}",
        )
        await handled(self.handle)
        assert self.ledger.phases() == list(phases)


async def whole_life(instance: Instance) -> None:
    """An instance is launched, joins, drains while a workload is there, and is gone after two terminate requests."""
    instance.ledger.ends_after = 2
    await instance.begins()
    await instance.comes_to("launching", "joining done")
    await instance.told(ready=True)
    await instance.comes_to("launching", "joining done", "ready done")
    await instance.told(told=True, held=True)
    await until(
        lambda: len(instance.ledger.requests(Activity.INSPECT_INSTANCE)) >= 7,
        "the workflow has polled the held machine",
    )
    await instance.told(held=False)
    await instance.handle.result()
    assert instance.ledger.phases()[3:] == ["draining told to end", "gone done"]
    assert instance.ledger.names().count("instance.terminate") == 2
    assert instance.ledger.names().index("instance.drain") < instance.ledger.names().index("instance.terminate")


async def refused(instance: Instance) -> None:
    """If the provider refuses the launch, nothing is terminated."""
    instance.ledger.launched = False
    await instance.begins()
    await instance.handle.result()
    assert instance.ledger.phases() == ["launching", "gone refused"]
    assert "instance.terminate" not in instance.ledger.names()


async def lost(instance: Instance) -> None:
    """A lost machine is not drained, but its instance is terminated."""
    instance.ledger.facts = replace(instance.ledger.facts, ready=True)
    await instance.begins()
    await instance.comes_to("launching", "joining done", "ready done")
    await instance.told(lost=True, told=True)
    await instance.handle.result()
    assert instance.ledger.phases()[3:] == ["draining lost", "gone done"]
    assert "instance.drain" not in instance.ledger.names()


async def told_in_launch(instance: Instance) -> None:
    """If the instance is no longer wanted during its launch, the launch is abandoned and the instance is terminated."""
    instance.ledger.errors[Activity.LAUNCH_INSTANCE] = [ApplicationError("no answer") for _ in range(20)]
    await instance.begins()
    await until(lambda: "instance.launch" in instance.ledger.names(), "the launch has been requested")
    await instance.told(told=True)
    await instance.handle.result()
    assert instance.ledger.phases() == ["launching", "draining told to end", "gone done"]


async def never_joins(instance: Instance) -> None:
    """An instance that does not join in time is terminated."""
    await instance.begins(join_s=0.3)
    await instance.handle.result()
    assert instance.ledger.phases() == ["launching", "joining done", "draining timed out", "gone done"]


async def drained_for_long(instance: Instance) -> None:
    """If the machine is not empty at the end of the drain time, the instance is terminated."""
    instance.ledger.facts = replace(instance.ledger.facts, told=True, held=True, ready=True)
    await instance.begins("ready", drain_s=0.7)
    await instance.handle.result()
    assert instance.ledger.phases() == ["ready", "draining told to end", "gone done"]


LIVES = [whole_life, refused, lost, told_in_launch, never_joins, drained_for_long]


@pytest_asyncio.fixture(loop_scope="session")
async def instance(dev_client: Client) -> AsyncIterator[Instance]:
    """An instance whose workflow is not started yet. At the end of the test its history must replay."""
    number = next(_NUMBERS)
    one = Instance(dev_client, f"in-{number}")
    async with serving(dev_client, one.id, [InstanceWorkflow], one.ledger.all()):
        yield one
        await replay(await one.handle.fetch_history())


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.__name__)
async def test_a_life(instance: Instance, life) -> None:  # type: ignore[no-untyped-def]
    """Each function in `LIVES` goes through its phases."""
    await life(instance)


@pytest.mark.parametrize(
    ("phase", "then"),
    [
        ("launching", ["launching", "joining done", "ready done"]),
        ("joining", ["joining", "ready done"]),
        ("ready", ["ready"]),
    ],
)
async def test_a_successor_goes_on_where_the_ledger_is(instance: Instance, phase: str, then: list[str]) -> None:
    """A replacement workflow continues with the step of the phase in the ledger."""
    instance.ledger.facts = replace(instance.ledger.facts, ready=True)
    await instance.begins(phase)
    await instance.comes_to(*then)
    await instance.told(told=True)
    await instance.handle.result()


async def test_a_successor_drains_on(instance: Instance) -> None:
    """A replacement workflow continues a drain."""
    instance.ledger.facts = replace(instance.ledger.facts, told=True, ready=True)
    await instance.begins("draining")
    await instance.handle.result()
    assert instance.ledger.phases() == ["draining", "gone done"]


@pytest.mark.rotating
async def test_a_long_history_ends(dev_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each step that may last, the workflow continues as new, and the times for joining and draining go on."""
    # No sandbox: sandboxed workflows have their own copies of modules, which cannot be patched.
    monkeypatch.setattr(workflows.instance, "LONG_HISTORY_EVENTS", 5)
    one = Instance(dev_client, f"in-{next(_NUMBERS)}")
    async with serving(dev_client, one.id, [InstanceWorkflow], one.ledger.all(), UnsandboxedWorkflowRunner()):
        one.ledger.ends_after = 3
        await one.begins(drain_s=2.0)
        for times in (4, 6):
            while len(one.ledger.requests(Activity.INSPECT_INSTANCE)) < times:
                await one.told()
        await one.told(ready=True)
        await until(lambda: "ready done" in one.ledger.phases(), "the machine serves")
        await one.told()
        await one.told(told=True, held=True)
        await one.handle.result()
    phases = [phase for phase, _ in itertools.groupby(p.split()[0] for p in one.ledger.phases())]
    assert phases == ["launching", "joining", "ready", "draining", "gone"]
    assert one.ledger.names().count("instance.terminate") == 3
    assert len(one.ledger.phases()) > 6, "the workflow has continued as new"
