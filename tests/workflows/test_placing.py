"""From the queue to running tasks: awards, victims, staging, moves between regions, preparation, and early ends."""

import asyncio

from temporalio.exceptions import ApplicationError

from domain.blame import LaunchError
from domain.phases import Phase
from domain.protocol.activities import Activity
from domain.protocol.machines import NodePrepared
from domain.protocol.mail import MailKind
from domain.protocol.workloads import CheckpointCopy
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


# ------------------------------------------------------------------------------------------------------------- queue


@goes("pending", "cancelled cancelled_by_user")
async def test_a_queued_workload_is_cancelled_at_once(life: Life) -> None:
    """A cancellation ends a queued workload immediately, with the detail of the mail."""
    await life.mail(MailKind.CANCEL, 0, by="ada")
    assert await life.result() == "cancelled"
    assert life.reason() == {"by": "ada"}
    assert life.facts.releases == []


@goes("pending", "placing awarded", "cancelled cancelled_by_user")
async def test_a_cancellation_that_comes_after_an_award_cancels_the_attempt(life: Life) -> None:
    """A cancellation that loses the race with an award waits for the award's mail and then ends the attempt."""
    life.facts.award(ready=True)
    await life.mail(MailKind.CANCEL, 0, by="ada")
    await life.told_of_award()
    assert await life.result() == "cancelled"
    assert [(r.attempt, r.next_phase) for r in life.facts.releases] == [(1, "cancelled")]


@goes("pending", "placing waiting_for_victims", "cancelled cancelled_by_user")
async def test_a_cancellation_about_the_last_attempt_cancels_the_next_too(life: Life) -> None:
    """A cancellation that names the attempt before a concurrent award still cancels the workload."""
    life.facts.award(ready=False)
    await life.mail(MailKind.CANCEL, 0)
    await life.told_of_award(ready=False)
    assert await life.result() == "cancelled"


@goes("pending", "placing waiting_for_victims", "preempted evicted", "cancelled cancelled_by_user")
async def test_a_preempted_workload_is_cancelled_in_the_queue(life: Life) -> None:
    """A workload that is queued again after an eviction can be cancelled."""
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
    """An attempt that waits for its victims is staged only when it holds all its slots."""
    await life.award(ready=False)
    await life.pending(Activity.PREPARE_NODE, 0)
    assert life.facts.staged == []
    await life.mail(MailKind.SLOTS_READY)
    await life.runs()
    assert [s.attempt for s in life.facts.staged] == [1]
    await ends_well(life)


@goes(
    "pending", "placing waiting_for_victims", "preempted evicted", "placing awarded", "provisioning starting_tasks",
    "running running", "succeeded completed",
)  # fmt: skip
async def test_evicted_while_it_waits_for_victims_it_runs_at_its_next_award(life: Life) -> None:
    """An eviction before any task has started releases the slots without asking agents, and the next attempt runs."""
    await life.award(ready=False)
    await life.mail(MailKind.EVICT, evictor="wl-9", evictor_rank=1, rank=7)
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
    await life.mail(MailKind.MACHINE_LOST, machine=life.agents[1].machine)
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine == life.agents[1].machine


@goes("pending", "placing waiting_for_victims", "cancelled cancelled_by_user")
async def test_a_cancellation_while_it_waits_for_victims_gives_its_slots_up(life: Life) -> None:
    """An attempt that is cancelled while it waits for victims is released as cancelled."""
    await life.award(ready=False)
    await life.mail(MailKind.CANCEL, 0)
    assert await life.result() == "cancelled"
    assert [(r.attempt, r.next_phase) for r in life.facts.releases] == [(1, "cancelled")]


@goes("pending", "placing waiting_for_victims", "preempted machine_drained")
async def test_a_preemption_may_say_more_exactly_why(life: Life) -> None:
    """A reason code in the mail's detail, as a drain sends it, becomes the reason."""
    await life.award(ready=False)
    await life.mail(MailKind.PREEMPT, code="machine_drained", machine=life.agents[0].machine)
    await life.reaches(Phase.PREEMPTED)
    assert life.reason()["machine"] == life.agents[0].machine


@goes("pending", "placing awarded", "cancelled cancelled_by_user")
async def test_a_launch_that_cannot_be_written_does_not_keep_its_slots_from_a_cancellation(life: Life) -> None:
    """A cancellation takes effect while writing the launch description keeps failing."""
    life.facts.errors[Activity.STAGE] = [RuntimeError("no such bucket") for _ in range(1000)]
    await life.award()
    await life.mail(MailKind.CANCEL, 0)
    assert await life.result() == "cancelled"
    assert life.facts.staged == []


