"""From the queue to running tasks: awards, victims, staging, moves between regions, preparation, and every way out."""

from temporalio.exceptions import ApplicationError

from domain.phases import Phase
from domain.protocol import Activity, CheckpointCopy, MailKind
from tests.workflows.lab import AWAY, HOME, Life
from tests.workflows.stories import goes

PROVISIONED = ("pending", "placing awarded", "provisioning starting_tasks")
RUNNING = (*PROVISIONED, "running running")
MIGRATING = ("pending", "placing awarded", "migrating copying_checkpoint")


async def in_migration(life: Life) -> None:
    """Takes it to where its checkpoint is being copied, and keeps it there."""
    life.plan.checkpoint_region = AWAY
    life.facts.held.add(Activity.COPY_CHECKPOINT)
    await life.award()
    await life.reaches(Phase.MIGRATING)
    await life.pending(Activity.COPY_CHECKPOINT, 1)


async def in_preparation(life: Life) -> None:
    """Takes it to where its machines are being prepared, and keeps it there.

    All of them: the test server refuses the cancellation of an activity that is just being completed, and the workflow
    then goes on only after its task's time limit.
    """
    for agent in life.agents:
        agent.held.add(Activity.PREPARE_NODE)
    await life.award()
    for agent in life.agents:
        await life.asks(agent, Activity.PREPARE_NODE)


# ------------------------------------------------------------------------------------------------------------- queue


@goes("pending", "cancelled cancelled_by_user")
async def test_a_queued_workload_is_cancelled_at_once(life: Life) -> None:
    """A cancellation in the queue ends a workload that holds nothing, with the numbers of its mail."""
    await life.mail(MailKind.CANCEL, 0, by="ada")
    assert await life.result() == "cancelled"
    assert life.reason() == {"by": "ada"}
    assert life.facts.releases == []


@goes("pending", "placing awarded", "cancelled cancelled_by_user")
async def test_a_cancellation_that_comes_after_an_award_cancels_the_attempt(life: Life) -> None:
    """Refused as too late by the facts, a cancellation waits for the award's mail and then ends the attempt."""
    life.facts.award(ready=True)
    await life.mail(MailKind.CANCEL, 0, by="ada")
    await life.told_of_award()
    assert await life.result() == "cancelled"
    assert [(r.attempt, r.next_phase) for r in life.facts.releases] == [(1, "cancelled")]


@goes("pending", "placing waiting_for_victims", "cancelled cancelled_by_user")
async def test_a_cancellation_about_the_last_attempt_cancels_the_next_too(life: Life) -> None:
    """A cancellation is meant for the workload: one that names the attempt before a race with an award still counts."""
    life.facts.award(ready=False)
    await life.mail(MailKind.CANCEL, 0)
    await life.told_of_award(ready=False)
    assert await life.result() == "cancelled"


