"""From the queue to running tasks: awards, victims, staging, moves between regions, preparation, and early ends."""

from domain.phases import Phase
from domain.protocol.activities import Activity
from domain.protocol.workload_messages import MessageKind
from domain.protocol.workloads import CheckpointCopy, WorkloadInput
from tests.workflows.lab import AWAY, HOME, Life
from tests.workflows.running import ends_well
from tests.workflows.stories import goes

PROVISIONED = ("pending", "placing awarded", "provisioning starting_tasks")


RUNNING = (*PROVISIONED, "running running")


MIGRATING = ("pending", "placing awarded", "migrating copying_checkpoint")


async def in_migration(life: Life) -> None:
    """Awards the workload and holds it while its checkpoint is being copied."""
    life.plan.checkpoint_region = AWAY
    life.facts.held.add(Activity.COPY_CHECKPOINT)
    await life.award()
    await life.reaches(Phase.MIGRATING)
    await life.pending(Activity.COPY_CHECKPOINT, 1)


async def in_preparation(life: Life) -> None:
    """Awards the workload and holds all its machines in preparation.

    All machines are held, because the test server refuses to cancel an activity that is just completing, and the
    workflow would then wait for the time limit of its workflow task.
    """
    for agent in life.agents:
        agent.held.add(Activity.PREPARE_NODE)
    await life.award()
    for agent in life.agents:
        await life.asks(agent, Activity.PREPARE_NODE)


@goes("pending", "cancelled cancelled_by_user")
async def test_a_queued_workload_is_cancelled_at_once(life: Life) -> None:
    """A cancellation ends a queued workload immediately, with the detail of the message."""
    await life.mail(MessageKind.CANCEL, 0, by="ada")
    assert await life.result() == "cancelled"
    assert life.reason() == {"by": "ada"}
    assert life.facts.releases == []


@goes("pending", "placing awarded", "cancelled cancelled_by_user")
async def test_a_cancellation_that_comes_after_an_award_cancels_the_attempt(life: Life) -> None:
    """A cancellation that loses the race with an award waits for the award's message and then ends the attempt."""
    life.facts.award(ready=True)
    await life.mail(MessageKind.CANCEL, 0, by="ada")
    await life.told_of_award()
    assert await life.result() == "cancelled"
    assert [(r.attempt, r.next_phase) for r in life.facts.releases] == [(1, "cancelled")]


@goes("pending", "placing waiting_for_victims", "cancelled cancelled_by_user")
async def test_a_cancellation_about_the_last_attempt_cancels_the_next_too(life: Life) -> None:
    """A cancellation that names the attempt before a concurrent award still cancels the workload."""
    life.facts.award(ready=False)
    await life.mail(MessageKind.CANCEL, 0)
    await life.told_of_award(ready=False)
    assert await life.result() == "cancelled"


@goes("pending", "placing waiting_for_victims", "preempted evicted", "cancelled cancelled_by_user")
async def test_a_preempted_workload_is_cancelled_in_the_queue(life: Life) -> None:
    """A workload that is queued again after an eviction can be cancelled."""
    await life.award(ready=False)
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    await life.mail(MessageKind.CANCEL, 0)
    assert await life.result() == "cancelled"


@goes(
    "pending", "placing waiting_for_victims", "provisioning starting_tasks", "running running",
    "succeeded completed",
)  # fmt: skip
async def test_nothing_is_staged_before_the_victims_gave_up_their_slots(life: Life) -> None:
    """An attempt that waits for its victims is staged only when it holds all its slots."""
    await life.award(ready=False)
    await life.pending(Activity.PREPARE_NODE, 0)
    assert life.facts.staged == []
    await life.mail(MessageKind.SLOTS_READY)
    await life.runs()
    assert [s.attempt for s in life.facts.staged] == [1]
    await ends_well(life)