# --------------------------------------------------------------------------------------------------------- migrating


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
    await life.mail(MailKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    assert life.facts.staged_here == []
    assert life.stopped() == [[], []]


@goes(*MIGRATING, "pending machine_lost")
async def test_a_machine_lost_during_a_move_ends_the_attempt(life: Life) -> None:
    """If a machine is lost during the copy, the attempt ends and the machine is blamed."""
    await in_migration(life)
    await life.mail(MailKind.MACHINE_LOST, machine=life.agents[0].machine)
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine == life.agents[0].machine


@goes(*MIGRATING, "cancelled cancelled_by_user")
async def test_cancelled_during_a_move_it_ends(life: Life) -> None:
    """A cancellation during the copy ends the workload without waiting for the copy."""
    await in_migration(life)
    await life.mail(MailKind.CANCEL, 0)
    assert await life.result() == "cancelled"


# ------------------------------------------------------------------------------------------------------ provisioning


@goes(*PROVISIONED, "preempted evicted")
async def test_evicted_during_preparation_no_task_is_ever_started(life: Life) -> None:
    """An eviction does not wait for preparation: every machine gets a stop request, and none gets a run request."""
    await in_preparation(life)
    await life.mail(MailKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]
    assert [a.requests(Activity.RUN_NODE) for a in life.agents] == [[], []]


@goes(*PROVISIONED, "cancelled cancelled_by_user")
async def test_cancelled_during_preparation_it_ends(life: Life) -> None:
    """A cancellation does not wait for preparation."""
    await in_preparation(life)
    await life.mail(MailKind.CANCEL, 0)
    assert await life.result() == "cancelled"
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]


@goes(*PROVISIONED, "pending machine_lost")
async def test_a_machine_lost_during_preparation_is_not_asked_to_stop(life: Life) -> None:
    """A machine that is lost during preparation is blamed, and only the others get a stop request."""
    await in_preparation(life)
    await life.mail(MailKind.MACHINE_LOST, machine=life.agents[1].machine)
    await life.reaches(Phase.PENDING)
    assert life.stopped() == [[(1, 5.0)], []]
    assert life.facts.releases[0].blames_machine == life.agents[1].machine


@goes(*PROVISIONED, "pending launch_failed", "placing awarded", *RUNNING[2:], "succeeded completed")
async def test_a_machine_that_refuses_to_prepare_is_blamed_and_the_user_is_not(life: Life) -> None:
    """If an agent refuses to prepare, the attempt ends on every machine and no retry is used up."""
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
    await ends_well(life)


@goes(*PROVISIONED, "pending launch_failed", *(*PROVISIONED[1:], "pending launch_failed") * 2)
async def test_a_machine_that_answers_for_others_is_blamed(life: Life) -> None:
    """An agent gives ports only of the jobs that it leads, in a valid range; its machine is blamed for any other."""
    first, second = life.agents
    wrong = {
        "ports: of jobs ['main']: must be of []": NodePrepared(second.machine, "10.6.6.6", {"main": 6666}),
        "address: 'a b': must be an IP address": NodePrepared(second.machine, "a b", {}),
    }
    for words, answer in wrong.items():
        second.prepared = answer
        await life.award()
        await life.reaches(Phase.PENDING)
        assert words in life.reason()["error"]
        assert life.facts.releases[-1].blames_machine == second.machine
    second.prepared = None
    first.prepared = NodePrepared(first.machine, "10.0.0.1", {"main": 65_536})
    await life.award()
    await life.reaches(Phase.PENDING)
    assert "ports['main']: 65536: must be from 1 to 65535" in life.reason()["error"]


async def _says_to_have_stopped(life: Life, activity: Activity) -> None:
    """An agent answers each of three attempts that it was stopped there before; the pauses between them grow."""
    for _ in range(3):
        error = ApplicationError("it was stopped here", type=LaunchError.STOPPED_ATTEMPT, non_retryable=True)
        life.agents[1].errors[activity] = [error]
        await life.award()
        await life.reaches(Phase.PREEMPTED)
    assert await _pauses_s(life) == [1.0, 2.0]


@goes(*PROVISIONED, "preempted stack_stopped", *(*PROVISIONED[1:], "preempted stack_stopped") * 2)
async def test_a_machine_that_says_to_have_stopped_each_attempt(life: Life) -> None:
    """The first time, the workload is queued again at once; then after a backoff that grows."""
    await _says_to_have_stopped(life, Activity.PREPARE_NODE)


