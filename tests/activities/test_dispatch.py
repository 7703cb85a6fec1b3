"""The outbox dispatcher on a real Temporal server: in order and at least once, despite outages and refused messages."""

import asyncio
import contextlib
from typing import Any

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.engine import make_url
from temporalio.client import Client
from temporalio.service import RetryConfig

from activities.lifecycle import dispatch
from activities.lifecycle.dispatch import Dispatcher
from domain import ids
from domain.phases import Phase
from domain.protocol.workload_messages import MessageKind
from domain.search_attributes import TENANT
from domain.spec import LimitsSpec
from infra.config.scheduling import SchedulerSettings
from infra.db import outbox
from infra.db.logs import Outbox
from infra.db.models import Workload
from infra.db.session import open_engine
from infra.payloads import DATA_CONVERTER
from infra.stack.ports import free_port
from tests.activities.temporal import Door, dispatching, told, told_workload, undelivered, until
from tests.activities.world import World


@pytest.fixture
def dispatcher(town: World, database_url: str, client: Client) -> Dispatcher:
    """A dispatcher that delivers one batch for each call."""
    return Dispatcher(town.engine, database_url, client)


def _mail(
    world: World, workload: str, kind: MessageKind = MessageKind.CANCEL, attempt: int = 0, **detail: object
) -> None:
    with world.session() as session:
        outbox.message(session, workload, kind, attempt, **detail)


def _put(world: World, kind: str, workload: str | None, body: dict[str, Any]) -> None:
    with world.session() as session:
        session.add(Outbox(kind=kind, workload=workload, body=body))


def _due(world: World) -> list[tuple[str, str | None]]:
    with world.session() as session:
        due = select(Outbox.kind, Outbox.workload).where(Outbox.delivered_at.is_(None)).order_by(Outbox.id)
        rows = session.execute(due)
        return [(kind, workload) for kind, workload in rows]


async def test_start_then_mail_in_order(town: World, dispatcher: Dispatcher, client: Client) -> None:
    """A workload's workflow is started first; then each of its messages is delivered once, in the order of the rows."""
    names = [town.submit() for _ in range(3)]
    for n in range(10):
        for name in names:
            _mail(town, name, MessageKind.PREEMPT, n, by="ada")
    assert await dispatcher._deliver_batch() >= 30
    for name in names:
        found = await told_workload(client, name)
        assert (found.state["workload_id"], found.state["attempt"], found.state["placed"]) == (name, 0, False)
        assert [(m["kind"], m["attempt"], m["detail"]) for m in found.mails] == [
            ("preempt", n, {"by": "ada"}) for n in range(10)
        ]
        assert len({m["id"] for m in found.mails}) == 10
    assert _due(town) == [] and not await dispatcher._deliver_batch()
    assert len((await told_workload(client, names[0])).mails) == 10


async def test_the_tenant_is_a_search_attribute(town: World, dispatcher: Dispatcher, client: Client) -> None:
    """Each workload's workflow starts with its tenant as a search attribute."""
    town.tenant("vision")
    name = town.submit(tenant="vision")
    await dispatcher._deliver_batch()
    described = await client.get_workflow_handle(ids.workload_workflow_id(name)).describe()
    assert {p.key.name: p.value for p in described.typed_search_attributes}[TENANT] == "vision"


async def _all_delivered(town: World, dispatcher: Dispatcher) -> None:
    """Delivers until no row is due; consecutive wakes have a minimum interval."""
    while _due(town):
        await dispatcher._deliver_batch()
        await asyncio.sleep(dispatcher._until_due_s() if _due(town) else 0.0)


async def test_wakes_are_coalesced(town: World, dispatcher: Dispatcher, client: Client) -> None:
    """All due wakes are sent as one signal to the scheduler, which is started if it does not run."""
    for _ in range(40):
        with town.session() as session:
            outbox.wake_scheduler(session)
    await dispatcher._deliver_batch()
    found = await told(client, ids.SCHEDULER_WORKFLOW_ID)
    assert found is not None and found.wakes == 1
    with town.session() as session:
        outbox.wake_scheduler(session)
    await _all_delivered(town, dispatcher)
    found = await told(client, ids.SCHEDULER_WORKFLOW_ID)
    assert found is not None and found.wakes == 2