@goes(
    "pending", "placing waiting_for_victims", "provisioning starting_tasks", "running running",
    "succeeded completed",
)  # fmt: skip
async def test_images_are_fetched_while_the_victims_give_up_their_slots(unborn: Life) -> None:
    """Agents are asked for the images only; a fetch that does not end delays nothing."""
    life = unborn
    life.agents[1].held.add(Activity.PREPARE_NODE)
    await life.begins(WorkloadInput(life.id, brings_image=True))
    await life.award(ready=False)
    for agent in life.agents:
        await life.asks(agent, Activity.PREPARE_NODE)
    assert [[r.only_images for r in a.requests(Activity.PREPARE_NODE)] for a in life.agents] == [[True], [True]]
    await life.pending(Activity.PREPARE_NODE, 1)
    await life.handled()
    await life.mail(MessageKind.SLOTS_READY)
    await life.asks(life.agents[1], Activity.PREPARE_NODE, 2)
    life.agents[1].held.clear()
    await life.runs()
    assert [[r.only_images for r in a.requests(Activity.PREPARE_NODE)] for a in life.agents] == [[True, False]] * 2
    await ends_well(life)


@goes(
    "pending", "placing waiting_for_victims", "preempted evicted", "placing awarded", "provisioning starting_tasks",
    "running running", "succeeded completed",
)  # fmt: skip
async def test_evicted_while_it_waits_for_victims_it_runs_at_its_next_award(life: Life) -> None:
    """An eviction before any task has started releases the slots without asking agents, and the next attempt runs."""
    await life.award(ready=False)
    await life.mail(MessageKind.EVICT, evictor="wl-9", evictor_rank=1, rank=7)
    await life.reaches(Phase.PREEMPTED)
    assert life.reason() == {"evictor": "wl-9", "evictor_rank": 1, "rank": 7}
    assert life.stopped() == [[], []]
    await life.award()
    await life.runs()
    await ends_well(life)
    assert [(r.attempt, r.next_phase) for r in life.facts.releases] == [(1, "preempted"), (2, "succeeded")]


@goes("pending", "placing waiting_for_victims", "pending machine_lost")
async def test_a_machine_lost_before_anything_ran_there_is_blamed(life: Life) -> None:
    """If a machine is lost while the attempt waits for victims, the attempt ends and the machine is blamed."""
    await life.award(ready=False)
    await life.mail(MessageKind.MACHINE_LOST, machine=life.agents[1].machine)
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine == life.agents[1].machine


@goes("pending", "placing waiting_for_victims", "cancelled cancelled_by_user")
async def test_a_cancellation_while_it_waits_for_victims_gives_its_slots_up(life: Life) -> None:
    """An attempt that is cancelled while it waits for victims is released as cancelled."""
    await life.award(ready=False)
    await life.mail(MessageKind.CANCEL, 0)
    assert await life.result() == "cancelled"
    assert [(r.attempt, r.next_phase) for r in life.facts.releases] == [(1, "cancelled")]


@goes("pending", "placing waiting_for_victims", "preempted machine_drained")
async def test_a_preemption_may_say_more_exactly_why(life: Life) -> None:
    """A reason code in the message's detail, as a drain sends it, becomes the reason."""
    await life.award(ready=False)
    await life.mail(MessageKind.PREEMPT, code="machine_drained", machine=life.agents[0].machine)
    await life.reaches(Phase.PREEMPTED)
    assert life.reason()["machine"] == life.agents[0].machine


@goes("pending", "placing awarded", "cancelled cancelled_by_user")
async def test_a_launch_that_cannot_be_written_does_not_keep_its_slots_from_a_cancellation(life: Life) -> None:
    """A cancellation takes effect while writing the launch description keeps failing."""
    life.facts.errors[Activity.STAGE] = [RuntimeError("no such bucket") for _ in range(1000)]
    await life.award()
    await life.mail(MessageKind.CANCEL, 0)
    assert await life.result() == "cancelled"
    assert life.facts.staged == []


