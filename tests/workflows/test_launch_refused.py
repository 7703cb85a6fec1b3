"""Launches that a machine refuses or does not carry out, and whom that blames."""

import asyncio

import pytest
from temporalio.exceptions import ApplicationError

from domain.blame import LaunchError
from domain.phases import Phase
from domain.protocol.activities import Activity
from domain.protocol.machines import NodePrepared
from tests.workflows.lab import Life
from tests.workflows.running import ends_well
from tests.workflows.stories import goes

PROVISIONED = ("pending", "placing awarded", "provisioning starting_tasks")


RUNNING = (*PROVISIONED, "running running")


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


@pytest.mark.rotating
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