@goes("pending", "placing waiting_for_victims", "preempted evicted", "cancelled cancelled_by_user")
async def test_a_preempted_workload_is_cancelled_in_the_queue(life: Life) -> None:
    """Back in the queue after an eviction, a workload is cancelled as at first."""
    await life.award(ready=False)
    await life.mail(MailKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    await life.mail(MailKind.CANCEL, 0)
    assert await life.result() == "cancelled"


# ----------------------------------------------------------------------------------------------------------- placing


@goes(
    "pending", "placing waiting_for_victims", "provisioning starting_tasks", "running running",
    "succeeded completed",
)  # fmt: skip
async def test_nothing_is_staged_before_the_victims_gave_up_their_slots(life: Life) -> None:
    """An attempt that waits for its victims is staged once it holds all its slots, not before."""
    await life.award(ready=False)
    await life.pending(Activity.PREPARE_NODE, 0)
    assert life.facts.staged == []
    await life.mail(MailKind.SLOTS_READY)
    await life.runs()
    assert [s.attempt for s in life.facts.staged] == [1]
    for agent in life.agents:
        agent.ends()
    assert await life.result() == "succeeded"


@goes(
    "pending", "placing waiting_for_victims", "preempted evicted", "placing awarded", "provisioning starting_tasks",
    "running running", "succeeded completed",
)  # fmt: skip
async def test_evicted_while_it_waits_for_victims_it_runs_at_its_next_award(life: Life) -> None:
    """An eviction before any task started gives the slots up without asking an agent, and the next attempt runs."""
    await life.award(ready=False)
    await life.mail(MailKind.EVICT, evictor="wl-9", evictor_rank=1, rank=7)
    await life.reaches(Phase.PREEMPTED)
    assert life.reason() == {"evictor": "wl-9", "evictor_rank": 1, "rank": 7}
    assert life.stopped() == [[], []]
    await life.award()
    await life.runs()
    for agent in life.agents:
        agent.ends()
    assert await life.result() == "succeeded"
    assert [(r.attempt, r.next_phase) for r in life.facts.releases] == [(1, "preempted"), (2, "succeeded")]


@goes("pending", "placing waiting_for_victims", "pending machine_lost")
async def test_a_machine_lost_before_anything_ran_there_is_blamed(life: Life) -> None:
    """A machine that is lost while an attempt waits for victims ends the attempt and is named in its release."""
    await life.award(ready=False)
    await life.mail(MailKind.MACHINE_LOST, machine=life.agents[1].machine)
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine == life.agents[1].machine


@goes("pending", "placing waiting_for_victims", "cancelled cancelled_by_user")
async def test_a_cancellation_while_it_waits_for_victims_gives_its_slots_up(life: Life) -> None:
    """Cancelled while it waits for victims, an attempt is released as cancelled."""
    await life.award(ready=False)
    await life.mail(MailKind.CANCEL, 0)
    assert await life.result() == "cancelled"
    assert [(r.attempt, r.next_phase) for r in life.facts.releases] == [(1, "cancelled")]


@goes("pending", "placing waiting_for_victims", "preempted machine_drained")
async def test_a_preemption_may_say_more_exactly_why(life: Life) -> None:
    """A code in the mail's detail, as a drain sends it, becomes the reason."""
    await life.award(ready=False)
    await life.mail(MailKind.PREEMPT, code="machine_drained", machine=life.agents[0].machine)
    await life.reaches(Phase.PREEMPTED)
    assert life.reason()["machine"] == life.agents[0].machine


@goes("pending", "placing awarded", "cancelled cancelled_by_user")
async def test_a_launch_that_cannot_be_written_does_not_keep_its_slots_from_a_cancellation(life: Life) -> None:
    """While the launch description cannot be written, again and again, a cancellation is still heard."""
    life.facts.errors[Activity.STAGE] = [RuntimeError("no such bucket") for _ in range(1000)]
    await life.award()
    await life.mail(MailKind.CANCEL, 0)
    assert await life.result() == "cancelled"
    assert life.facts.staged == []


# --------------------------------------------------------------------------------------------------------- migrating


@goes(*MIGRATING, "provisioning starting_tasks", "running running", "succeeded completed")
async def test_a_checkpoint_in_another_region_is_there_before_its_tasks_start(life: Life) -> None:
    """A gang placed away from its checkpoint is prepared only after the copy, which is then its checkpoint's region."""
    await in_migration(life)
    assert [a.requests(Activity.PREPARE_NODE) for a in life.agents] == [[], []]
    assert life.facts.staged_here == []
    life.facts.held.clear()
    await life.runs()
    assert life.facts.copies == [CheckpointCopy(life.id, 1, AWAY, HOME)]
    assert life.facts.staged_here == [1]
    for agent in life.agents:
        agent.ends()
    assert await life.result() == "succeeded"


@goes(*RUNNING, "succeeded completed")
async def test_a_checkpoint_in_the_same_region_is_not_copied(life: Life) -> None:
    """A gang placed where its checkpoint is starts without a copy."""
    life.plan.checkpoint_region = HOME
    await life.award()
    await life.runs()
    for agent in life.agents:
        agent.ends()
    assert await life.result() == "succeeded"
    assert life.facts.copies == []


@goes(*MIGRATING, "preempted evicted")
async def test_evicted_during_a_move_its_checkpoint_stays_where_it_was(life: Life) -> None:
    """An eviction during the copy ends the attempt; the other region is not said to have the checkpoint."""
    await in_migration(life)
    await life.mail(MailKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    assert life.facts.staged_here == []
    assert life.stopped() == [[], []]


@goes(*MIGRATING, "pending machine_lost")
async def test_a_machine_lost_during_a_move_ends_the_attempt(life: Life) -> None:
    """A machine that is lost during the copy ends the attempt and is blamed."""
    await in_migration(life)
    await life.mail(MailKind.MACHINE_LOST, machine=life.agents[0].machine)
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine == life.agents[0].machine


@goes(*MIGRATING, "cancelled cancelled_by_user")
async def test_cancelled_during_a_move_it_ends(life: Life) -> None:
    """A cancellation during the copy ends the workload, without waiting for the copy."""
    await in_migration(life)
    await life.mail(MailKind.CANCEL, 0)
    assert await life.result() == "cancelled"


# ------------------------------------------------------------------------------------------------------ provisioning


@goes(*PROVISIONED, "preempted evicted")
async def test_evicted_during_preparation_no_task_is_ever_started(life: Life) -> None:
    """An eviction does not wait for a machine's preparation: every machine is told to stop, and none to run."""
    await in_preparation(life)
    await life.mail(MailKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]
    assert [a.requests(Activity.RUN_NODE) for a in life.agents] == [[], []]


@goes(*PROVISIONED, "cancelled cancelled_by_user")
async def test_cancelled_during_preparation_it_ends(life: Life) -> None:
    """A cancellation does not wait for a machine's preparation."""
    await in_preparation(life)
    await life.mail(MailKind.CANCEL, 0)
    assert await life.result() == "cancelled"
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]


@goes(*PROVISIONED, "pending machine_lost")
async def test_a_machine_lost_during_preparation_is_not_asked_to_stop(life: Life) -> None:
    """A machine known to be lost is blamed, and only the others are told to stop."""
    await in_preparation(life)
    await life.mail(MailKind.MACHINE_LOST, machine=life.agents[1].machine)
    await life.reaches(Phase.PENDING)
    assert life.stopped() == [[(1, 5.0)], []]
    assert life.facts.releases[0].blames_machine == life.agents[1].machine


@goes(*PROVISIONED, "pending launch_failed", "placing awarded", *RUNNING[2:], "succeeded completed")
async def test_a_machine_that_refuses_to_prepare_is_blamed_and_the_user_is_not(life: Life) -> None:
    """A refusal ends the attempt on every machine without counting as the user's failure."""
    life.plan.retries = 0
    error = ApplicationError("no port is free", type="NoFreePort", non_retryable=True)
    life.agents[1].errors[Activity.PREPARE_NODE] = [error]
    await life.award()
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine == life.agents[1].machine
    assert "no port is free" in life.reason()["error"]
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]
    await life.award()
    await life.runs()
    for agent in life.agents:
        agent.ends()
    assert await life.result() == "succeeded"


