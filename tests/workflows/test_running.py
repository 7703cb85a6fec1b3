"""How a running gang is stopped, and what follows from its end."""

import asyncio

import pytest

from domain.phases import Phase
from domain.protocol.activities import Activity
from domain.protocol.workload_messages import MessageKind
from domain.protocol.workloads import WorkloadInput
from domain.task_reports import DiskReport, NotReadyReport
from tests.workflows.agents import until
from tests.workflows.lab import Life
from tests.workflows.running import AGAIN, EVICTED, RUNNING, ends_well, running
from tests.workflows.stories import goes
from workflows import activity_calls

WAITING = ("pending", "placing waiting_for_victims")
HUNG = ("checkpointing no_progress", "pending no_progress")


async def hangs(life: Life) -> None:
    """Runs the workload until it is found hung and stopped."""
    await running(life)
    await life.mail(MessageKind.HUNG, silent_s=61.0, limit_s=60.0)
    await until(lambda: life.facts.phase in (Phase.PENDING, Phase.FAILED), "the hung gang was stopped")


# -------------------------------------------------------------------------------------------------------------- ends


@goes(*RUNNING, "succeeded completed")
async def test_a_gang_that_ends_well_succeeds(life: Life) -> None:
    """A gang whose tasks all exit with 0 has succeeded; its last progress is recorded, and no stop request is sent."""
    await running(life)
    for agent in life.agents:
        agent.reports(step=100, checkpoint_step=90)
        agent.ends()
    assert await life.result() == "succeeded"
    assert life.reason() == {"tasks": 2}
    progress = life.facts.releases[0].progress
    assert sorted((p.task, p.step, p.checkpoint_step) for p in progress) == [(0, 100, 90), (1, 100, 90)]
    assert life.stopped() == [[], []]


@goes(*RUNNING, "succeeded completed")
async def test_a_machine_reports_only_its_own_tasks(life: Life) -> None:
    """What a machine says at the end about a task on another machine is dropped."""
    for task, node in enumerate(life.plan.nodes):
        node.tasks = {"main": [task]}
    await running(life)
    life.agents[0].reports(1, step=10**6)
    life.agents[1].reports(step=5)
    await ends_well(life)
    assert sorted((p.task, p.step) for p in life.facts.releases[0].progress) == [(0, 10**6), (1, 5)]


@goes(*RUNNING, "succeeded completed")
async def test_one_machine_with_nothing_to_fetch_starts_at_once(life: Life) -> None:
    """A gang on one machine without a checkpoint to fetch starts with a single request to its agent.

    The same request reserves the master port.
    """
    await life.handle.terminate()
    life.plan.starts_at_once, life.plan.tasks, life.plan.nodes = True, 1, life.plan.nodes[:1]
    life.facts.award(ready=True)
    await life.workflow_starts(WorkloadInput(life.id, attempt=1, placed=True, ready=True))
    await life.asks(life.agents[0], Activity.RUN_NODE)
    assert [r.leads_jobs for r in life.agents[0].requests(Activity.RUN_NODE)] == [["main"]]
    life.agents[0].ends()
    assert await life.result() == "succeeded"
    assert life.agents[0].requests(Activity.PREPARE_NODE) == []
    assert life.facts.staged_here == [1], "the region of the checkpoint is recorded"
    events = await life.handled()
    assert sum(e.HasField("workflow_task_completed_event_attributes") for e in events) == 2


@goes(*RUNNING, "pending task_failed", *AGAIN, "failed retries_exhausted")
async def test_a_failure_is_retried_within_its_limit_and_then_shown_with_its_last_words(life: Life) -> None:
    """A task's failures are retried up to the limit; the status of the last one is the reason.

    The reason names the log's location without quoting the log.
    """
    life.plan.retries = 1
    await running(life)
    life.agents[0].ends(3)
    await life.reaches(Phase.PENDING)
    assert life.reason() == {
        "task": "main/0",
        "status": "exit code 3",
        "log": f"logs/{life.id}/1/main/0/",
        "retries": 1,
        "failures": 1,
    }
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]
    await running(life)
    life.agents[1].ends(None, signal=11)
    assert await life.result() == "failed"
    assert life.reason() == {
        "task": "main/1",
        "status": "signal 11",
        "log": f"logs/{life.id}/2/main/1/",
        "retries": 1,
    }
    assert [r.blames_machine for r in life.facts.releases] == [None, None]


