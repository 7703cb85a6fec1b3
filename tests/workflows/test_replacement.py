"""Workflows that replace one that is gone, or that was rolled back, while tasks of its attempt may run."""

from temporalio.exceptions import ApplicationError

from domain.phases import Phase
from domain.protocol.activities import Activity
from domain.protocol.leases import ElementResult
from domain.protocol.workload_messages import MessageKind, WorkloadMessage
from domain.protocol.workloads import WorkloadInput
from tests.workflows.lab import Life
from tests.workflows.running import AGAIN, RUNNING, ends_well, running
from tests.workflows.stories import goes

LEFTOVER = "preempted stack_stopped"


async def replaced(life: Life, *, ready: bool = True, stopping: bool = False, mail: MessageKind | None = None) -> None:
    """Starts a new workflow with the state in Postgres; the message `mail` arrives with the start."""
    state = WorkloadInput(life.id, attempt=1, placed=True, ready=ready, stopping=stopping)
    await life.workflow_starts(state, None if mail is None else WorkloadMessage(1001, mail.value, 1))


@goes(*RUNNING, "succeeded completed")
async def test_a_workflow_that_replaces_one_that_is_gone_goes_on_with_what_runs(life: Life) -> None:
    """A replacement workflow of a running workload continues with the running tasks and stops none."""
    await running(life)
    await life.handle.terminate()
    await replaced(life)
    for agent in life.agents:
        await life.asks(agent, Activity.RUN_NODE, 2)
    await ends_well(life)
    assert life.stopped() == [[], []]
    assert [(r.attempt, r.next_phase) for r in life.facts.releases] == [(1, "succeeded")]


@goes(*RUNNING, "succeeded completed")
async def test_tasks_that_ended_while_the_workflow_was_gone_do_not_run_again(life: Life) -> None:
    """If all tasks ended with 0 while no workflow ran, the workload has succeeded."""
    await gone_in_the_end(life)
    await replaced(life)
    assert await life.result() == "succeeded"


@goes(*RUNNING, "failed retries_exhausted")
async def test_a_failure_while_the_workflow_was_gone_counts(life: Life) -> None:
    """A task's failure while no workflow ran counts like any other failure."""
    life.plan.retries = 0
    await gone_in_the_end(life, 3)
    await replaced(life)
    assert await life.result() == "failed"


async def ends_unseen(life: Life, exit_code: int) -> None:
    """Ends the tasks after the agents have dropped the workflow's activities."""
    for agent in life.agents:
        await agent.loses_touch()
        agent.ends(exit_code)


@goes(*RUNNING, LEFTOVER, *AGAIN, "succeeded completed")
async def test_an_attempt_that_was_told_to_stop_is_wound_up(life: Life) -> None:
    """If Postgres says that the attempt was being stopped, the replacement stops it, and the workload runs again."""
    await wound_up(life, stopping=True)


@goes(*RUNNING, LEFTOVER, *AGAIN, "succeeded completed")
async def test_an_attempt_that_agents_refuse_as_stopped_is_wound_up(life: Life) -> None:
    """If agents refuse the attempt as stopped, the replacement stops and requeues it; no machine is blamed."""
    await wound_up(life, stopping=False)


@goes(*RUNNING, LEFTOVER)
async def test_a_released_attempt_is_stopped_without_staging_it(life: Life) -> None:
    """A replacement of a released attempt cannot stage it, and stops its remaining tasks."""
    await running(life)
    await life.handle.terminate()
    life.facts.is_released = True
    await replaced(life)
    await life.reaches(Phase.PREEMPTED)
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]


async def wound_up(life: Life, *, stopping: bool) -> None:
    """Runs a gang whose stop was lost with its workflow; the replacement must stop it and run it again."""
    await running(life)
    for agent in life.agents:
        agent.reports(step=7, checkpoint_step=5)
    await life.handle.terminate()
    for agent in life.agents:
        agent.was_told_to_stop()
    await replaced(life, stopping=stopping)
    await life.reaches(Phase.PREEMPTED)
    assert [p.checkpoint_step for p in life.facts.releases[0].progress] == [5, 5]
    assert life.facts.releases[0].blames_machine is None
    await running(life)
    await ends_well(life)


