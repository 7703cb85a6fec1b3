"""Housekeeping beside real workflows: progress out of heartbeats, hung gangs, and workflows that are gone."""

import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest
from sqlalchemy import select, text
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.dispatch import Dispatcher
from activities.house import HouseActivities
from activities.roles import control_worker
from domain import ids
from domain.phases import Phase
from domain.protocol import MailKind
from domain.search_attributes import PHASE, PRIORITY, REGION, TENANT
from domain.spec import LimitsSpec
from infra.db import outbox
from infra.db.logs import Outbox
from infra.db.models import Attempt, Replica, Workload
from infra.db.nights import begin_night
from tests.activities.agents import Agent
from tests.activities.temporal import dispatching, end_all, told_workload, until
from tests.activities.world import World, job

M, M2 = "r/c/m", "r/c/m2"


class Site:
    """A control worker, a dispatcher and two agents at work."""

    def __init__(self, town: World, client: Client, database_url: str) -> None:
        self.town = town
        self.client = client
        self._database_url = database_url
        self.mail = AsyncExitStack()
        self.agents = {M: Agent(client, M), M2: Agent(client, M2)}
        self.house = HouseActivities(town.engine, town.settings, client)

    async def placed(self, *, limits: LimitsSpec | None = None) -> str:
        """A workload whose tasks run on the first machine."""
        workload = self.town.submit(job(gpus=4), limits=limits)
        assert self.town.tick().awarded == 1
        await self.agents[self.machine(workload)].runs(workload)
        await self.reaches(workload, Phase.RUNNING)
        return workload

    def machine(self, workload: str) -> str:
        """Where its newest attempt is."""
        (machine,) = self.town.holdings(workload)
        return machine

    def agent(self, workload: str) -> Agent:
        """The agent of its machine."""
        return self.agents[self.machine(workload)]

    async def reaches(self, workload: str, phase: Phase) -> None:
        """Waits for a phase."""
        await until(lambda: self.town.workload(workload).phase == phase, f"{workload} is {phase.value}")

    async def mail_flows(self) -> None:
        """Mail is delivered from now on, until `mail` is closed."""
        await self.mail.enter_async_context(dispatching(self.town.engine, self._database_url, self.client))

    async def collect(self) -> None:
        """One round."""
        rest_s = await ActivityEnvironment().run(self.house.collect)
        assert rest_s == self.town.settings.lifecycle.collect_interval_s


@pytest.fixture
async def site(town: World, client: Client, database_url: str) -> AsyncIterator[Site]:
    """The town with a second machine, and everybody at work."""
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
    """A dump without what others write while a test looks: deliveries, and the scans that they set off."""
    return {table: rows for table, rows in dump.items() if table not in ("outbox", "publication")}


async def test_progress_comes_out_of_heartbeats(site: Site) -> None:
    """What tasks report in heartbeats is the attempt's progress; each checkpoint is one event, however often seen."""
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


async def _is_shown(site: Site, workload: str) -> None:
    """Operators see a placed workload's tenant, region, phase and rank in Temporal."""
    described = await site.client.get_workflow_handle(ids.workload_workflow_id(workload)).describe()
    shown = {p.key.name: p.value for p in described.typed_search_attributes}
    expected: dict[str, object] = {TENANT: "t", REGION: "r", PHASE: "running", PRIORITY: 3}
    assert {name: shown[name] for name in expected} == expected


async def test_a_hung_gang_is_told_once(site: Site) -> None:
    """A gang without any sign of life for longer than it allows is stopped and queued again, and told so once."""
    workload = await site.placed(limits=LimitsSpec(max_silence_s=60))
    agent = site.agent(workload)
    site.town.alter(Attempt, (workload, 1), started_at=text("now() - interval '1 hour'"))
    await agent.beats(workload, step=1, active_at_s=time.time() - 50)
    await site.collect()
    assert site.town.mail(workload, "hung") == []
    await agent.beats(workload, step=1, active_at_s=time.time() - 70)
    await site.mail.aclose()  # the workflow does not hear of it yet
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
    """A gang is hung only if all its tasks are silent: what one machine hears counts for all."""
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
    """Temporal still shows the heartbeats of a machine that was lost: they are of the attempt that ended."""
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
    """Where one workload's workflow cannot be asked the others' progress is taken, and the round counts as failed."""
    workload = await site.placed()
    other = await site.placed()
    for name in (workload, other):
        await site.agent(name).beats(name, step=7)
    describe = site.house._describe

    async def fails(name: str) -> Any:
        if name == ids.workload_workflow_id(workload):
            raise RuntimeError("no answer")
        return await describe(name)

    monkeypatch.setattr(site.house, "_describe", fails)
    with pytest.raises(RuntimeError, match="no answer"):
        await site.collect()
    assert site.town.attempt(other).last_step == 7 and site.town.attempt(workload).last_step is None