@goes(*RUNNING, "pending task_failed", *AGAIN, "failed retries_exhausted")
async def test_the_memory_of_a_failed_workload_is_freed(life: Life) -> None:
    """Where machines hold checkpoints in memory, the end of a workload ends their servers, and a retry does not."""
    life.plan.retries, life.plan.holds_memory = 1, True

    def ended() -> list[int]:
        return [sum(one.ends for one in agent.requests(Activity.STOP_NODE)) for agent in life.agents]

    await running(life)
    life.agents[0].ends(3)
    await life.reaches(Phase.PENDING)
    assert ended() == [0, 0]
    await running(life)
    life.agents[1].ends(4)
    assert await life.result() == "failed"
    assert ended() == [1, 1]


async def test_the_machines_of_a_large_gang_are_freed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All machines are asked, never so many at once that Temporal refuses further activities of the workflow."""
    asked, pending, most = list[str](), 0, 0

    async def stop_node(machine: str, *_: object, **__: object) -> None:
        nonlocal pending, most
        asked.append(machine)
        pending += 1
        most = max(most, pending)
        await asyncio.sleep(0)
        pending -= 1
        raise ValueError(machine)  # A silent agent does not keep others from being asked.

    monkeypatch.setattr(activity_calls, "stop_node", stop_node)
    machines = [f"r/c/m{k}" for k in range(3001)]
    await activity_calls.free_memory(machines, "wl", 1)
    assert asked == machines and most < 1000


@goes(*RUNNING, "succeeded completed")
async def test_agents_free_the_memory_of_a_workload_that_succeeds_by_themselves(life: Life) -> None:
    """The agents of the last attempt get no request."""
    life.plan.holds_memory = True
    await running(life)
    await ends_well(life)
    assert life.stopped() == [[], []]


@goes(*RUNNING, "failed retries_exhausted")
async def test_the_first_failure_is_shown_and_not_those_that_were_stopped_for_it(life: Life) -> None:
    """A task that exited by itself is the reason, even if a peer's end by SIGTERM was reported earlier."""
    life.plan.retries = 0
    await running(life)
    life.agents[0].ends(143)
    life.agents[1].ends(7)
    assert await life.result() == "failed"
    assert life.reason()["task"] == "main/1"


@goes(*RUNNING, "pending out_of_memory", *RUNNING[1:], "failed out_of_memory")
async def test_a_task_whose_memory_ran_out_is_told_as_such(life: Life) -> None:
    """If a task ran out of memory, the reason has limit and peak, even if a peer failed first; it uses up a retry."""
    life.plan.retries = 1
    for limit in (64 << 20, 65 << 20):
        await running(life)
        life.agents[0].ends(1)
        life.agents[1].ends(None, signal=9, memory=(limit, limit))
        await until(lambda: len(life.facts.releases) == life.facts.attempt, "the attempt is released")
        assert life.reason()["task"] == "main/1"
        assert (life.reason()["limit_bytes"], life.reason()["peak_bytes"]) == (limit, limit)
    assert await life.result() == "failed"
    assert [r.blames_machine for r in life.facts.releases] == [None, None]


@goes(*RUNNING, "failed not_ready")
async def test_a_task_that_was_never_ready_is_told_as_such(life: Life) -> None:
    """If the agent stopped a task that was not ready in time, this is the reason, even if all exit codes are good."""
    life.plan.retries = 0
    await running(life)
    life.agents[0].ends(7)
    life.agents[1].ends(0, not_ready=NotReadyReport(60.0, "status 503"))
    assert await life.result() == "failed"
    reason = life.reason()
    assert (reason["task"], reason["limit_s"], reason["error"]) == ("main/1", 60.0, "status 503")


@goes(*RUNNING, "failed out_of_disk")
async def test_a_task_that_filled_the_disk_is_told_as_such(life: Life) -> None:
    """If the agent stopped a task that had used up its share of the disk, this is the reason. No machine is blamed."""
    life.plan.retries = 0
    await running(life)
    life.agents[0].ends(7)
    life.agents[1].ends(None, signal=9, disk=DiskReport(2000, 1000, 12, 100))
    assert await life.result() == "failed"
    reason = life.reason()
    assert (reason["task"], reason["used_bytes"], reason["limit_bytes"]) == ("main/1", 2000, 1000)
    assert [r.blames_machine for r in life.facts.releases] == [None]


