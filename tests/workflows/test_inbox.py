"""Messages that arrive late, twice, out of order, or while the workflow continues as new."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner

import workflows.workload
from domain.phases import Phase
from domain.protocol.activities import Activity
from domain.protocol.workload_messages import MessageKind, WorkloadMessage
from domain.protocol.workloads import WorkloadInput
from tests.workflows.lab import Lab, Life
from tests.workflows.running import ends_well
from tests.workflows.stories import goes

WAITING = ("pending", "placing waiting_for_victims")
AGAIN = ("placing awarded", "provisioning starting_tasks", "running running")
RUNNING = ("pending", *AGAIN)
BY_OPERATOR = ("checkpointing preempted_by_operator", "preempted preempted_by_operator")


async def running(life: Life) -> None:
    """Awards the workload and waits until its tasks run."""
    await life.award()
    await life.runs()


@goes(*RUNNING, *BY_OPERATOR, *AGAIN, "succeeded completed")
async def test_mail_that_is_delivered_twice_counts_once(life: Life) -> None:
    """A preemption that is delivered again during the next attempt has no effect."""
    await running(life)
    mail = await life.mail(MessageKind.PREEMPT, 0, by="ada")
    await life.reaches(Phase.PREEMPTED)
    await running(life)
    await life.mail(MessageKind.PREEMPT, 0, mail.id, by="ada")
    await ends_well(life)


@goes("pending")
async def test_a_repetition_that_comes_before_the_workflow_is_known_as_one(unborn: Life) -> None:
    """A message that an earlier run of the workflow has seen is dropped, even if it arrives with the start."""
    repeated = WorkloadMessage(7, MessageKind.CANCEL.value, 0, {})
    await unborn.workflow_starts(WorkloadInput(unborn.id, seen_mail=[7]), repeated)
    history = await unborn.handled()
    assert any(e.HasField("workflow_execution_signaled_event_attributes") for e in history)


@goes(*WAITING, "preempted evicted", *WAITING[1:], *AGAIN[1:], "succeeded completed")
async def test_mail_about_an_earlier_attempt_is_ignored(life: Life) -> None:
    """Slots, awards, evictions and losses of an earlier attempt do not affect the current one."""
    await life.award(ready=False)
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    await life.award(ready=False)
    await life.mail(MessageKind.SLOTS_READY, 1)
    await life.mail(MessageKind.AWARDED, 1, ready=True, region="east")
    await life.mail(MessageKind.EVICT, 1)
    await life.mail(MessageKind.MACHINE_LOST, 1, machine=life.agents[0].machine)
    await life.handled()
    assert life.facts.staged == []
    await life.mail(MessageKind.SLOTS_READY, 2)
    await life.runs()
    await life.mail(MessageKind.HUNG, 1)
    await ends_well(life)


@goes("pending", "placing awarded", "provisioning starting_tasks", "cancelled cancelled_by_user")
async def test_a_cancellation_comes_before_older_mail(life: Life) -> None:
    """If an eviction and a later cancellation are pending, the cancellation takes precedence."""
    life.facts.held.add(Activity.STAGED_HERE)
    for agent in life.agents:
        agent.held.add(Activity.PREPARE_NODE)
    await life.award()
    await life.reaches(Phase.PROVISIONING)
    await life.mail(MessageKind.EVICT)
    await life.mail(MessageKind.CANCEL, 0)
    life.facts.held.clear()
    assert await life.result() == "cancelled"


@goes("pending", "failed pending_expired")
async def test_a_workload_that_waits_for_too_long_fails(life: Life) -> None:
    """The message of an expiry fails a queued workload, with the expiry as its reason."""
    await life.mail(MessageKind.CANCEL, 0, code="pending_expired", waited_s=61, limit_s=60)
    assert await life.result() == "failed"


@goes(*RUNNING, "succeeded completed")
async def test_an_expiry_that_comes_after_the_award_is_ignored(life: Life) -> None:
    """An expiry that arrives after the award is ignored, and the attempt runs to its end."""
    life.facts.held.add(Activity.STAGE)
    await life.award()
    await life.mail(MessageKind.CANCEL, 0, code="pending_expired", waited_s=61, limit_s=60)
    life.facts.held.clear()
    await life.runs()
    await ends_well(life)


@pytest_asyncio.fixture(loop_scope="session")
async def restless(dev_client: Client, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Life]:
    """A workload whose workflow continues as new after every attempt."""
    # No sandbox: sandboxed workflows have their own copies of modules, which cannot be patched.
    monkeypatch.setattr(workflows.workload, "LONG_HISTORY_EVENTS", 1)
    async with Lab.open(dev_client, UnsandboxedWorkflowRunner(), "restless") as lab:
        life = lab.life()
        try:
            await life.begins()
            yield life
            life.check_releases()
            history = await life.handle.fetch_history()
            began = history.events[0].workflow_execution_started_event_attributes
            assert began.continued_execution_run_id, "the workflow never continued as new"
        finally:
            await life.close()


@goes(*RUNNING, *BY_OPERATOR, *AGAIN, "pending task_failed", *AGAIN, "failed retries_exhausted")
async def test_a_history_continued_in_a_new_one_forgets_nothing(restless: Life) -> None:
    """Attempt numbers, failures and seen messages are kept when the workflow continues as new."""
    await running(restless)
    mail = await restless.mail(MessageKind.PREEMPT, 0)
    await restless.reaches(Phase.PREEMPTED)
    await running(restless)
    await restless.mail(MessageKind.PREEMPT, 0, mail.id)
    restless.agents[0].ends(1)
    await restless.reaches(Phase.PENDING)
    await running(restless)
    restless.agents[0].ends(1)
    assert await restless.result() == "failed"


@goes(*RUNNING, *BY_OPERATOR, "cancelled cancelled_by_user")
async def test_mail_that_comes_while_a_history_is_continued_is_read_in_the_next(restless: Life) -> None:
    """A cancellation that arrives during the release is handled by the continued run."""
    restless.facts.held.add(Activity.RELEASE)
    await running(restless)
    await restless.mail(MessageKind.PREEMPT, 0)
    await restless.reaches(Phase.CHECKPOINTING)
    for agent in restless.agents:
        await restless.asks(agent, Activity.STOP_NODE)
    await restless.pending(Activity.STOP_NODE, 0)
    await restless.mail(MessageKind.CANCEL, 0, by="ada")
    restless.facts.held.clear()
    assert await restless.result() == "cancelled"
