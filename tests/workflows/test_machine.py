"""The machine workflow: registration, stop of stale runs, attendance, loss and return."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from temporalio.client import Client, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import UnsandboxedWorkflowRunner

import workflows.machine
from domain.protocol.activities import Activity
from domain.protocol.machines import DETACHED, Attend, Hello, MachineNotice, Pace, ProveKey, RunPace, StopNode, Welcome
from domain.task_reports import NoticeReport
from tests.workflows.agents import ScriptedAgent, until
from tests.workflows.lab import handled, serving
from tests.workflows.stand_ins import Registry
from workflows.machine import MachineWorkflow

_NUMBERS = itertools.count(1)


def hello(machine: str, incarnation: str = "boot-1") -> Hello:
    """Returns the registration that an agent sends at its start."""
    region, cluster, _ = machine.split("/")
    return Hello(machine, region, cluster, "rack-1", "a100", 8, 64000, 1 << 38, "10.0.0.1", incarnation, "key")


class Registered:
    """One machine's workflow on the dev server, its agent, and a registry in memory."""

    def __init__(self, client: Client, queue: str) -> None:
        self.machine = f"east/c1/m{next(_NUMBERS)}"
        self.agent = ScriptedAgent(client, self.machine)
        self.registry = Registry()
        self.queue = queue
        self._client = client
        self._handle: WorkflowHandle[Any, Any] | None = None

    @property
    def handle(self) -> WorkflowHandle[Any, Any]:
        assert self._handle is not None
        return self._handle

    async def says_hello(self, incarnation: str = "boot-1") -> None:
        """Starts the agent and registers it, as in production."""
        await self.agent.comes()
        await self.announces(incarnation)

    async def announces(self, incarnation: str = "boot-1") -> None:
        """Sends only the registration."""
        self._handle = await self._client.start_workflow(
            MachineWorkflow.run,
            args=[self.machine],
            id=f"machine/{self.machine}",
            task_queue=self.queue,
            start_signal="hello",
            start_signal_args=[hello(self.machine, incarnation)],
        )

    async def attended(self, times: int = 1) -> None:
        """Waits until the agent has received this many attend requests."""
        await until(lambda: len(self.agent.requests(Activity.ATTEND)) >= times, f"the agent is attended {times} times")

    async def known(self, *names: str) -> None:
        """Waits until the registry has exactly these calls, in this order."""
        await until(lambda: len(self.registry.names()) >= len(names), f"the registry's calls are {names}")
        assert self.registry.names() == list(names)

    async def close(self) -> None:
        if self._handle is not None:
            await self._handle.terminate()
        await self.agent.close()


@pytest_asyncio.fixture(loop_scope="session")
async def machine(dev_client: Client) -> AsyncIterator[Registered]:
    """A machine that is not registered yet, on the dev server: only that times out retries that no agent takes."""
    registered = Registered(dev_client, "machines")
    async with serving(dev_client, "machines", [MachineWorkflow], registered.registry.all()):
        try:
            yield registered
        finally:
            await registered.close()


async def test_a_new_machine_is_ready_and_attended(machine: Registered) -> None:
    """A machine without runs to stop is ready right after its registration, and its agent attends."""
    await machine.says_hello()
    await machine.attended()
    await machine.known("machine.register", "machine.ready")
    assert machine.registry.requests(Activity.MACHINE_READY) == [Attend(machine.machine, "boot-1", [])]


async def test_stale_runs_are_stopped_before_work_may_come(machine: Registered) -> None:
    """Runs that were released while the machine was away are stopped one by one before the machine is ready."""
    machine.registry.welcome.stop = ["wl-1.3", "wl-2.1"]
    machine.agent.held.add(Activity.STOP_NODE)
    await machine.says_hello()
    await until(lambda: machine.agent.requests(Activity.STOP_NODE), "the agent has the first stop request")
    assert machine.registry.names() == ["machine.register"]
    machine.agent.held.clear()
    await machine.known("machine.register", "machine.ready")
    assert machine.agent.requests(Activity.STOP_NODE) == [StopNode("wl-1", 3, 0.0), StopNode("wl-2", 1, 0.0)]