@goes(*RUNNING, "succeeded completed")
async def test_an_attempt_that_ended_before_its_stop_has_succeeded(life: Life) -> None:
    """If all tasks ended with 0 before a lost stop, the workload has succeeded."""
    await gone_in_the_end(life)
    for agent in life.agents:
        agent.was_told_to_stop()
    await replaced(life, stopping=True)
    assert await life.result() == "succeeded"


@goes(*RUNNING, "preempted evicted")
async def test_a_replacement_that_is_evicted_at_once_stops_what_runs(life: Life) -> None:
    """A replacement that is evicted before its first request stops the tasks of the workflow before it."""
    await running(life)
    await life.handle.terminate()
    await replaced(life, mail=MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]
    assert [r.silent_machines for r in life.facts.releases] == [[]]


@goes(*RUNNING, "cancelled cancelled_by_user")
async def test_a_replacement_that_is_cancelled_at_once_stops_what_runs(life: Life) -> None:
    """A replacement that is cancelled before its first request stops the tasks of the workflow before it."""
    await running(life)
    await life.handle.terminate()
    await replaced(life, mail=MessageKind.CANCEL)
    assert await life.result() == "cancelled"
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]


@goes(*RUNNING, "succeeded completed")
async def test_a_replacement_that_is_evicted_while_it_prepares_finds_that_it_has_succeeded(life: Life) -> None:
    """If all tasks ended with 0 before an eviction during preparation, the workload has succeeded."""
    await gone_in_the_end(life)
    for agent in life.agents:
        agent.held.add(Activity.PREPARE_NODE)
    await replaced(life)
    for agent in life.agents:
        await life.asks(agent, Activity.PREPARE_NODE, 2)
    await life.mail(MessageKind.EVICT)
    assert await life.result() == "succeeded"


@goes(*RUNNING, "preempted evicted")
async def test_a_replacement_that_is_evicted_while_it_prepares_lets_tasks_save(life: Life) -> None:
    """If a replacement is evicted during preparation, running tasks get their grace to save."""
    await running(life)
    for agent in life.agents:
        agent.reports(step=7, checkpoint_step=5)
    await life.handle.terminate()
    for agent in life.agents:  # All of them: the test server never goes on when one is completed as it is cancelled.
        agent.held.add(Activity.PREPARE_NODE)
    await replaced(life)
    for agent in life.agents:
        await life.asks(agent, Activity.PREPARE_NODE, 2)
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]
    assert [p.checkpoint_step for p in life.facts.releases[0].progress] == [5, 5]


@goes(*RUNNING, "succeeded completed")
async def test_a_replacement_that_is_refused_finds_that_it_has_succeeded(life: Life) -> None:
    """If a machine refuses to prepare tasks that have already ended with 0, the workload has succeeded."""
    await gone_in_the_end(life)
    life.agents[1].errors[Activity.PREPARE_NODE] = [ApplicationError("?", type="ChangedLaunch", non_retryable=True)]
    await replaced(life)
    assert await life.result() == "succeeded"


@goes(*RUNNING, "failed retries_exhausted")
async def test_a_replacement_that_is_refused_finds_that_it_has_failed(life: Life) -> None:
    """If a machine refuses to prepare tasks of which one has failed, the failure counts."""
    life.plan.retries = 0
    await gone_in_the_end(life, 3)
    life.agents[1].errors[Activity.PREPARE_NODE] = [ApplicationError("?", type="ChangedLaunch", non_retryable=True)]
    await replaced(life)
    assert await life.result() == "failed"


async def gone_in_the_end(life: Life, exit_code: int = 0) -> None:
    """Ends all tasks while no workflow runs."""
    await running(life)
    await life.handle.terminate()
    await ends_unseen(life, exit_code)