@goes(*RUNNING, "preempted stack_stopped", *(*RUNNING[1:], "preempted stack_stopped") * 2)
async def test_a_machine_that_says_to_have_stopped_each_running_attempt(life: Life) -> None:
    """The same holds for an agent that says it when tasks are to be run."""
    await _says_to_have_stopped(life, Activity.RUN_NODE)


@goes(*PROVISIONED, "preempted stack_stopped", *(*PROVISIONED[1:], "pending launch_failed") * 2)
async def test_an_attempt_that_was_stopped_before_is_no_refusal(life: Life) -> None:
    """The first launch that fails after it is tried again at once; the second one after a backoff."""
    life.plan.retries = 0
    for kind in (LaunchError.STOPPED_ATTEMPT, "DiskFull", "DiskFull"):
        life.agents[1].errors[Activity.PREPARE_NODE] = [ApplicationError("no", type=kind, non_retryable=True)]
        await life.award()
        await life.reaches(Phase.PREEMPTED if kind == LaunchError.STOPPED_ATTEMPT else Phase.PENDING)
    assert await _pauses_s(life) == [1.0]


async def _pauses_s(life: Life) -> list[float]:
    timers = [event.timer_started_event_attributes for event in await life.handled()]
    return [one.start_to_fire_timeout.ToTimedelta().total_seconds() for one in timers if one.timer_id]


@goes(*PROVISIONED, "failed cannot_start")
async def test_what_is_wrong_with_a_workload_fails_it_and_blames_no_machine(life: Life) -> None:
    """An archive that cannot be unpacked fails the workload with the error's text, however many retries it has."""
    life.plan.retries = 3
    life.agents[0].errors[Activity.PREPARE_NODE] = [ApplicationError("port", type="NoFreePort", non_retryable=True)]
    error = ApplicationError("'d': a folder of this path exists", type="BadArchive", non_retryable=True)
    life.agents[1].errors[Activity.PREPARE_NODE] = [error]
    await life.award()
    assert await life.result() == "failed"
    assert life.facts.releases[0].blames_machine is None
    assert "a folder of this path exists" in life.reason()["error"]


UNCONFIRMED = ("pending unconfirmed_failure", "placing awarded")


@goes(*PROVISIONED, *UNCONFIRMED, "provisioning starting_tasks", "failed cannot_start")
async def test_what_one_lent_machine_says_about_a_launch_is_confirmed_elsewhere(life: Life) -> None:
    """A launch error of one lent machine blames nobody; the same error of another one fails the workload."""
    error = ApplicationError("bad archive", type="BadArchive", non_retryable=True)
    for node in life.plan.nodes:
        node.lent = True
    liar, other = life.agents
    liar.errors[Activity.PREPARE_NODE] = [error]
    await life.award()
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine is None
    assert (life.reason()["avoided"], life.reason()["cause"]) == ([liar.machine], "cannot_start")
    assert life.reason()["words"].startswith(f"tasks could not be started on {liar.machine}: ")
    other.errors[Activity.PREPARE_NODE] = [error]
    await life.award()
    assert await life.result() == "failed"
    assert life.facts.releases[1].blames_machine is None


@goes(*PROVISIONED, "failed cannot_start")
async def test_what_two_lent_machines_say_about_a_launch_is_confirmed(life: Life) -> None:
    """If two lent machines of a gang report that the workload cannot be started, it fails at once."""
    await _all_refuse(life, lent=2)


@goes(*PROVISIONED, "failed cannot_start")
async def test_what_another_machine_says_about_a_launch_is_confirmed(life: Life) -> None:
    """A machine that is not lent confirms what a lent one before it in the plan reports."""
    await _all_refuse(life, lent=1)


async def _all_refuse(life: Life, lent: int) -> None:
    """Lets all agents refuse the launch because of the workload; the first `lent` machines are lent."""
    for node, agent in zip(life.plan.nodes, life.agents, strict=True):
        node.lent = agent in life.agents[:lent]
        agent.errors[Activity.PREPARE_NODE] = [ApplicationError("bad archive", type="BadArchive", non_retryable=True)]
    await life.award()
    assert await life.result() == "failed"
    assert life.facts.releases[0].blames_machine is None