@goes(*RUNNING, "failed retries_exhausted")
async def test_a_gang_that_others_stopped_has_not_succeeded(life: Life) -> None:
    """Tasks that exit with 0 after a stop that mizzen did not request have not succeeded."""
    life.plan.retries = 0
    await running(life)
    for agent in life.agents:
        agent.ends(0, stopped=True)
    assert await life.result() == "failed"
    assert life.reason()["status"] == "an unknown status"


# ----------------------------------------------------------------------------------------------------------- stopping


@goes(*RUNNING, *EVICTED, *AGAIN, "succeeded completed")
async def test_an_evicted_gang_saves_within_its_grace_and_runs_again(life: Life) -> None:
    """An eviction stops every machine once with the workload's grace; the next attempt has the next number."""
    await running(life)
    for agent in life.agents:
        agent.reports(step=50, checkpoint_step=50, resumed_step=None)
    await life.mail(MessageKind.EVICT, evictor="wl-9")
    await life.reaches(Phase.PREEMPTED)
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]
    assert [p.checkpoint_step for p in life.facts.releases[0].progress] == [50, 50]
    await running(life)
    assert [[r.attempt for r in a.requests(Activity.RUN_NODE)] for a in life.agents] == [[1, 2], [1, 2]]
    await ends_well(life)


@goes(*RUNNING, "checkpointing preempted_by_operator", "preempted preempted_by_operator")
async def test_an_operator_preempts(life: Life) -> None:
    """An operator's preemption stops a gang like an eviction, with the operator in the reason."""
    await running(life)
    await life.mail(MessageKind.PREEMPT, by="ada")
    await life.reaches(Phase.PREEMPTED)
    assert life.reason() == {"by": "ada"}


@goes(*RUNNING, "checkpointing stack_stopped", "preempted stack_stopped")
async def test_a_stopping_stack_preempts(life: Life) -> None:
    """A stack that stops preempts its gangs with the reason `stack_stopped`."""
    await running(life)
    await life.mail(MessageKind.PREEMPT, code="stack_stopped")
    await life.reaches(Phase.PREEMPTED)


@goes(*RUNNING, "checkpointing cancelled_by_user", "cancelled cancelled_by_user")
async def test_a_running_workload_is_cancelled(life: Life) -> None:
    """A cancellation stops a running gang with its grace and ends the workload."""
    await running(life)
    await life.mail(MessageKind.CANCEL, 0, by="ada")
    assert await life.result() == "cancelled"
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]


@goes(*RUNNING, *EVICTED, "cancelled cancelled_by_user")
async def test_a_cancellation_while_it_saves_takes_effect_after(life: Life) -> None:
    """A gang that is being evicted finishes saving before it is cancelled."""
    await running(life)
    life.agents[0].held.add(Activity.STOP_NODE)
    await life.mail(MessageKind.EVICT)
    await life.asks(life.agents[0], Activity.STOP_NODE)
    await life.mail(MessageKind.CANCEL, 0)
    life.agents[0].held.clear()
    assert await life.result() == "cancelled"


@goes(*RUNNING, "checkpointing evicted", "succeeded completed")
async def test_a_gang_that_ended_by_itself_although_told_to_stop_has_succeeded(life: Life) -> None:
    """If all tasks exited with 0 before the stop reached them, the workload has succeeded."""
    await running(life)
    for agent in life.agents:
        agent.held.add(Activity.STOP_NODE)
    await life.mail(MessageKind.EVICT)
    for agent in life.agents:
        await life.asks(agent, Activity.STOP_NODE)
        agent.ends()
    await life.pending(Activity.RUN_NODE, 0)
    for agent in life.agents:
        agent.held.clear()
    assert await life.result() == "succeeded"


@goes(*RUNNING, *EVICTED)
async def test_a_gang_of_which_a_part_had_ended_when_it_was_stopped_has_not_succeeded(life: Life) -> None:
    """If only some tasks exited with 0 before the stop, the gang has not succeeded."""
    await running(life)
    life.agents[0].ends()
    await life.pending(Activity.RUN_NODE, 1)
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)


