"""Progress from heartbeats, and hung gangs, on real workflows."""

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest
from sqlalchemy import text, update
from temporalio.client import Client

from activities.lifecycle.beats import read_beats
from activities.lifecycle.progress import ProgressReader
from activities.roles import control_worker
from domain import ids
from domain.lifecycle.launch_limits import LONGEST_S
from domain.phases import Phase
from domain.protocol.machines import NodeHeartbeat
from domain.search_attributes import PHASE, PRIORITY, REGION, TENANT
from domain.spec import LimitsSpec
from domain.task_reports import BandwidthReport, TaskProgress
from infra.db.models import Attempt, Cluster, Machine, Workload
from tests.activities.agents import OpenEndedAgent
from tests.activities.temporal import dispatching, end_all, until
from tests.activities.world import World, job

M, M2 = "r/c/m", "r/c/m2"


class Site:
    """A control worker, a dispatcher and two agents that are running."""

    def __init__(self, town: World, client: Client, database_url: str) -> None:
        self.town = town
        self.client = client
        self._database_url = database_url
        self.mail = AsyncExitStack()
        self.agents = {M: OpenEndedAgent(client, M), M2: OpenEndedAgent(client, M2)}
        self.progress = ProgressReader(town.engine, town.settings, client)

    async def placed(self, *, limits: LimitsSpec | None = None, **more: Any) -> str:
        """Submits a workload and waits until its tasks run; returns its id."""
        workload = self.town.submit(job(gpus=4), limits=limits, **more)
        assert self.town.tick().awarded == 1
        await self.agents[self.machine(workload)].runs(workload)
        await self.reaches(workload, Phase.RUNNING)
        return workload

    def machine(self, workload: str) -> str:
        """Returns the machine of a workload's newest attempt."""
        (machine,) = self.town.holdings(workload)
        return machine

    def agent(self, workload: str) -> OpenEndedAgent:
        """Returns the agent of a workload's machine."""
        return self.agents[self.machine(workload)]

    async def reaches(self, workload: str, phase: Phase) -> None:
        """Waits until a workload is in a phase."""
        await until(lambda: self.town.workload(workload).phase == phase, f"{workload} is {phase.value}")

    async def mail_flows(self) -> None:
        """Delivers messages until `mail` is closed."""
        await self.mail.enter_async_context(dispatching(self.town.engine, self._database_url, self.client))

    async def collect(self) -> None:
        """Collects the progress of all running workloads once."""
        await self.progress.round()


@pytest.fixture
async def site(town: World, client: Client, database_url: str) -> AsyncIterator[Site]:
    """The town with a second machine, and with worker, dispatcher and agents running."""
    town.machine(M2, 4)
    made = Site(town, client, database_url)
    async with AsyncExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(16))
        await stack.enter_async_context(control_worker(client, town.engine, town.settings, threads))
        for agent in made.agents.values():
            await stack.enter_async_context(agent.worker())
        await stack.enter_async_context(made.mail)
        await made.mail_flows()
        yield made
        await end_all(client)


def _facts(dump: dict[str, list[str]]) -> dict[str, list[str]]:
    """Returns a dump without the tables that change concurrently: deliveries, and the scans that they trigger."""
    return {table: rows for table, rows in dump.items() if table not in ("outbox", "publication")}


async def test_progress_comes_out_of_heartbeats(site: Site) -> None:
    """Progress in heartbeats is stored with the attempt; each checkpoint gives one event, even if reported twice."""
    workload = await site.placed()
    await _is_shown(site, workload)
    agent = site.agent(workload)
    await agent.beats(workload, step=3, resumed_step=1)
    await site.collect()
    attempt = site.town.attempt(workload)
    assert (attempt.last_step, attempt.resumed_step, attempt.checkpoint_step) == (3, 1, None)
    for step in (5, 5, 8):
        saved = {"checkpoint_step": step, "checkpoint_at_s": 1e9, "checkpoint_bytes": 70, "checkpoint_s": 0.5}
        await agent.beats(workload, step=step + 1, **saved)
        for _ in range(2):
            await site.collect()
    attempt = site.town.attempt(workload)
    assert (attempt.last_step, attempt.checkpoint_step, attempt.checkpoint_bytes) == (9, 8, 70)
    events = site.town.events(workload, "workload.checkpoint")
    assert [(e["detail"]["step"], e["attempt"], e["region"]) for e in events] == [(5, 1, "r"), (8, 1, "r")]
    await agent.ends(workload, step=10)
    await site.reaches(workload, Phase.SUCCEEDED)
    before = _facts(site.town.dump())
    await site.collect()
    assert _facts(site.town.dump()) == before
    assert site.town.attempt(workload).last_step == 10