async def test_a_machine_whose_agent_stays_silent_is_lost(machine: Registered) -> None:
    """If heartbeats stop and no agent takes the retry in time, the machine is lost until its next registration."""
    await machine.says_hello()
    await machine.attended()
    await machine.agent.goes()
    await machine.known("machine.register", "machine.ready", "machine.lost")
    assert machine.registry.requests(Activity.MACHINE_LOST) == [Attend(machine.machine, "boot-1", [])]
    await machine.says_hello("boot-2")
    await machine.known("machine.register", "machine.ready", "machine.lost", "machine.register", "machine.ready")


async def test_an_agent_that_comes_back_in_time_is_not_lost(machine: Registered) -> None:
    """After a missed heartbeat the agent gets another attend request; the machine is not lost."""
    machine.registry.welcome.lost_after_s = 4.0
    await machine.says_hello()
    await machine.attended()
    await machine.agent.loses_touch()
    await machine.attended(2)
    assert machine.registry.names() == ["machine.register", "machine.ready"]


async def _patience(machine: Registered) -> list[tuple[float, float]]:
    """Returns schedule-to-start and heartbeat timeout of each attend request, in seconds."""
    events = [event.activity_task_scheduled_event_attributes for event in await handled(machine.handle)]
    return [
        (
            asked.schedule_to_start_timeout.ToTimedelta().total_seconds(),
            asked.heartbeat_timeout.ToTimedelta().total_seconds(),
        )
        for asked in events
        if asked.activity_type.name == Activity.ATTEND.value
    ]


@pytest.mark.rotating
async def test_a_silent_machine_has_a_last_chance(machine: Registered) -> None:
    """A silent agent gets one more attend request, with a shorter timeout, before its machine is lost."""
    machine.registry.welcome.lost_after_s = 2.0
    await machine.says_hello()
    await machine.attended()
    await machine.agent.loses_touch()
    await machine.attended(2)
    await machine.agent.goes()
    await machine.known("machine.register", "machine.ready", "machine.lost")
    assert await _patience(machine) == [(2.0, 2.0), (1.0, 2.0), (1.0, 2.0)]


async def test_an_agent_that_leaves_may_take_longer(machine: Registered) -> None:
    """After an agent that announces its stop, the next agent has the whole `lost_after_s` to begin."""
    machine.registry.welcome.lost_after_s = 2.0
    machine.agent.errors[Activity.ATTEND] = [ApplicationError("it stops", type=DETACHED)]
    await machine.says_hello()
    await machine.attended(2)
    assert await _patience(machine) == [(2.0, 2.0), (2.0, 2.0)]
    await machine.agent.loses_touch()
    await machine.attended(3)
    assert (await _patience(machine))[2:] == [(1.0, 2.0)]
    assert machine.registry.names() == ["machine.register", "machine.ready"]


async def test_what_fails_otherwise_is_tried_again_by_the_service(machine: Registered) -> None:
    """Other errors of the attendance are retried by Temporal and add nothing to the workflow's history."""
    machine.agent.errors[Activity.ATTEND] = [RuntimeError("a full disk")] * 2
    await machine.says_hello()
    await machine.attended(3)
    assert len(await _patience(machine)) == 1
    assert machine.registry.names() == ["machine.register", "machine.ready"]


async def test_a_hello_of_an_attended_machine_begins_anew(machine: Registered) -> None:
    """A restarted agent is registered and attended again without a loss."""
    await machine.says_hello()
    await machine.attended()
    await machine.announces("boot-1")
    await machine.attended(2)
    await machine.known("machine.register", "machine.ready", "machine.register", "machine.ready")


async def test_of_several_hellos_the_newest_counts(machine: Registered) -> None:
    """If several registrations arrive during one, only the newest is handled next."""
    machine.registry.held.add(Activity.REGISTER_MACHINE)
    await machine.says_hello()
    await machine.known("machine.register")
    await machine.announces("boot-2")
    await machine.announces("boot-3")
    machine.registry.held.clear()
    await until(lambda: machine.registry.names().count("machine.ready") >= 2, "the machine is ready again")
    heard = [h.incarnation for h in machine.registry.requests(Activity.REGISTER_MACHINE)]
    assert heard == ["boot-1", "boot-3"]