# -------------------------------------------------------------------------------------------------------- max runtime


@goes(*RUNNING, "checkpointing max_runtime", "failed max_runtime")
async def test_a_workload_that_ran_for_too_long_over_all_attempts_fails(unborn: Life) -> None:
    """Running time is summed over all attempts; at the limit the gang saves, stops and fails."""
    unborn.plan.max_runtime_s = 3600.0
    await unborn.begins(WorkloadInput(unborn.id, ran_s=3599.9))
    await running(unborn)
    assert await unborn.result() == "failed"
    assert unborn.reason()["limit_s"] == 3600.0
    assert unborn.reason()["ran_s"] >= 3600.0
    assert unborn.stopped() == [[(1, 5.0)], [(1, 5.0)]]


@goes(*RUNNING, *EVICTED, *AGAIN, "succeeded completed")
async def test_an_attempt_may_run_for_what_earlier_ones_left(life: Life) -> None:
    """The second attempt's limit is the first one's minus the time that the first attempt ran."""
    life.plan.max_runtime_s = 3600.0
    await running(life)
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    await running(life)
    await ends_well(life)
    events = (await life.handle.fetch_history()).events
    timers = [e.timer_started_event_attributes for e in events if e.HasField("timer_started_event_attributes")]
    first, second = (t.start_to_fire_timeout.ToTimedelta().total_seconds() for t in timers)
    assert first == 3600.0
    assert second < first


@goes(*RUNNING, "pending launch_failed", *AGAIN, "succeeded completed")
async def test_a_gang_that_a_machine_refuses_after_it_has_worked_has_run(life: Life) -> None:
    """An agent that has lost its key refuses the next try of a run; the time until then counts as runtime."""
    life.plan.max_runtime_s = 3600.0
    worker, refuser = life.agents
    refuser.held.add(Activity.RUN_NODE)
    await life.award()
    await life.asks(worker, Activity.RUN_NODE)
    worker.reports(step=5)
    await life.reaches(Phase.RUNNING)
    refuser.refusals[Activity.RUN_NODE] = "it cannot unseal the secrets"
    await life.reaches(Phase.PENDING)
    refuser.refusals.clear()
    refuser.held.clear()
    await running(life)
    await ends_well(life)
    events = (await life.handle.fetch_history()).events
    timers = [e.timer_started_event_attributes for e in events if e.HasField("timer_started_event_attributes")]
    limits_s = [t.start_to_fire_timeout.ToTimedelta().total_seconds() for t in timers]
    assert limits_s[0] == 3600.0 and 3000.0 < limits_s[-1] < 3600.0


# -------------------------------------------------------------------------------------------------------------- hangs


@goes(*RUNNING, *HUNG, *AGAIN, *HUNG, *AGAIN, "checkpointing no_progress", "failed no_progress")
async def test_a_gang_that_hangs_again_and_again_fails(life: Life) -> None:
    """A hung gang is stopped and restarted; after the third consecutive hang without a step it fails."""
    life.plan.retries = 0
    for _ in range(3):
        await hangs(life)
    assert await life.result() == "failed"
    assert life.reason() == {"silent_s": 61.0, "limit_s": 60.0}


@goes(*RUNNING, *HUNG, *AGAIN, *HUNG, *AGAIN, *EVICTED, *AGAIN, *HUNG, *AGAIN, *HUNG)
async def test_hangs_count_only_in_a_row(life: Life) -> None:
    """An attempt that ends by an eviction resets the count of consecutive hangs."""
    await hangs(life)
    await hangs(life)
    await running(life)
    await life.mail(MessageKind.EVICT)
    await life.reaches(Phase.PREEMPTED)
    await hangs(life)
    await hangs(life)


@goes(*RUNNING, *HUNG, *AGAIN, *HUNG, *AGAIN, "pending task_failed", *AGAIN, *HUNG)
async def test_a_step_forward_ends_a_row_of_hangs(life: Life) -> None:
    """An attempt that makes progress before it fails resets the count of consecutive hangs."""
    await hangs(life)
    await hangs(life)
    await running(life)
    life.agents[0].reports(step=120, resumed_step=100)
    life.agents[0].ends(1)
    await life.reaches(Phase.PENDING)
    await hangs(life)