@goes(*RUNNING, "preempted evicted")
async def test_a_workflow_rolled_back_to_before_its_award_stops_what_it_has_started(life: Life) -> None:
    """If a rollback loses award and start, redelivery restores the attempt, and an eviction stops its tasks."""
    await running(life)
    await rolled_back(life, MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]


@goes(*RUNNING, "succeeded completed")
async def test_a_workflow_rolled_back_to_before_its_award_finds_that_it_has_succeeded(life: Life) -> None:
    """If a rolled-back workflow is cancelled after all tasks ended with 0, the workload has succeeded."""
    await running(life)
    for agent in life.agents:
        await agent.loses_touch()
        agent.ends(0)
    await rolled_back(life, MessageKind.CANCEL)
    assert await life.result() == "succeeded"


async def rolled_back(life: Life, kind: MessageKind) -> None:
    """Replaces the workflow with one from before the award; it receives the award's message and another one."""
    await life.handle.terminate()
    await life.workflow_starts(
        WorkloadInput(
            life.id,
            mails=[
                WorkloadMessage(1001, MessageKind.AWARDED.value, 1, {"ready": True}),
                WorkloadMessage(1002, kind.value, 1),
            ],
        )
    )


@goes("pending", "placing awarded", "provisioning starting_tasks", "succeeded completed")
async def test_a_replacement_finds_what_was_started_before_that_was_written(life: Life) -> None:
    """If Temporal is lost before it recorded started tasks, an evicted replacement finds that they succeeded."""
    await started_unnoted(life, Phase.PROVISIONING)


@goes("pending", "placing awarded", "succeeded completed")
async def test_a_replacement_finds_what_a_single_machine_has_started(lone: Life) -> None:
    """The same holds for one machine, which starts before anything is recorded after the award."""
    await started_unnoted(lone)


@goes("pending", "placing awarded", "migrating copying_checkpoint", "succeeded completed")
async def test_a_replacement_finds_what_a_single_machine_has_started_after_a_move(lone: Life) -> None:
    """The same holds after the checkpoint was copied."""
    await started_unnoted(lone, Phase.MIGRATING)


async def started_unnoted(life: Life, *phases: Phase) -> None:
    """Starts and ends the tasks while the row is only at `phases`; the replacement workflow then gets an eviction."""
    await life.handle.terminate()
    life.facts.award(ready=True)
    codes = {Phase.PROVISIONING: "starting_tasks", Phase.MIGRATING: "copying_checkpoint"}
    for phase in phases:
        life.facts.change(phase, codes[phase], {})
    for agent in life.agents:
        agent.has_started(1)
        agent.ends()
    await replaced(life, mail=MessageKind.EVICT)
    assert await life.result() == "succeeded"


@goes("pending", "placing awarded", "preempted evicted")
async def test_a_replacement_finds_which_elements_have_ended(lone: Life) -> None:
    """If Temporal is lost, an evicted replacement of a runner's workflow releases it with what its machine knows."""
    lone.plan.runs_elements = True
    await lone.handle.terminate()
    lone.facts.award(ready=True)
    (agent,) = lone.agents
    agent.has_started(1)
    agent.elements = [ElementResult(4, 1, exit_code=0, began_s=1.0, ended_s=2.0)]
    await replaced(lone, mail=MessageKind.EVICT)
    await lone.reaches(Phase.PREEMPTED)
    assert [release.elements for release in lone.facts.releases] == [agent.elements]


@goes("pending", "placing waiting_for_victims", "cancelled cancelled_by_user")
async def test_a_replacement_waits_for_what_the_attempt_waited_for(life: Life) -> None:
    """A replacement of a placed attempt waits for its slots, and handles messages meanwhile."""
    await life.award(ready=False)
    await life.handled()
    await life.handle.terminate()
    await replaced(life, ready=False)
    await life.mail(MessageKind.AWARDED, 1, ready=False, region="east")
    await life.mail(MessageKind.CANCEL, 0)
    assert await life.result() == "cancelled"
    assert life.stopped() == [[], []]
    assert [(r.attempt, r.next_phase) for r in life.facts.releases] == [(1, "cancelled")]