async def test_the_measured_bandwidth_comes_out_of_heartbeats(site: Site) -> None:
    """What no link can have is left out, a time in the future becomes the present, and the last value is kept."""
    workload = await site.placed()
    agent = site.agent(workload)
    await agent.beats(workload, bandwidth=BandwidthReport(time.time() + 1e6, 2e7, 1e7))
    await site.collect()
    stored = site.town.attempt(workload).bandwidth
    assert stored is not None and (stored["bytes_s"], stored["lower_bytes_s"]) == (2e7, 1e7)
    assert abs(stored["at_s"] - time.time()) < 60
    wrong = [(time.time(), *rates) for rates in ((2e7, 0.0), (2e7, -1.0), (1e6, 2e6), (1e300, 1e6))]
    for at_s, mean, lower in (*wrong, (-1e300, 2.0, 1.0)):
        await agent.beats(workload, bandwidth=BandwidthReport(at_s, mean, lower))
        await site.collect()
        assert site.town.attempt(workload).bandwidth == stored
    await agent.beats(workload, bandwidth=None)
    await site.collect()
    assert site.town.attempt(workload).bandwidth == stored, "the agent has restarted and has not measured yet"
    await agent.ends(workload)
    await site.reaches(workload, Phase.SUCCEEDED)


async def _is_shown(site: Site, workload: str) -> None:
    """Checks that Temporal shows a placed workload's tenant, region, phase and rank as search attributes."""
    described = await site.client.get_workflow_handle(ids.workload_workflow_id(workload)).describe()
    shown = {p.key.name: p.value for p in described.typed_search_attributes}
    expected: dict[str, object] = {TENANT: "t", REGION: "r", PHASE: "running", PRIORITY: 3}
    assert {name: shown[name] for name in expected} == expected


async def test_a_hung_gang_is_told_once(site: Site) -> None:
    """A gang that is silent for longer than its limit gets one `hung` message, is stopped and is queued again."""
    workload = await site.placed(limits=LimitsSpec(max_silence_s=60))
    agent = site.agent(workload)
    site.town.alter(Attempt, (workload, 1), started_at=text("now() - interval '1 hour'"))
    await agent.beats(workload, step=1, active_at_s=time.time() - 50)
    await site.collect()
    assert site.town.mail(workload, "hung") == []
    await agent.beats(workload, step=1, active_at_s=time.time() - 70)
    await site.mail.aclose()  # the message is not delivered yet
    for _ in range(3):
        await site.collect()
    (mail,) = site.town.mail(workload, "hung")
    await site.mail_flows()
    assert mail["attempt"] == 1 and mail["detail"]["limit_s"] == 60 and 70 <= mail["detail"]["silent_s"] < 200
    (event,) = site.town.events(workload, "workload.hung")
    assert event["reason"]["code"] == "no_progress"
    await site.reaches(workload, Phase.PENDING)
    assert site.town.workload(workload).reason["code"] == "no_progress"  # type: ignore[index]
    assert agent.stopped == [(workload, 1)]


async def test_one_sign_of_life_keeps_a_gang(site: Site) -> None:
    """A gang is hung only if all its tasks are silent, on all machines."""
    workload = site.town.submit(job(tasks=2, gpus=4), limits=LimitsSpec(max_silence_s=60))
    site.town.tick()
    for agent in site.agents.values():
        await agent.runs(workload)
    await site.reaches(workload, Phase.RUNNING)
    site.town.alter(Attempt, (workload, 1), started_at=text("now() - interval '1 hour'"))
    await site.agents[M].beats(workload, active_at_s=time.time() - 1000)
    await site.agents[M2].beats(workload, task=1, active_at_s=time.time() - 10)
    await site.collect()
    assert site.town.mail(workload, "hung") == []
    await site.agents[M2].beats(workload, task=1, active_at_s=time.time() - 500)
    await site.collect()
    assert len(site.town.mail(workload, "hung")) == 1