async def test_an_agent_that_goes_while_stale_runs_are_stopped_is_lost(machine: Registered) -> None:
    """A machine whose stale runs cannot be stopped is lost instead of ready."""
    machine.registry.welcome.stop = ["wl-1.3"]
    await machine.announces()
    await machine.known("machine.register", "machine.lost")


async def test_a_hello_that_came_while_stale_runs_were_stopped_is_heard(machine: Registered) -> None:
    """A machine whose agent returns while its stale runs are being stopped is registered again, not lost."""
    machine.registry.welcome.stop = ["wl-1.3"]
    machine.agent.silent.add(Activity.STOP_NODE)
    await machine.says_hello()
    await until(lambda: machine.agent.requests(Activity.STOP_NODE), "the agent has the stop request")
    await machine.agent.goes()
    await machine.announces("boot-2")
    await until(lambda: machine.registry.names().count("machine.register") == 2, "the machine is registered again")
    machine.agent.silent.clear()
    await machine.agent.comes()
    await machine.attended()
    assert machine.registry.names() == ["machine.register", "machine.register", "machine.ready"]
    assert machine.registry.requests(Activity.MACHINE_READY)[0].incarnation == "boot-2"


async def test_what_was_given_up_there_is_stopped_while_it_is_attended(machine: Registered) -> None:
    """Runs that a workload's workflow could not confirm as stopped are stopped during the attendance."""
    await machine.says_hello()
    await machine.attended()
    for run in ("wl-1.3", "wl-2.1"):
        await machine.handle.signal("unconfirmed", run)
    await until(lambda: len(machine.agent.requests(Activity.STOP_NODE)) == 2, "the agent has both stop requests")
    assert machine.agent.requests(Activity.STOP_NODE) == [StopNode("wl-1", 3, 0.0), StopNode("wl-2", 1, 0.0)]
    await until(lambda: _confirmed(machine) == ["wl-1.3", "wl-2.1"], "both stops are confirmed")
    assert len(machine.agent.requests(Activity.ATTEND)) == 1
    assert set(machine.registry.names()) == {"machine.register", "machine.ready"}


async def test_what_was_given_up_on_a_machine_that_is_gone_waits_for_its_return(machine: Registered) -> None:
    """If the agent does not respond to a stop, the machine is lost, and the run is stopped at its next registration."""
    await machine.says_hello()
    await machine.attended()
    await machine.agent.goes()
    await machine.handle.signal("unconfirmed", "wl-1.3")
    await machine.known("machine.register", "machine.ready", "machine.lost")
    machine.registry.welcome.stop = ["wl-1.3"]
    await machine.says_hello()
    await machine.known("machine.register", "machine.ready", "machine.lost", "machine.register", "machine.ready")
    # An agent that returns early may still take the first request before it times out.
    stops = machine.agent.requests(Activity.STOP_NODE)
    assert stops and all(stop == StopNode("wl-1", 3, 0.0) for stop in stops)


async def test_a_machine_that_refuses_to_stop_what_was_given_up_is_lost(machine: Registered) -> None:
    """An agent that answers a stop with a failure is not asked again before its next registration."""
    await machine.says_hello()
    await machine.attended()
    machine.agent.errors[Activity.STOP_NODE] = [ApplicationError("no", type="MachineFault", non_retryable=True)] * 50
    await machine.handle.signal("unconfirmed", "wl-1.3")
    await machine.known("machine.register", "machine.ready", "machine.lost")
    assert machine.agent.requests(Activity.STOP_NODE) == [StopNode("wl-1", 3, 0.0)]


async def test_an_agent_that_only_detaches_is_lost(machine: Registered) -> None:
    """An agent that detaches a second time without a registration in between is not asked to attend again."""
    machine.agent.errors[Activity.ATTEND] = [ApplicationError("it stops", type=DETACHED)] * 50
    await machine.says_hello()
    await machine.known("machine.register", "machine.ready", "machine.lost")
    assert len(machine.agent.requests(Activity.ATTEND)) == 2