@goes(*MIGRATING, "provisioning starting_tasks", "running running", "succeeded completed")
async def test_a_checkpoint_in_another_region_is_there_before_its_tasks_start(life: Life) -> None:
    """A gang placed away from its checkpoint is prepared only after the copy; then its region has the checkpoint."""
    await in_migration(life)
    assert [a.requests(Activity.PREPARE_NODE) for a in life.agents] == [[], []]
    assert life.facts.staged_here == []
    life.facts.held.clear()
    await life.runs()
    assert life.facts.copies == [CheckpointCopy(life.id, 1, AWAY, HOME)]
    assert life.facts.staged_here == [1]
    await ends_well(life)


@goes(*RUNNING, "succeeded completed")
async def test_a_checkpoint_in_the_same_region_is_not_copied(life: Life) -> None:
    """A gang placed in the region of its checkpoint starts without a copy."""
    life.plan.checkpoint_region = HOME
    await life.award()
    await life.runs()
    await ends_well(life)
    assert life.facts.copies == []


@goes(*MIGRATING, "provisioning starting_tasks", "running running", "succeeded completed")
async def test_a_checkpoint_in_the_store_of_another_cluster_is_copied(life: Life) -> None:
    """Also within a region, a checkpoint follows the gang to the store of the attempt's cluster."""
    life.plan.checkpoint_region, life.plan.checkpoint_store, life.plan.store_url = HOME, "file:///a", "file:///b"
    await life.award()
    await life.runs()
    assert life.facts.copies == [CheckpointCopy(life.id, 1, HOME, HOME, "file:///a", "file:///b")]
    await ends_well(life)


@goes(*RUNNING, "succeeded completed")
async def test_a_checkpoint_in_the_same_store_is_not_copied(life: Life) -> None:
    """Clusters of two regions may share a store."""
    life.plan.checkpoint_region, life.plan.checkpoint_store, life.plan.store_url = AWAY, "file:///a", "file:///a"
    await life.award()
    await life.runs()
    await ends_well(life)
    assert life.facts.copies == []


@goes(*MIGRATING, "preempted evicted")
async def test_evicted_during_a_move_its_checkpoint_stays_where_it_was(life: Life) -> None:
    """An eviction during the copy ends the attempt, and the checkpoint's region stays the old one."""
    await in_migration(life)
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    assert life.facts.staged_here == []
    assert life.stopped() == [[], []]


@goes(*MIGRATING, "pending machine_lost")
async def test_a_machine_lost_during_a_move_ends_the_attempt(life: Life) -> None:
    """If a machine is lost during the copy, the attempt ends and the machine is blamed."""
    await in_migration(life)
    await life.mail(MessageKind.MACHINE_LOST, machine=life.agents[0].machine)
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine == life.agents[0].machine


@goes(*MIGRATING, "cancelled cancelled_by_user")
async def test_cancelled_during_a_move_it_ends(life: Life) -> None:
    """A cancellation during the copy ends the workload without waiting for the copy."""
    await in_migration(life)
    await life.mail(MessageKind.CANCEL, 0)
    assert await life.result() == "cancelled"


@goes(*PROVISIONED, "preempted evicted")
async def test_evicted_during_preparation_no_task_is_ever_started(life: Life) -> None:
    """An eviction does not wait for preparation: every machine gets a stop request, and none gets a run request."""
    await in_preparation(life)
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]
    assert [a.requests(Activity.RUN_NODE) for a in life.agents] == [[], []]


@goes(*PROVISIONED, "cancelled cancelled_by_user")
async def test_cancelled_during_preparation_it_ends(life: Life) -> None:
    """A cancellation does not wait for preparation."""
    await in_preparation(life)
    await life.mail(MessageKind.CANCEL, 0)
    assert await life.result() == "cancelled"
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]


@goes(*PROVISIONED, "pending machine_lost")
async def test_a_machine_lost_during_preparation_is_not_asked_to_stop(life: Life) -> None:
    """A machine that is lost during preparation is blamed, and only the others get a stop request."""
    await in_preparation(life)
    await life.mail(MessageKind.MACHINE_LOST, machine=life.agents[1].machine)
    await life.reaches(Phase.PENDING)
    assert life.stopped() == [[(1, 5.0)], []]
    assert life.facts.releases[0].blames_machine == life.agents[1].machine