async def test_wakes_keep_their_interval(town: World, client: Client, database_url: str) -> None:
    """A wake within `wake_interval_s` of the previous one is delayed; other messages are not."""
    dispatcher = Dispatcher(town.engine, database_url, client, scheduler=SchedulerSettings(wake_interval_s=3600))
    for _ in range(2):
        with town.session() as session:
            outbox.wake_scheduler(session)
        await dispatcher._deliver_batch()
    assert _due(town) == [("wake", None)]
    name = town.submit()
    _mail(town, name)
    await dispatcher._deliver_batch()
    assert {kind for kind, _ in _due(town)} == {"wake"}


async def test_a_crash_between_delivery_and_its_mark(
    town: World, dispatcher: Dispatcher, client: Client, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that was delivered but not marked is delivered again with the same id."""
    name = town.submit()
    _mail(town, name)

    def crash(_: list[int]) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(dispatcher, "_mark", crash)
    with pytest.raises(RuntimeError, match="killed"):
        await dispatcher._deliver_batch()
    assert {("start", name), ("mail", name)} <= set(_due(town))
    await Dispatcher(town.engine, database_url, client)._deliver_batch()
    mails = (await told_workload(client, name)).mails
    assert len(mails) == 2 and mails[0] == mails[1]
    assert _due(town) == []


async def test_two_dispatchers_at_once(town: World, client: Client, database_url: str) -> None:
    """Two dispatchers lose no message; messages delivered twice have the same id, and each keeps the order."""
    names = [town.submit() for _ in range(4)]
    async with dispatching(town.engine, database_url, client), dispatching(town.engine, database_url, client):
        for n in range(15):
            for name in names:
                await asyncio.to_thread(_mail, town, name, MessageKind.PREEMPT, n)
        await until(lambda: not undelivered(town.engine), "all messages are delivered")
    for name in names:
        first = dict.fromkeys(m["id"] for m in (await told_workload(client, name)).mails)
        assert list(first) == sorted(first) and len(first) == 15


async def test_mail_to_a_workload_that_has_ended(town: World, dispatcher: Dispatcher, client: Client) -> None:
    """A late message to an ended or deleted workload is dropped and marked delivered, and a late start is ignored."""
    ended, forgotten = town.submit(), town.submit()
    await dispatcher._deliver_batch()
    for name in (ended, forgotten):
        town.change(name, Phase.CANCELLED)
        await client.get_workflow_handle(ids.workload_workflow_id(name)).terminate()
    with town.session() as session:
        session.delete(session.get_one(Workload, forgotten))
        outbox.start_workload(session, ended)
    for name in (ended, forgotten):
        _mail(town, name)
    await _all_delivered(town, dispatcher)
    for name in (ended, forgotten):
        described = await client.get_workflow_handle(ids.workload_workflow_id(name)).describe()
        assert described.status is not None and described.status.name == "TERMINATED"


@pytest.mark.parametrize("placed", [False, True])
async def test_mail_to_a_workflow_that_is_lost(
    town: World, dispatcher: Dispatcher, client: Client, placed: bool
) -> None:
    """If a live workload's workflow is lost, the next message starts a new one from Postgres, and goes to it."""
    name = town.running() if placed else town.submit()
    await dispatcher._deliver_batch()
    await client.get_workflow_handle(ids.workload_workflow_id(name)).terminate()
    _mail(town, name, by="ada")
    await dispatcher._deliver_batch()
    found = await told_workload(client, name)
    assert (found.state["attempt"], found.state["placed"]) == (int(placed), placed)
    assert [m["detail"] for m in found.mails] == [{"by": "ada"}]
    described = await client.get_workflow_handle(ids.workload_workflow_id(name)).describe()
    assert {p.key.name: p.value for p in described.typed_search_attributes}[TENANT] == "t"
    assert _due(town) == []


async def test_workloads_awarded_together_share_a_workflow(town: World, client: Client, database_url: str) -> None:
    """Messages about several first awards on one machine start one workflow; a repeated delivery starts one for each.

    Messages about other awards, and awards with more messages, go to each workload.
    """
    dispatcher = Dispatcher(town.engine, database_url, client)
    names = [town.submit() for _ in range(3)]
    limited = town.submit(limits=LimitsSpec(max_runtime_s=30))
    town.delivered()
    assert town.tick().awarded == 4
    _mail(town, names[2], by="ada")
    with town.session() as session:
        mails = select(func.min(Outbox.id)).where(Outbox.workload.in_(names), Outbox.kind == "mail")
        first = session.execute(mails).scalar_one()
    await dispatcher._deliver_batch()
    shared = await told(client, ids.bundle_workflow_id(first))
    assert shared is not None and shared.state == {"machine": "r/c/m", "workloads": names[:2]}
    own = {name: await told(client, ids.workload_workflow_id(name)) for name in (*names, limited)}
    assert [name for name, found in own.items() if found is not None] == [names[2], limited]
    with town.session() as session:
        session.execute(update(Outbox).values(delivered_at=None))
    await dispatcher._deliver_batch()
    assert (await told_workload(client, names[0])).state["placed"]
    assert _due(town) == []


async def test_a_bundle_that_temporal_refuses(
    town: World, dispatcher: Dispatcher, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its workloads gets a workflow of its own, and no other message waits."""
    names = [town.submit(), town.submit()]
    town.delivered()
    assert town.tick().awarded == 2
    monkeypatch.setattr(ids, "bundle_workflow_id", lambda mail: f"bundle/{mail}/{'x' * 2000}")
    await dispatcher._deliver_batch()
    for name in names:
        assert (await told_workload(client, name)).state["placed"]
    assert _due(town) == []


async def test_a_start_that_comes_twice(town: World, dispatcher: Dispatcher, client: Client) -> None:
    """A second start does not affect the running workflow."""
    name = town.submit()
    with town.session() as session:
        outbox.start_workload(session, name, attempt=4, placed=True)
    await dispatcher._deliver_batch()
    assert (await told_workload(client, name)).state["attempt"] == 0
    assert _due(town) == []


async def test_a_copy_is_started_once(town: World, dispatcher: Dispatcher, client: Client) -> None:
    """Repeated requests for a copy of a table to a region start one workflow."""
    table = f"words-{town.prefix}"
    for _ in range(2):
        with town.session() as session:
            outbox.replicate(session, table, "east", "west")
        await dispatcher._deliver_batch()
    found = await told(client, ids.replica_workflow_id(table, "west"))
    assert found is not None
    assert found.state == {"table": table, "source_region": "east", "target_region": "west", "share": "on demand"}
    assert _due(town) == []


async def test_rows_that_mean_nothing_are_set_aside(
    town: World, dispatcher: Dispatcher, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows with an unknown kind or an invalid body are logged and marked delivered; later rows are delivered."""
    name = town.submit()
    rubbish: list[tuple[str, str | None, dict[str, Any]]] = [
        ("nonsense", None, {}),
        ("nonsense", name, {}),
        ("mail", name, {"kind": "love", "attempt": 0, "detail": {}}),
        ("mail", name, {"kind": "cancel"}),
        ("mail", None, {"kind": "cancel", "attempt": 0, "detail": {}}),
        ("start", None, {}),
        ("replicate", None, {"table": "words"}),
    ]
    for row in rubbish:
        _put(town, *row)
    _mail(town, name, by="ada")
    await dispatcher._deliver_batch()
    assert _due(town) == []
    assert [m["detail"] for m in (await told_workload(client, name)).mails] == [{"by": "ada"}]
    assert len([r for r in caplog.records if "is set aside" in r.getMessage()]) == len(rubbish)


async def test_who_refuses_its_mail_keeps_nobody_else_from_theirs(
    town: World, dispatcher: Dispatcher, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message that Temporal refuses delays later ones to the same workload, but not those to other workloads."""
    monkeypatch.setattr(dispatch, "_BATCH", 20)
    refusing, other = town.submit(), town.submit()
    await dispatcher._deliver_batch()
    _mail(town, refusing, by="x" * (3 << 20))
    for _ in range(30):
        _mail(town, refusing, by="ada")
    _mail(town, other, by="ada")
    for _ in range(3):
        await dispatcher._deliver_batch()
    assert len((await told_workload(client, other)).mails) == 1
    assert (await told_workload(client, refusing)).mails == []
    assert set(_due(town)) == {("mail", refusing)} and len(_due(town)) == 31
    with town.session() as session:
        first = session.scalars(select(Outbox.id).where(Outbox.delivered_at.is_(None)).order_by(Outbox.id)).first()
        session.execute(update(Outbox).where(Outbox.id == first).values(delivered_at=func.now()))
    for rest in dispatcher._resting.values():
        rest.until_s = 0.0
    while await dispatcher._deliver_batch():
        pass
    assert len((await told_workload(client, refusing)).mails) == 30
    assert _due(town) == [] and dispatcher._resting == {}


async def test_rests_grow_and_have_an_end(town: World, dispatcher: Dispatcher) -> None:
    """Refused messages are retried without end, with an exponential backoff of at most 60 s."""
    refusing = town.submit()
    await dispatcher._deliver_batch()
    _mail(town, refusing, by="x" * (3 << 20))
    lengths_s = []
    for _ in range(8):
        await dispatcher._deliver_batch()
        lengths_s.append(dispatcher._resting[refusing].length_s)
        dispatcher._resting[refusing].until_s = 0.0
    assert lengths_s == [1, 2, 4, 8, 16, 32, 60, 60]


async def _outlasts(door: Door, town: World, workload: str) -> None:
    """Shuts the door, writes five messages to a workload, and opens the door again: the messages are then delivered."""
    await until(lambda: not undelivered(town.engine), "the start is delivered")
    await door.shut()
    for n in range(5):
        await asyncio.to_thread(_mail, town, workload, MessageKind.PREEMPT, n)
    await asyncio.sleep(1.0)
    assert undelivered(town.engine) == 5
    await door.open()
    await until(lambda: not undelivered(town.engine), "the messages are delivered")


@pytest.mark.rotating
async def test_temporal_away_loses_nothing(
    town: World, database_url: str, client: Client, temporal_address: str
) -> None:
    """While Temporal is unreachable, messages stay undelivered and in order; they are delivered afterwards."""
    host, _, port = temporal_address.partition(":")
    door = Door((host, int(port)), free_port())
    await door.open()
    through = await Client.connect(
        f"127.0.0.1:{door.port}", data_converter=DATA_CONVERTER, retry_config=RetryConfig(50, max_retries=2)
    )
    name = town.submit()
    async with dispatching(town.engine, database_url, through):
        await _outlasts(door, town, name)
    mails = (await told_workload(client, name)).mails
    assert list(dict.fromkeys(m["attempt"] for m in mails)) == [0, 1, 2, 3, 4]
    await door.shut()


async def test_postgres_away_loses_nothing(town: World, database_url: str, client: Client) -> None:
    """A dispatcher that loses its Postgres connections reconnects, including its listener."""
    url = make_url(database_url)
    door = Door(("127.0.0.1", int(url.port or 0)), free_port())
    await door.open()
    through_url = url.set(port=door.port).render_as_string(hide_password=False)
    engine = open_engine(through_url)
    name = town.submit()
    async with dispatching(engine, through_url, client):
        await _outlasts(door, town, name)
    engine.dispose()
    assert [m["attempt"] for m in (await told_workload(client, name)).mails] == [0, 1, 2, 3, 4]
    await door.shut()


async def test_a_cancelled_dispatcher_leaves_no_connection(town: World, database_url: str, client: Client) -> None:
    """A cancelled dispatcher finishes its transactions before it ends, and then holds no connection."""
    engine = open_engine(database_url)
    _put(town, "wake", None, {})
    with town.session() as session:
        session.execute(select(Outbox).with_for_update())
        task = asyncio.create_task(Dispatcher(engine, database_url, client).run())
        blocked = text("select count(*) from pg_locks where not granted")
        await until(lambda: session.scalar(blocked), "the dispatcher's update waits for the row lock")
        task.cancel()
        await asyncio.wait([task], timeout=0.1)
        assert not task.done()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    engine.dispose()
