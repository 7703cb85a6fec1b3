"""Lost machines under a running gang, returning agents, and unexpected errors of activities."""

import asyncio

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError

from domain.phases import Phase
from domain.protocol.activities import Activity
from domain.protocol.workload_messages import MessageKind
from domain.protocol.workloads import WorkloadInput
from tests.workflows.lab import Lab, Life
from tests.workflows.running import AGAIN, RUNNING, ends_well, running
from tests.workflows.stories import goes


async def shown(life: Life) -> dict[str, object]:
    """Returns the workflow's search attributes whose names begin with `Mizzen`."""
    found = (await life.handle.describe()).typed_search_attributes
    return {p.key.name: p.value for p in found if p.key.name.startswith("Mizzen")}


# ------------------------------------------------------------------------------------------------------ lost machines


@goes(*RUNNING, "checkpointing machine_lost", "pending machine_lost", *AGAIN, "succeeded completed")
async def test_a_gang_whose_machine_is_said_to_be_lost_is_stopped_on_the_others(life: Life) -> None:
    """A message about a lost machine stops the gang on other machines, blames the lost one, and uses no retry."""
    life.plan.retries = 0
    await running(life)
    await life.mail(MessageKind.MACHINE_LOST, machine=life.agents[1].machine)
    await life.reaches(Phase.PENDING)
    assert life.reason() == {"machine": life.agents[1].machine}
    assert life.facts.releases[0].blames_machine == life.agents[1].machine
    assert life.facts.releases[0].silent_machines == [life.agents[1].machine]
    assert life.stopped() == [[(1, 5.0)], []]
    await running(life)
    await ends_well(life)


@goes(*RUNNING, "pending machine_lost", *AGAIN, "succeeded completed")
async def test_a_failure_caused_by_a_lost_machine_does_not_count(life: Life) -> None:
    """If a task fails because another task's machine is lost, the loss is the reason and no retry is used up."""
    life.plan.retries = 0
    life.plan.node_lost_after_s = 0.5
    await running(life)
    await life.agents[1].goes()
    life.agents[0].ends(1)
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine == life.agents[1].machine
    await life.agents[1].comes()
    await running(life)
    await ends_well(life)


@goes(*RUNNING, "pending machine_lost")
async def test_a_task_whose_end_nobody_saw_was_lost_with_its_machine(life: Life) -> None:
    """If a task's exit status is unknown, as after a reboot, the machine is blamed and no retry is used up."""
    life.plan.retries = 0
    await running(life)
    life.agents[0].ends(1)
    life.agents[1].ends(None)
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine == life.agents[1].machine
    assert life.facts.releases[0].silent_machines == []


async def test_work_that_ended_before_its_stop_counts_also_if_the_refusal_of_its_run_comes_last(dev_lab: Lab) -> None:
    """A restarted agent tells with the stop that the task had exited with 0, and then refuses to run it again.

    Both answers arrive while no worker of workflows runs, so that one workflow task processes them.
    """
    lab = Lab(dev_lab.client, "another-control-queue")
    life = lab.life(1)
    life.plan.heartbeat_timeout_s = 1.0
    [agent] = life.agents
    try:
        async with lab.control():
            await life.begins()
            await running(life)
            agent.held |= {Activity.STOP_NODE, Activity.RUN_NODE}
            await agent.loses_touch()
            agent.ends()
            await life.asks(agent, Activity.RUN_NODE, 2)
            await life.mail(MessageKind.EVICT)
            await life.asks(agent, Activity.STOP_NODE)
        for kind, event in (
            (Activity.STOP_NODE, EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED),
            (Activity.RUN_NODE, EventType.EVENT_TYPE_ACTIVITY_TASK_FAILED),
        ):
            seen = len((await life.handle.fetch_history()).events)
            agent.held.remove(kind)
            while event not in {one.event_type for one in (await life.handle.fetch_history()).events[seen:]}:
                await asyncio.sleep(0.05)
        async with lab.control():
            assert await life.result() == "succeeded"
    finally:
        await life.close()


@goes(*RUNNING, "pending machine_lost", *AGAIN, "succeeded completed")
async def test_a_machine_whose_agent_stays_silent_is_lost(real_life: Life) -> None:
    """If heartbeats stop and the agent does not return in time, the gang is stopped elsewhere and placed again."""
    life = real_life
    life.plan.retries = 0
    life.plan.heartbeat_timeout_s = life.plan.node_lost_after_s = 1.0
    await running(life)
    await life.agents[1].goes()
    await life.reaches(Phase.PENDING)
    assert life.reason() == {"machine": life.agents[1].machine}
    assert life.facts.releases[0].blames_machine == life.agents[1].machine
    assert life.facts.releases[0].silent_machines == [life.agents[1].machine]
    assert life.stopped() == [[(1, 5.0)], []]
    await life.agents[1].comes()
    await running(life)
    await ends_well(life)
    assert life.facts.releases[1].silent_machines == []


@goes(*RUNNING, "succeeded completed")
async def test_an_agent_that_comes_back_takes_hold_of_its_tasks_again(real_life: Life) -> None:
    """If heartbeats stop but the agent returns in time, the same attempt continues."""
    life = real_life
    life.plan.heartbeat_timeout_s = 1.0
    await running(life)
    await life.agents[1].loses_touch()
    await life.asks(life.agents[1], Activity.RUN_NODE, 2)
    assert [r.attempt for r in life.agents[1].requests(Activity.RUN_NODE)] == [1, 1]
    await ends_well(life)
    assert life.stopped() == [[], []]