@goes(
    *RUNNING, *UNCONFIRMED, "provisioning starting_tasks", "running running",
    *UNCONFIRMED, "provisioning starting_tasks", "running running", "failed retries_exhausted",
)  # fmt: skip
async def test_failures_on_the_same_lent_machine_end_a_workload_after_three_attempts(life: Life) -> None:
    """Failed tasks use up no retry while one lent machine may be the cause, for at most three attempts."""
    life.plan.retries = 0
    life.plan.nodes[1].lent = True
    for attempt in (1, 2, 3):
        await life.award()
        await life.runs()
        life.agents[0].ends()
        life.agents[1].ends(7)
        await life.reaches(Phase.FAILED if attempt == 3 else Phase.PENDING)
        assert [r.blames_machine for r in life.facts.releases] == [None] * attempt
        if attempt < 3:
            assert (life.reason()["avoided"], life.reason()["attempts"]) == ([life.agents[1].machine], attempt)
    assert await life.result() == "failed"


@goes(*PROVISIONED, "pending launch_failed", "placing awarded", *PROVISIONED[2:], "pending launch_failed")
async def test_a_full_disk_blames_nobody(life: Life) -> None:
    """If a machine's disk is full, neither machine nor workload is blamed, and the workload is placed again."""
    life.plan.retries = 0
    error = ApplicationError("No space left on device", type="DiskFull", non_retryable=True)
    for attempt in (1, 2):
        life.agents[1].errors[Activity.PREPARE_NODE] = [error]
        await life.award()
        await life.reaches(Phase.PENDING)
        assert [r.blames_machine for r in life.facts.releases] == [None] * attempt


@goes(*PROVISIONED, "pending machine_lost")
async def test_a_machine_without_an_agent_is_lost(life: Life) -> None:
    """A machine whose agent takes no request within `node_lost_after_s` is lost and blamed."""
    life.plan.node_lost_after_s = 0.5
    await life.agents[1].goes()
    await life.award()
    await life.reaches(Phase.PENDING)
    assert life.reason() == {"machine": life.agents[1].machine}
    assert life.facts.releases[0].blames_machine == life.agents[1].machine
    assert life.stopped() == [[(1, 5.0)], []]


@goes(*RUNNING, "succeeded completed")
async def test_a_preparation_that_fails_once_is_tried_again(life: Life) -> None:
    """A retryable error does not end the attempt; afterwards the tasks get the address of their master."""
    life.agents[0].errors[Activity.PREPARE_NODE] = [RuntimeError("connection reset")]
    await life.award()
    await life.runs()
    assert len(life.agents[0].requests(Activity.PREPARE_NODE)) == 2
    assert [a.requests(Activity.RUN_NODE)[0].masters for a in life.agents] == [{"main": "10.0.0.1:21000"}] * 2
    await ends_well(life)


@goes(*PROVISIONED, "pending launch_timed_out", *RUNNING[1:], "succeeded completed")
async def test_a_lent_machine_that_accepts_and_prepares_nothing_counts_as_lost(real_life: Life) -> None:
    """It has the limit of the plan once, whatever heartbeats it sends. It is blamed, avoided, and not waited for."""
    life = real_life
    late = life.agents[1]
    life.plan.nodes[1].lent, life.plan.launch_limit_s = True, 1.0
    late.held |= {Activity.PREPARE_NODE, Activity.STOP_NODE}
    await life.award()
    await life.reaches(Phase.PENDING)
    assert life.reason() == {"machine": late.machine, "limit_s": 1.0, "avoided": [late.machine]}
    (released,) = life.facts.releases
    assert (released.blames_machine, released.silent_machines) == (late.machine, [late.machine])
    assert len(late.requests(Activity.PREPARE_NODE)) == 1 and late.requests(Activity.STOP_NODE) == []
    assert [one.attempt for one in life.agents[0].requests(Activity.STOP_NODE)] == [1]
    late.held.clear()
    await life.award()
    await life.runs()
    await ends_well(life)


@goes(
    "pending", "placing awarded", "provisioning starting_tasks", "running running", "pending launch_failed",
    *RUNNING[1:], "pending launch_failed", *RUNNING[1:], "succeeded completed",
)  # fmt: skip
async def test_launches_that_a_machine_refuses_use_up_no_runtime(lone: Life) -> None:
    """A machine that takes long to refuse its only request leaves the workload its maximum runtime."""
    lone.plan.max_runtime_s = 5.0
    (agent,) = lone.agents
    for _ in range(2):
        agent.held.add(Activity.RUN_NODE)
        await lone.award()
        await lone.reaches(Phase.RUNNING)
        await asyncio.sleep(3.0)
        agent.refusals[Activity.RUN_NODE] = "the disk fails"
        await lone.reaches(Phase.PENDING)
        agent.refusals.clear()
    agent.held.clear()
    await lone.award()
    await lone.runs()
    agent.ends()
    assert await lone.result() == "succeeded"
