"""Mail comes late, twice, out of order, or while the workflow is between two histories."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner

import workflows.workload
from domain.phases import Phase
from domain.protocol import Activity, Mail, MailKind, WorkloadInput
from tests.workflows.lab import Lab, Life
from tests.workflows.stories import goes

WAITING = ("pending", "placing waiting_for_victims")
AGAIN = ("placing awarded", "provisioning starting_tasks", "running running")
RUNNING = ("pending", *AGAIN)
BY_OPERATOR = ("checkpointing preempted_by_operator", "preempted preempted_by_operator")


async def running(life: Life) -> None:
    """Takes it from the queue to where its tasks run."""
    await life.award()
    await life.runs()


@goes(*RUNNING, *BY_OPERATOR, *AGAIN, "succeeded completed")
async def test_mail_that_is_delivered_twice_counts_once(life: Life) -> None:
    """A preemption that is delivered again during the next attempt leaves that one alone."""
    await running(life)
    mail = await life.mail(MailKind.PREEMPT, 0, by="ada")
    await life.reaches(Phase.PREEMPTED)
    await running(life)
    await life.mail(MailKind.PREEMPT, 0, mail.id, by="ada")
    for agent in life.agents:
        agent.ends()
    assert await life.result() == "succeeded"


@goes("pending")
async def test_a_repetition_that_comes_before_the_workflow_is_known_as_one(unborn: Life) -> None:
    """Mail that an earlier run of the workflow had seen is dropped, though it is there before this run begins."""
    repeated = Mail(7, MailKind.CANCEL.value, 0, {})
    await unborn.workflow_starts(WorkloadInput(unborn.id, seen_mail=[7]), repeated)
    history = await unborn.handled()
    assert any(e.HasField("workflow_execution_signaled_event_attributes") for e in history)


@goes(*WAITING, "preempted evicted", *WAITING[1:], *AGAIN[1:], "succeeded completed")
async def test_mail_about_an_earlier_attempt_is_ignored(life: Life) -> None:
    """Neither old slots, nor an old award, nor an old eviction, nor an old loss touches the present attempt."""
    await life.award(ready=False)
    await life.mail(MailKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    await life.award(ready=False)
    await life.mail(MailKind.SLOTS_READY, 1)
    await life.mail(MailKind.AWARDED, 1, ready=True, region="east")
    await life.mail(MailKind.EVICT, 1)
    await life.mail(MailKind.MACHINE_LOST, 1, machine=life.agents[0].machine)
    await life.handled()
    assert life.facts.staged == []
    await life.mail(MailKind.SLOTS_READY, 2)
    await life.runs()
    await life.mail(MailKind.HUNG, 1)
    for agent in life.agents:
        agent.ends()
    assert await life.result() == "succeeded"


@goes("pending", "placing awarded", "provisioning starting_tasks", "cancelled cancelled_by_user")
async def test_a_cancellation_comes_before_older_mail(life: Life) -> None:
    """Of an eviction and a later cancellation that wait together, the cancellation is heard."""
    life.facts.held.add(Activity.STAGED_HERE)
    for agent in life.agents:
        agent.held.add(Activity.PREPARE_NODE)
    await life.award()
    await life.reaches(Phase.PROVISIONING)
    await life.mail(MailKind.EVICT)
    await life.mail(MailKind.CANCEL, 0)
    life.facts.held.clear()
    assert await life.result() == "cancelled"


@goes("pending", "failed pending_expired")
async def test_a_workload_that_waits_for_too_long_fails(life: Life) -> None:
    """Mail of an expiry ends a workload that is in the queue, with the expiry as its reason."""
    await life.mail(MailKind.CANCEL, 0, code="pending_expired", waited_s=61, limit_s=60)
    assert await life.result() == "failed"


@goes(*RUNNING, "succeeded completed")
async def test_an_expiry_that_comes_after_the_award_is_ignored(life: Life) -> None:
    """An expiry is about one wait in the queue: an attempt that was awarded meanwhile runs to its end."""
    life.facts.held.add(Activity.STAGE)
    await life.award()
    await life.mail(MailKind.CANCEL, 0, code="pending_expired", waited_s=61, limit_s=60)
    life.facts.held.clear()
    await life.runs()
    for agent in life.agents:
        agent.ends()
    assert await life.result() == "succeeded"


@pytest_asyncio.fixture(loop_scope="session")
async def restless(dev_client: Client, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Life]:
    """A life whose workflow continues as new after every attempt."""
    # Not sandboxed, for there each workflow has modules of its own, which cannot be patched.
    monkeypatch.setattr(workflows.workload, "LONG_HISTORY_EVENTS", 1)
    async with Lab.open(dev_client, UnsandboxedWorkflowRunner(), "restless") as lab:
        life = lab.life()
        try:
            await life.begins()
            yield life
            life.check_releases()
            history = await life.handle.fetch_history()
            began = history.events[0].workflow_execution_started_event_attributes
            assert began.continued_execution_run_id, "it never continued as new"
        finally:
            await life.close()


@goes(*RUNNING, *BY_OPERATOR, *AGAIN, "pending task_failed", *AGAIN, "failed retries_exhausted")
async def test_a_history_continued_in_a_new_one_forgets_nothing(restless: Life) -> None:
    """Over a change of histories attempts go on counting, failures still count, and a repetition stays one."""
    await running(restless)
    mail = await restless.mail(MailKind.PREEMPT, 0)
    await restless.reaches(Phase.PREEMPTED)
    await running(restless)
    await restless.mail(MailKind.PREEMPT, 0, mail.id)
    restless.agents[0].ends(1)
    await restless.reaches(Phase.PENDING)
    await running(restless)
    restless.agents[0].ends(1)
    assert await restless.result() == "failed"


@goes(*RUNNING, *BY_OPERATOR, "cancelled cancelled_by_user")
async def test_mail_that_comes_while_a_history_is_continued_is_read_in_the_next(restless: Life) -> None:
    """A cancellation that arrives while the last attempt is being released is not lost with its history."""
    restless.facts.held.add(Activity.RELEASE)
    await running(restless)
    await restless.mail(MailKind.PREEMPT, 0)
    await restless.reaches(Phase.CHECKPOINTING)
    for agent in restless.agents:
        await restless.asks(agent, Activity.STOP_NODE)
    await restless.pending(Activity.STOP_NODE, 0)
    await restless.mail(MailKind.CANCEL, 0, by="ada")
    restless.facts.held.clear()
    assert await restless.result() == "cancelled"