async def test_what_a_lost_machine_last_said_is_not_the_next_attempts_progress(site: Site) -> None:
    """Heartbeats of a lost machine that Temporal still shows do not count for the next attempt."""
    workload = await site.placed()
    lost = site.machine(workload)
    await site.agents[lost].beats(workload, step=500, checkpoint_step=500, checkpoint_at_s=1e9)
    site.town.machines.lost(site.town.attend(lost))
    await site.reaches(workload, Phase.PENDING)
    assert site.town.tick().awarded == 1
    await site.agent(workload).runs(workload, 2)
    await site.reaches(workload, Phase.RUNNING)
    await site.agent(workload).beats(workload, 2, step=12, resumed_step=10)
    described = await site.client.get_workflow_handle(ids.workload_workflow_id(workload)).describe()
    assert len(described.raw_description.pending_activities) == 2
    await site.collect()
    attempt = site.town.attempt(workload)
    assert (attempt.attempt, attempt.last_step, attempt.checkpoint_step) == (2, 12, None)


async def test_one_that_cannot_be_asked_keeps_nobody_from_their_turn(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one workflow cannot be described, progress of the others is still collected, and the round fails."""
    workload = await site.placed()
    other = await site.placed()
    for name in (workload, other):
        await site.agent(name).beats(name, step=7)

    async def fails(client: Client, name: str) -> Any:
        if name == workload:
            raise RuntimeError("no answer")
        return await read_beats(client, name)

    monkeypatch.setattr("activities.lifecycle.progress.read_beats", fails)
    with pytest.raises(RuntimeError, match="no answer"):
        await site.collect()
    assert site.town.attempt(other).last_step == 7 and site.town.attempt(workload).last_step is None


async def test_what_a_start_waits_for_comes_out_of_heartbeats(site: Site) -> None:
    """Before its tasks run, only a workload with an image is read; texts of agents are cut."""
    workload = await site.placed()
    agent = site.agent(workload)
    await agent.says(workload, NodeHeartbeat([], 0, preparing="fetching image shell:1: 12 of 800 MB" + 999 * "x"))
    in_start = update(Workload).where(Workload.id == workload).values(phase=Phase.PROVISIONING.value)
    with site.town.session() as session:
        session.execute(in_start)
    await site.collect()
    assert site.town.attempt(workload).preparing is None
    spec = site.town.workload(workload).spec
    spec["jobs"][0]["image"] = "shell:1"
    with site.town.session() as session:
        session.execute(in_start.values(spec=spec))
    await site.collect()
    told = site.town.attempt(workload).preparing
    assert told is not None and list(told) == [agent.machine]
    assert told[agent.machine].startswith("fetching image shell:1: 12 of 800 MB") and len(told[agent.machine]) == 200
    await agent.says(workload, NodeHeartbeat([], 1))
    await site.collect()
    assert site.town.attempt(workload).preparing is None


async def test_progress_is_read_of_so_many_at_a_time(site: Site) -> None:
    """If more workloads run than one round reads, the next rounds read the others."""
    lifecycle = site.town.settings.lifecycle.model_copy(update={"collect_at_most": 1})
    site.progress = ProgressReader(
        site.town.engine, site.town.settings.model_copy(update={"lifecycle": lifecycle}), site.client
    )
    workloads = [await site.placed() for _ in range(2)]
    for workload in workloads:
        await site.agent(workload).beats(workload, step=7)
    seen = []
    for _ in range(3):
        await site.collect()
        seen.append([site.town.attempt(w).last_step for w in workloads])
    assert seen == [[7, None], [7, 7], [7, 7]]


async def test_a_lent_machine_that_accepts_a_run_and_reports_no_task_is_given_up(site: Site) -> None:
    """After the limit it counts as lost, even if it heartbeats; the workload avoids it, and it takes no other work.

    A machine that has reported its tasks is not given up. Its launch counts for the limits of others.
    """
    town = site.town
    town.alter(Cluster, ("r", "c"), capacity="voluntary")
    late, honest = await site.placed(capacity=("voluntary",)), await site.placed(capacity=("voluntary",))
    machine = site.machine(late)
    assert town.attempt(late).launch_limit_s == LONGEST_S
    for workload in (late, honest):
        town.alter(Attempt, (workload, 1), launch_limit_s=0.2, started_at=text("now() - interval '1 hour'"))
    await site.agent(honest).beats(honest, step=1)
    await asyncio.sleep(0.5)
    for _ in range(2):
        await site.collect()
    assert (town.attempt(honest).launch_s or 0.0) > 3000
    assert [_machine(site, site.machine(w)).answered_at is None for w in (honest, late)] == [False, True]
    await site.reaches(late, Phase.PENDING)
    reason = town.workload(late).reason
    assert reason is not None and (reason["code"], reason["detail"]["machine"]) == ("launch_timed_out", machine)
    assert len(town.events(late, "workload.launch_timed_out")) == 1
    assert town.events(honest, "workload.launch_timed_out") == [] and site.agents[machine].stopped == []
    row = _machine(site, machine)
    assert (row.failed_gangs, row.state) == (1, "joining"), "its tasks may run"
    town.machines.ready(town.attend(machine, stop=[f"{late}.1"]))
    assert town.tick().awarded == 0
    assert "machines_avoided" in {r["code"] for r in town.reasons(late)}
    town.machine("r/c/m3", 4)
    assert town.tick().awarded == 1 and site.machine(late) == "r/c/m3"


def _machine(site: Site, machine: str) -> Machine:
    with site.town.session() as session:
        return session.get_one(Machine, machine)


async def test_a_gang_whose_machine_reports_nothing_is_silent(site: Site) -> None:
    """`max_silence` also ends a gang whose agent sends heartbeats without any report."""
    workload = await site.placed(limits=LimitsSpec(max_silence_s=0.2))
    site.town.alter(Attempt, (workload, 1), started_at=text("now() - interval '1 hour'"))
    await asyncio.sleep(0.5)
    await site.collect()
    assert len(site.town.mail(workload, "hung")) == 1


@pytest.mark.parametrize(
    "says", ["nothing", "that no task runs", "what cannot be decoded", "a failure, again and again"]
)
async def test_the_tries_of_a_lent_machine_that_starts_nothing_do_not_count(site: Site, says: str) -> None:
    """The limit of a launch counts from the start of the attempt, whatever the agent answers instead of reports."""
    town = site.town
    town.alter(Cluster, ("r", "c"), capacity="voluntary")
    for agent in site.agents.values():
        agent.fails = says.startswith("a failure")
    workload = await site.placed(capacity=("voluntary",))
    if says == "that no task runs":
        await site.agent(workload).says(workload, NodeHeartbeat([], 1))
    elif says == "what cannot be decoded":
        await site.agent(workload).says(workload, "?")
    await site.collect()
    assert town.mail(workload, "machine_lost") == []
    town.alter(Attempt, (workload, 1), launch_limit_s=60.0, started_at=text("now() - interval '1 hour'"))
    await site.collect()
    assert len(town.events(workload, "workload.launch_timed_out")) == 1


async def test_a_lent_machine_that_prepares_its_tasks_again_is_not_given_up(site: Site) -> None:
    """The launch of a machine has ended with its first report: an agent that restarts reports nothing for a while."""
    town = site.town
    town.alter(Cluster, ("r", "c"), capacity="voluntary")
    workload = await site.placed(capacity=("voluntary",))
    town.alter(Attempt, (workload, 1), launch_limit_s=60.0, started_at=text("now() - interval '1 hour'"))
    await site.agent(workload).beats(workload)
    await site.collect()
    await site.agent(workload).says(workload)
    await site.collect()
    assert town.events(workload, "workload.launch_timed_out") == []


async def test_an_empty_heartbeat_is_silence(site: Site) -> None:
    """`max_silence` ends a gang on a single machine whose heartbeats contain no report."""
    workload = await site.placed(limits=LimitsSpec(max_silence_s=0.2))
    site.town.alter(Attempt, (workload, 1), started_at=text("now() - interval '1 hour'"))
    await site.agent(workload).says(workload, NodeHeartbeat([], 1))
    await asyncio.sleep(0.5)
    await site.collect()
    assert len(site.town.mail(workload, "hung")) == 1


async def test_a_machine_reports_only_its_own_tasks(site: Site) -> None:
    """What a machine says of a task on another machine is not progress, and does not show that the other answers."""
    town = site.town
    town.alter(Cluster, ("r", "c"), capacity="voluntary")
    workload = town.submit(job(tasks=2, gpus=4), capacity=("voluntary",))
    town.tick()
    for agent in site.agents.values():
        await agent.runs(workload)
    await site.reaches(workload, Phase.RUNNING)
    forged = [TaskProgress("main", 0, step=3), TaskProgress("main", 1, step=10**6, checkpoint_step=10**6)]
    await site.agents[M].says(workload, NodeHeartbeat(forged, 2))
    await site.collect()
    attempt = town.attempt(workload)
    assert (attempt.last_step, attempt.checkpoint_step) == (3, None)
    assert attempt.earned is not None and attempt.earned["steps"] == {}
    assert [_machine(site, m).answered_at is None for m in (M, M2)] == [False, True]
    await site.agents[M2].beats(workload, task=1, step=2)
    await site.collect()
    earned = town.attempt(workload).earned
    assert earned is not None and {m: step for m, (step, _) in earned["steps"].items()} == {M: 2, M2: 2}