# ----------------------------------------------------------------------------------------------------------- reconcile


@pytest.fixture
def house(town: World, client: Client) -> HouseActivities:
    """Housekeeping of the town, without any workflow's worker."""
    return HouseActivities(town.engine, town.settings, client)


def _age(world: World) -> None:
    """Nothing has happened for a while, and all mail was delivered."""
    world.delivered()
    with world.session() as session:
        session.execute(text("update event set at = at - interval '31 seconds'"))


async def _deliver(world: World, url: str, client: Client) -> None:
    await Dispatcher(world.engine, url, client)._deliver_batch()


@pytest.mark.parametrize("placed", [False, True])
async def test_a_workflow_that_is_gone_is_started_anew(
    town: World, house: HouseActivities, client: Client, database_url: str, placed: bool
) -> None:
    """A live workload whose workflow was terminated, or is unknown, gets a new one with the state that Postgres has."""
    terminated = town.running() if placed else town.submit()
    unknown = town.running() if placed else town.submit()
    with town.session() as session:
        session.execute(text("update outbox set delivered_at = now() where workload = :w"), {"w": unknown})
    await _deliver(town, database_url, client)
    _age(town)
    await client.get_workflow_handle(ids.workload_workflow_id(terminated)).terminate()
    await ActivityEnvironment().run(house.reconcile)
    await _deliver(town, database_url, client)
    for workload in (terminated, unknown):
        state = (await told_workload(client, workload)).state
        assert (state["workload_id"], state["attempt"], state["placed"]) == (workload, int(placed), placed)


async def test_who_is_well_is_left_alone(
    town: World, house: HouseActivities, client: Client, database_url: str
) -> None:
    """No workflow is started for a workload whose workflow runs, whose start or mail is on its way, or that ended."""
    runs, starting, told, fresh, ended = (town.submit() for _ in range(5))
    with town.session() as session:
        session.execute(text("update outbox set delivered_at = now() where workload <> :w"), {"w": runs})
    await _deliver(town, database_url, client)
    town.change(ended, Phase.CANCELLED)
    _age(town)
    town.submit(id_=f"{town.prefix}-new")
    town.delivered()
    with town.session() as session:
        session.execute(text("update event set at = now() where workload = :w"), {"w": fresh})
        outbox.start_workload(session, starting)
        outbox.mail(session, told, MailKind.CANCEL, 0, by="x")
    await ActivityEnvironment().run(house.reconcile)
    assert town.put_out("start") == 7
    with town.session() as session:
        due = session.scalars(select(Outbox.workload).where(Outbox.delivered_at.is_(None))).all()
    assert sorted(filter(None, due)) == sorted([starting, told])


async def test_copies_and_a_night_that_are_gone_go_on(town: World, house: HouseActivities) -> None:
    """A copy without its workflow gets a new one, but for what a night copies; so does an open night."""
    town.region("s")
    for table, made_by, state in (("a", "operator", "copying"), ("b", "night", "copying"), ("c", "workload", "ready")):
        town.table(table, 10, "r")
        with town.session() as session:
            session.add(Replica(data_table=table, region="s", state=state, made_by=made_by))
    with town.session() as session:
        begin_night(session, f"{town.prefix}-night", 3600.0, dry_run=False)
    town.delivered()
    await ActivityEnvironment().run(house.reconcile)
    with town.session() as session:
        due = session.execute(
            select(Outbox.kind, Outbox.body).where(Outbox.delivered_at.is_(None)).order_by(Outbox.id)
        ).all()
    told = [(kind, body) for kind, body in due if kind in ("replicate", "night")]
    assert told == [
        ("replicate", {"table": "a", "source": "r", "target": "s", "share": "on demand"}),
        ("night", {"night": f"{town.prefix}-night"}),
    ]


async def test_a_workload_that_is_older_than_its_records(town: World, house: HouseActivities) -> None:
    """A live workload of which nothing was recorded for longer than records are kept is still looked after."""
    workload = town.submit()
    town.delivered()
    town.alter(Workload, workload, submitted_at=text("now() - interval '1 year'"))
    with town.session() as session:
        session.execute(text("delete from event"))
    await ActivityEnvironment().run(house.reconcile)
    with town.session() as session:
        rows = session.scalars(select(Outbox.workload).where(Outbox.delivered_at.is_(None))).all()
    assert rows == [workload]