@goes(*PROVISIONED, "failed cannot_start")
async def test_what_is_wrong_with_a_workload_fails_it_and_blames_no_machine(life: Life) -> None:
    """An archive that no machine can unpack ends the workload with the fault's name, whatever retries it has."""
    life.plan.retries = 3
    life.agents[0].errors[Activity.PREPARE_NODE] = [ApplicationError("port", type="NoFreePort", non_retryable=True)]
    error = ApplicationError("'d': a folder of this path exists", type="BadArchive", non_retryable=True)
    life.agents[1].errors[Activity.PREPARE_NODE] = [error]
    await life.award()
    assert await life.result() == "failed"
    assert life.facts.releases[0].blames_machine is None
    assert "a folder of this path exists" in life.reason()["error"]


@goes(*PROVISIONED, "pending launch_failed", "placing awarded", *PROVISIONED[2:], "pending launch_failed")
async def test_a_full_disk_blames_nobody(life: Life) -> None:
    """A machine whose disk is full is not blamed, nor is the workload; it is placed again."""
    life.plan.retries = 0
    error = ApplicationError("No space left on device", type="DiskFull", non_retryable=True)
    for attempt in (1, 2):
        life.agents[1].errors[Activity.PREPARE_NODE] = [error]
        await life.award()
        await life.reaches(Phase.PENDING)
        assert [r.blames_machine for r in life.facts.releases] == [None] * attempt


@goes(*PROVISIONED, "pending machine_lost")
async def test_a_machine_without_an_agent_is_lost(life: Life) -> None:
    """A machine whose agent takes no work for as long as it may be away is lost and blamed."""
    life.plan.node_lost_after_s = 0.5
    await life.agents[1].goes()
    await life.award()
    await life.reaches(Phase.PENDING)
    assert life.reason() == {"machine": life.agents[1].machine}
    assert life.facts.releases[0].blames_machine == life.agents[1].machine
    assert life.stopped() == [[(1, 5.0)], []]


@goes(*RUNNING, "succeeded completed")
async def test_a_preparation_that_fails_once_is_tried_again(life: Life) -> None:
    """An error that may pass does not end the attempt; the tasks then learn where their rendezvous is."""
    life.agents[0].errors[Activity.PREPARE_NODE] = [RuntimeError("connection reset")]
    await life.award()
    await life.runs()
    assert len(life.agents[0].requests(Activity.PREPARE_NODE)) == 2
    assert [a.requests(Activity.RUN_NODE)[0].masters for a in life.agents] == [{"main": "10.0.0.1:21000"}] * 2
    for agent in life.agents:
        agent.ends()
    assert await life.result() == "succeeded"
