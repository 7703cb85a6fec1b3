"""When a platform reclaims a machine, the workload is placed again while its tasks are still saving."""

from typing import Any

import pytest

from domain.phases import Phase
from domain.protocol.activities import Activity
from domain.protocol.workload_messages import MessageKind
from domain.protocol.workloads import NodeLaunch
from domain.task_reports import OWNER, NoticeReport
from tests.workflows.agents import ScriptedAgent, until
from tests.workflows.lab import AWAY, Life
from tests.workflows.running import AGAIN, RUNNING, ends_well, running
from tests.workflows.stories import goes

NOTICED = ("checkpointing platform_notice", "preempted platform_notice")
TAKEN = NoticeReport(OWNER, "preempt", True, 100.0, 100.0, "the owner takes the machine back")
TERMINATE = NoticeReport("aws", "preempt", True, 100.0, 220.0, "terminate")


async def noticed(life: Life, **detail: Any) -> None:
    """Delivers the message that the platform reclaims the first machine."""
    told = {"machine": life.agents[0].machine, **TERMINATE.numbers(), "code": "platform_notice", **detail}
    await life.mail(MessageKind.PREEMPT, **told)


def holds_stops(life: Life) -> None:
    """Keeps the tasks saving until `saved`."""
    for agent in life.agents:
        agent.held.add(Activity.STOP_NODE)


def saved(life: Life) -> None:
    """Lets the tasks finish saving and end."""
    for agent in life.agents:
        agent.held.clear()


@goes(*RUNNING, "pending unconfirmed_failure", *AGAIN, *NOTICED, *AGAIN, "pending unconfirmed_failure")
async def test_steps_elsewhere_until_a_notice_clear_the_suspects(life: Life) -> None:
    """A lent machine fails, another one works until its owner takes it: the next failure of the first is a new one."""
    both, (honest, liar) = life.plan.nodes, life.agents
    both[1].lent = True
    await running(life)
    await _fails_on(life, liar, attempt=1)
    life.plan.nodes = [NodeLaunch(honest.machine, ["main"], {"main": [0]}, True)]
    await life.award()
    await life.reaches(Phase.RUNNING)
    await life.asks(honest, Activity.RUN_NODE, 2)
    honest.reports(step=7, resumed_step=3)
    await noticed(life)
    await life.reaches(Phase.PREEMPTED)
    await until(lambda: len(life.facts.flushed) == 1, "the tasks have saved")
    life.plan.nodes = both
    await life.award()
    await life.runs()
    await _fails_on(life, liar, attempt=1)


async def _fails_on(life: Life, agent: ScriptedAgent, attempt: int) -> None:
    """Lets the task of `agent` fail; the failure is the unconfirmed one of this number."""
    agent.ends(7)
    await life.reaches(Phase.PENDING)
    assert (life.reason()["avoided"], life.reason()["attempts"]) == ([agent.machine], attempt)


@goes(*RUNNING, *NOTICED, *AGAIN, "succeeded completed")
async def test_a_workload_is_placed_anew_while_its_tasks_save(life: Life) -> None:
    """The workload is queued immediately; its next attempt is prepared only after the old tasks have saved."""
    await running(life)
    holds_stops(life)
    await noticed(life)
    await life.reaches(Phase.PREEMPTED)
    release = life.facts.releases[0]
    assert release.silent_machines == [a.machine for a in life.agents]
    assert (release.flushing_s, release.blames_machine) == (5.0, None)
    for agent in life.agents:
        await life.asks(agent, Activity.STOP_NODE)
    await life.award()
    await until(lambda: [s.attempt for s in life.facts.staged] == [1, 2], "the next attempt is staged")
    await life.handled()
    assert [len(a.requests(Activity.PREPARE_NODE)) for a in life.agents] == [1, 1]
    assert life.facts.flushed == []
    for agent in life.agents:
        agent.reports(step=70, checkpoint_step=70)
    saved(life)
    await life.runs()
    (flushed,) = life.facts.flushed
    assert flushed.attempt == 1
    assert [p.checkpoint_step for p in flushed.progress] == [70, 70]
    assert life.stopped() == [[(1, 5.0)], [(1, 5.0)]]
    await ends_well(life)