async def test_what_was_given_up_before_a_hello_is_left_to_the_registration(machine: Registered) -> None:
    """The registration reads from Postgres what is to be stopped; an earlier signal to a lost machine adds nothing."""
    await machine.says_hello()
    await machine.attended()
    await machine.agent.goes()
    await machine.known("machine.register", "machine.ready", "machine.lost")
    await machine.handle.signal("unconfirmed", "wl-1.3")
    await machine.says_hello()
    await machine.attended(2)
    asked = [e.activity_task_scheduled_event_attributes.activity_type.name for e in await handled(machine.handle)]
    # The second attend request is the last chance, which no agent took.
    assert asked.count(Activity.ATTEND.value) == 3 and Activity.STOP_NODE.value not in asked


async def test_what_is_given_up_during_a_registration_is_stopped_after_it(machine: Registered) -> None:
    """A stop signal during a registration is handled once, when the machine is attended."""
    machine.registry.held.add(Activity.REGISTER_MACHINE)
    await machine.says_hello()
    await machine.known("machine.register")
    await machine.handle.signal("unconfirmed", "wl-1.3")
    machine.registry.held.clear()
    await until(lambda: _confirmed(machine) == ["wl-1.3"], "the stop is confirmed")
    await machine.announces()
    await machine.attended(2)
    assert len(machine.agent.requests(Activity.STOP_NODE)) == 1


def _confirmed(machine: Registered) -> list[str]:
    """Returns the runs that were reported as stopped to the registry, in order."""
    return [run for attend in machine.registry.requests(Activity.MACHINE_READY) for run in attend.stop]