@goes(*RUNNING, "checkpointing evicted", "pending machine_lost")
async def test_a_machine_that_is_lost_while_it_stops_is_blamed(life: Life) -> None:
    """If a machine is found lost during an eviction, the attempt ends with the machine's loss."""
    life.plan.node_lost_after_s = 0.5
    await running(life)
    await life.agents[1].goes()
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine == life.agents[1].machine


@goes(*RUNNING, "checkpointing evicted", "pending machine_lost", *AGAIN, "succeeded completed")
async def test_a_machine_that_refuses_to_stop_is_treated_like_a_silent_one(real_life: Life) -> None:
    """An agent that answers a stop with a failure does not end the workload's workflow; its machine is blamed."""
    # The test server can lose a cancelled activity that completes at the same time, and with it the workflow.
    life = real_life
    await running(life)
    life.agents[1].errors[Activity.STOP_NODE] = [ApplicationError("no", type="MachineFault", non_retryable=True)]
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PENDING)
    assert life.facts.releases[0].blames_machine == life.agents[1].machine
    assert life.facts.releases[0].silent_machines == [life.agents[1].machine]
    life.agents[1].was_told_to_stop()
    await running(life)
    await ends_well(life)


@goes(*RUNNING, "failed retries_exhausted")
async def test_a_failure_of_a_task_that_cannot_be_is_handled(life: Life) -> None:
    """An agent that reports the end of a task with another form of name does not block the workload's workflow."""
    life.plan.retries = 0
    await running(life)
    life.agents[1].ends(3, job="a/b/../c")
    assert await life.result() == "failed"


@goes(*RUNNING, "checkpointing evicted", "preempted evicted")
async def test_a_machine_is_not_asked_to_stop_for_ever(life: Life) -> None:
    """All tries of a stop together have a limit: twice the time to accept it, to save, and two minutes."""
    await running(life)
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    asked = [event.activity_task_scheduled_event_attributes for event in await life.handled()]
    limits_s = {
        one.schedule_to_close_timeout.ToTimedelta().total_seconds()
        for one in asked
        if one.activity_type.name == Activity.STOP_NODE.value
    }
    assert limits_s == {2 * (10.0 + 5.0 + 120.0)}


@goes(*RUNNING, "succeeded completed")
async def test_operators_find_a_workload_by_what_it_goes_through(real_life: Life) -> None:
    """Phase, reason, region, rank and attempt are search attributes."""
    life = real_life
    placed = {"MizzenRegion": "east", "MizzenPriority": 3, "MizzenAttempt": 1}
    await running(life)
    assert await shown(life) == placed | {"MizzenPhase": "running", "MizzenReason": "running"}
    await ends_well(life)
    assert await shown(life) == placed | {"MizzenPhase": "succeeded", "MizzenReason": "completed"}


# ---------------------------------------------------------------------------------------------------- unknown failures


@goes(*RUNNING, "pending launch_failed", *AGAIN, "succeeded completed")
async def test_a_machine_that_refuses_to_run_tasks_is_blamed_and_the_user_is_not(life: Life) -> None:
    """If an agent refuses to run tasks, the attempt ends as a failed launch, and no retry is used up."""
    life.plan.retries = 0
    life.agents[1].held.add(Activity.RUN_NODE)
    await running(life)
    life.agents[1].refusals[Activity.RUN_NODE] = "no such launch"
    await life.reaches(Phase.PENDING)
    assert "no such launch" in life.reason()["error"]
    assert life.facts.releases[0].blames_machine == life.agents[1].machine
    life.agents[1].held.clear()
    life.agents[1].refusals.clear()
    await running(life)
    await ends_well(life)


@goes(*RUNNING, "failed retries_exhausted")
async def test_a_tasks_failure_is_shown_although_a_peer_was_refused_too(life: Life) -> None:
    """If one task failed and another machine refused its task, the failed task is the reason."""
    life.plan.retries = 0
    life.agents[0].held.add(Activity.STOP_NODE)
    life.agents[1].held.add(Activity.RUN_NODE)
    await running(life)
    life.agents[0].ends(3)
    await life.asks(life.agents[0], Activity.STOP_NODE)
    life.agents[1].refusals[Activity.RUN_NODE] = "attempt 1 was stopped here"
    await life.pending(Activity.RUN_NODE, 0)
    life.agents[0].held.clear()
    assert await life.result() == "failed"
    assert life.reason()["status"] == "exit code 3"


@goes(*RUNNING, "checkpointing evicted", "preempted evicted")
async def test_errors_that_pass_end_nothing(life: Life) -> None:
    """Unexpected errors of running, stopping, staging and the database are retried until they pass."""
    for kind in (Activity.STAGE, Activity.TRANSITION, Activity.RELEASE):
        life.facts.errors[kind] = [RuntimeError("connection refused")]
    for agent in life.agents:
        agent.errors[Activity.RUN_NODE] = [RuntimeError("out of file descriptors")]
        agent.errors[Activity.STOP_NODE] = [RuntimeError("out of file descriptors")]
    await running(life)
    for agent in life.agents:
        await life.asks(agent, Activity.RUN_NODE, 2)
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    assert life.stopped() == [[(1, 5.0), (1, 5.0)], [(1, 5.0), (1, 5.0)]]


@goes(*RUNNING, "succeeded completed")
async def test_an_error_that_does_not_pass_ends_the_workflow_and_the_next_one_goes_on(life: Life) -> None:
    """A non-retryable error fails the workflow instead of blocking it; its replacement tries again."""
    life.facts.errors[Activity.STAGE] = [ApplicationError("holds nothing", non_retryable=True)]
    await life.award()
    with pytest.raises(WorkflowFailureError):
        await life.result()
    await life.workflow_starts(WorkloadInput(life.id, attempt=1, placed=True, ready=True))
    await life.runs()
    await ends_well(life)