@goes(*RUNNING, *NOTICED, "succeeded completed")
async def test_tasks_that_had_finished_do_not_run_again(life: Life) -> None:
    """The exit codes arrive after the workload has returned to the queue: it is complete, and is not placed again."""
    await running(life)
    holds_stops(life)
    await noticed(life)
    await life.reaches(Phase.PREEMPTED)
    for agent in life.agents:
        agent.ends()
    saved(life)
    assert await life.result() == "succeeded"
    assert [one.attempt for one in life.facts.flushed] == [1]
    assert [s.attempt for s in life.facts.staged] == [1]


@goes(*RUNNING, *NOTICED, "placing awarded", "succeeded completed")
async def test_an_attempt_that_follows_finished_tasks_starts_nothing(life: Life) -> None:
    """The exit codes arrive when the next attempt is already placed: it ends before it starts any task."""
    await running(life)
    holds_stops(life)
    await noticed(life)
    await life.reaches(Phase.PREEMPTED)
    await life.award()
    await until(lambda: [s.attempt for s in life.facts.staged] == [1, 2], "the next attempt is staged")
    for agent in life.agents:
        agent.ends()
    saved(life)
    assert await life.result() == "succeeded"
    assert [len(a.requests(Activity.RUN_NODE)) for a in life.agents] == [1, 1]


@goes(*RUNNING, *NOTICED, "placing awarded", "migrating copying_checkpoint", *AGAIN[1:])
async def test_no_checkpoint_is_fenced_while_tasks_save(life: Life) -> None:
    """The checkpoint is copied only after the tasks have saved, because the copy fences the save."""
    await running(life)
    holds_stops(life)
    await noticed(life)
    await life.reaches(Phase.PREEMPTED)
    life.plan.checkpoint_region = AWAY
    await life.award()
    await until(lambda: len(life.facts.staged) == 2, "the next attempt is staged")
    await life.handled()
    assert life.facts.copies == []
    saved(life)
    await life.runs()
    assert [c.attempt for c in life.facts.copies] == [2]


@pytest.mark.rotating
@goes(*RUNNING, *NOTICED, *AGAIN)
async def test_tasks_that_never_end_are_not_waited_for_beyond_their_grace(life: Life) -> None:
    """After the grace the next attempt starts without waiting for a silent machine, and fences its tasks."""
    life.plan.grace_s = 0.0
    await running(life)
    holds_stops(life)
    await noticed(life)
    await life.reaches(Phase.PREEMPTED)
    assert life.facts.releases[0].silent_machines == [a.machine for a in life.agents]
    life.agents[0].held.discard(Activity.STOP_NODE)
    await life.award()
    await life.runs()
    assert life.facts.flushed == []
    saved(life)


@goes(*RUNNING, *NOTICED, "cancelled cancelled_by_user")
async def test_a_workload_that_is_cancelled_while_its_tasks_save_ends_after_them(life: Life) -> None:
    """A cancelled workload's workflow ends only after all its tasks have ended."""
    await running(life)
    holds_stops(life)
    await noticed(life)
    await life.reaches(Phase.PREEMPTED)
    await life.mail(MessageKind.CANCEL, by="ada")
    await life.reaches(Phase.CANCELLED)
    saved(life)
    assert await life.result() == "cancelled"
    assert len(life.facts.flushed) == 1


@goes(*RUNNING, *NOTICED)
async def test_tasks_that_end_by_the_notice_before_the_server_heard_are_preempted(life: Life) -> None:
    """Tasks that end after a notice, with any exit code, are preempted, not failed; the other tasks get their grace."""
    life.plan.retries = 0
    await running(life)
    life.agents[0].ends(1, notice=TERMINATE)
    await life.reaches(Phase.PREEMPTED)
    assert life.reason() == {"machine": life.agents[0].machine, **TERMINATE.numbers()}
    await life.asks(life.agents[1], Activity.STOP_NODE)
    assert life.stopped()[1] == [(1, 5.0)]
    assert life.facts.releases[0].silent_machines == [life.agents[1].machine]