async def test_a_hello_is_not_lost_with_a_history(dev_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registration that makes the workflow continue as new is handled by the new run."""
    # No sandbox: sandboxed workflows have their own copies of modules, which cannot be patched.
    monkeypatch.setattr(workflows.machine, "LONG_HISTORY_EVENTS", 10)
    registered = Registered(dev_client, "short")
    runner = UnsandboxedWorkflowRunner()
    async with serving(dev_client, "short", [MachineWorkflow], registered.registry.all(), runner):
        try:
            await registered.says_hello()
            await registered.attended()
            await registered.announces("boot-2")
            await registered.attended(2)
            await registered.known("machine.register", "machine.ready", "machine.register", "machine.ready")
            history = await dev_client.get_workflow_handle(registered.handle.id).fetch_history()
            began = history.events[0].workflow_execution_started_event_attributes
            assert began.continued_execution_run_id
        finally:
            await registered.close()


@pytest.mark.rotating
async def test_a_history_of_silences_ends(dev_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeatedly late agent stays attended, and the workflow continues as new before its history grows too long."""
    monkeypatch.setattr(workflows.machine, "LONG_HISTORY_EVENTS", 10)
    registered = Registered(dev_client, "silences")
    registered.registry.welcome = Welcome([], heartbeat_timeout_s=0.5, lost_after_s=1.0)
    runner = UnsandboxedWorkflowRunner()
    async with serving(dev_client, "silences", [MachineWorkflow], registered.registry.all(), runner):
        try:
            await registered.says_hello()
            for times in range(1, 5):
                await registered.attended(times)
                await registered.agent.loses_touch()
            await registered.known("machine.register", "machine.ready", "machine.register", "machine.ready")
            await registered.attended(5)
            history = await dev_client.get_workflow_handle(registered.handle.id).fetch_history()
            assert history.events[0].workflow_execution_started_event_attributes.continued_execution_run_id
            assert len(history.events) < 3 * 10
        finally:
            await registered.close()


def said(machine: Registered, run: str | None = None) -> MachineNotice:
    """Returns a notice of the agent about its machine, or of the task of `run`."""
    notice = NoticeReport("aws", "preempt", True, 100.0, 220.0, "terminate")
    return MachineNotice(machine.machine, "boot-1", notice, run)


async def test_a_notice_is_passed_on_at_once(machine: Registered) -> None:
    """Each notice about an attended machine is recorded immediately."""
    await machine.says_hello()
    await machine.attended()
    await machine.handle.signal("noticed", said(machine))
    await machine.handle.signal("noticed", said(machine, "wl-1.3"))
    await machine.known("machine.register", "machine.ready", "machine.noticed", "machine.noticed")
    assert machine.registry.requests(Activity.MACHINE_NOTICED) == [said(machine), said(machine, "wl-1.3")]


async def test_a_notice_does_not_wait_for_tasks_that_save(machine: Registered) -> None:
    """A notice is recorded while tasks of a released attempt use their grace to save."""
    await machine.says_hello()
    await machine.attended()
    machine.agent.held.add(Activity.STOP_NODE)
    await machine.handle.signal("unconfirmed", args=["wl-1.3", 120.0])
    await until(lambda: machine.agent.requests(Activity.STOP_NODE), "the agent has the stop request")
    await machine.handle.signal("noticed", said(machine))
    await machine.known("machine.register", "machine.ready", "machine.noticed")
    machine.agent.held.clear()
    await machine.known("machine.register", "machine.ready", "machine.noticed", "machine.ready")
    assert machine.agent.requests(Activity.STOP_NODE) == [StopNode("wl-1", 3, 120.0)]
    assert machine.registry.requests(Activity.MACHINE_READY)[-1] == Attend(machine.machine, "boot-1", ["wl-1.3"])


async def test_another_key_is_not_attended_to_until_it_is_proven(machine: Registered) -> None:
    """A refused registration leads to no attendance; the agent is asked for a proof, which is registered."""
    machine.registry.welcome.refused = True
    await machine.says_hello()
    await machine.known("machine.register")
    assert machine.agent.requests(Activity.ATTEND) == []
    machine.registry.welcome.challenge = "a box"
    machine.registry.after_proof = Welcome(stop=[], heartbeat_timeout_s=1.0, lost_after_s=1.0)
    await machine.announces()
    await machine.attended()
    await machine.known("machine.register", "machine.register", "machine.register", "machine.ready")
    asked = machine.registry.requests(Activity.REGISTER_MACHINE)
    assert [h.key_proof for h in asked] == ["", "", "proof of a box"]
    assert machine.agent.requests(Activity.PROVE_KEY) == [ProveKey(machine.machine, "a box")]


async def test_the_workflow_of_an_unknown_machine_ends(machine: Registered) -> None:
    """A refused hello of a machine that is not registered leaves no open workflow; the next hello starts one."""
    machine.registry.welcome.refused = machine.registry.welcome.unknown = True
    for _ in range(2):
        await machine.announces()
        await asyncio.wait_for(machine.handle.result(), 20.0)
    machine.registry.welcome.refused = machine.registry.welcome.unknown = False
    await machine.says_hello()
    await machine.attended()
    await machine.known(*("machine.register",) * 3, "machine.ready")


async def test_a_late_notice_of_an_owner_who_lends_again_is_dropped(machine: Registered) -> None:
    """It would cordon the machine for good: the agent says that it is lent only once."""
    await machine.says_hello()
    await machine.attended()
    lent = replace(hello(machine.machine), at_s=100.0)
    await machine.handle.signal("hello", lent)
    await machine.attended(2)
    for at_s in (99.0, 101.0):
        report = NoticeReport("owner", "preempt", True, at_s, at_s + 60.0, "the owner takes the machine back")
        await machine.handle.signal("noticed", MachineNotice(machine.machine, "boot-1", report))
    await until(lambda: "machine.noticed" in machine.registry.names(), "a notice is recorded")
    assert [one.notice.at_s for one in machine.registry.requests(Activity.MACHINE_NOTICED)] == [101.0]


async def test_tasks_are_told_how_often_to_save(machine: Registered) -> None:
    """The newest intervals reach the agent; one that does not take them is attended all the same."""
    pace = Pace(machine.machine, 1e10, [RunPace("wl-1.1", 300.0, 0.5, 30.0, 12.0, "optimum")])
    await machine.says_hello()
    await machine.attended()
    machine.agent.refusals[Activity.PACE_NODE] = "Unknown"
    await machine.handle.signal("paced", pace)
    await until(lambda: machine.agent.requests(Activity.PACE_NODE) == [pace], "the agent is told")
    machine.agent.refusals.clear()
    await machine.handle.signal("paced", pace)
    await until(lambda: machine.agent.requests(Activity.PACE_NODE) == [pace] * 2, "the agent is told again")
    assert machine.registry.names() == ["machine.register", "machine.ready"]