@goes(*RUNNING, "preempted platform_notice")
async def test_a_gang_all_of_whose_tasks_ended_by_a_notice_is_preempted(life: Life) -> None:
    """If all tasks have ended after a notice, the attempt is released; a later message about the notice is ignored."""
    life.plan.retries = 0
    await running(life)
    life.agents[1].ends()
    await life.pending(Activity.RUN_NODE, 1)
    life.agents[0].ends(143, notice=TERMINATE)
    await life.reaches(Phase.PREEMPTED)
    await noticed(life)
    await life.handled()


@goes(*RUNNING, "succeeded completed")
async def test_a_gang_that_ended_well_in_spite_of_a_notice_has_succeeded(life: Life) -> None:
    """A gang whose tasks all exit with 0 has succeeded, even after a notice."""
    await running(life)
    for agent in life.agents:
        agent.ends(notice=TERMINATE)
    assert await life.result() == "succeeded"


@goes("pending", "placing awarded", "provisioning starting_tasks", "preempted platform_notice")
async def test_a_notice_before_the_start_gives_the_place_up(life: Life) -> None:
    """After a notice during preparation the attempt is released, and no task starts."""
    for agent in life.agents:
        agent.held.add(Activity.PREPARE_NODE)
    await life.award()
    await life.asks(life.agents[0], Activity.PREPARE_NODE)
    await noticed(life)
    await life.reaches(Phase.PREEMPTED)
    saved(life)
    assert life.agents[0].requests(Activity.RUN_NODE) == []


@goes(*RUNNING, *NOTICED, *AGAIN, *NOTICED, *AGAIN)
async def test_notices_may_follow_each_other(life: Life) -> None:
    """A second notice, right after the tasks of the first attempt have saved, is handled like the first."""
    await running(life)
    await noticed(life)
    await life.reaches(Phase.PREEMPTED)
    await running(life)
    await noticed(life)
    await life.reaches(Phase.PREEMPTED)
    await running(life)
    assert [f.attempt for f in life.facts.flushed] == [1, 2]


@goes(*RUNNING, *NOTICED)
async def test_a_launch_is_withdrawn_if_the_owner_takes_the_machine_at_once(life: Life) -> None:
    """The agent never receives a launch that was waiting for it, but confirms that no task runs."""
    agent = life.agents[0]
    await agent.goes()
    life.plan.starts_at_once, life.plan.tasks, life.plan.nodes = True, 1, life.plan.nodes[:1]
    await life.award()
    await life.reaches(Phase.RUNNING)
    await life.pending(Activity.RUN_NODE, 1)
    await noticed(life, **TAKEN.numbers())
    await life.reaches(Phase.PREEMPTED)
    assert life.facts.releases[0].silent_machines == [agent.machine], "it takes no work until the stop is confirmed"
    await life.pending(Activity.RUN_NODE, 0)
    await agent.comes()
    await until(lambda: len(life.facts.flushed) == 1, "the end is recorded")
    assert [kind for kind, _ in agent.asked] == [Activity.STOP_NODE]


@goes(*RUNNING, "preempted platform_notice")
async def test_an_agent_whose_owner_takes_the_machine_confirms_the_end_once(life: Life) -> None:
    """The attempt is released without a stop on the machine that has reported its end; the other ones are asked."""
    await running(life)
    life.agents[1].ends()
    await life.pending(Activity.RUN_NODE, 1)
    life.agents[0].ends(signal=9, exit_code=None, notice=TAKEN)
    await life.reaches(Phase.PREEMPTED)
    assert life.stopped() == [[], [(1, 0.0)]]
    assert (life.facts.releases[0].silent_machines, life.facts.releases[0].blames_machine) == ([], None)
