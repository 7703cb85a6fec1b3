"""Workflows whose state differs from that of the database, and which reconciliation tells or replaces."""

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import select, text
from temporalio.client import Client, WorkflowExecutionStatus

from activities.lifecycle.dispatch import Dispatcher
from activities.lifecycle.reconcile import Reconciler
from activities.lifecycle.workload_start import read_start, start_workflow
from domain import ids
from domain.phases import Phase
from domain.protocol.mail import MailKind
from infra.config.settings import Settings
from infra.db import outbox
from infra.db.logs import Outbox
from infra.db.models import Workload
from tests.activities.temporal import told_workload
from tests.activities.world import World


def _patient(world: World, **changes: float) -> Settings:
    """Returns settings under which every difference is due immediately and each round lists all workflows."""
    reconcile = world.settings.reconcile.model_copy(update={"disagree_s": 0.0, "sweep_s": 0.0, **changes})
    return world.settings.model_copy(update={"reconcile": reconcile})


@pytest.fixture
def reconciler(town: World, client: Client) -> Reconciler:
    """The reconciler of the town, without a worker."""
    return Reconciler(town.engine, _patient(town), client)


def _age(world: World) -> None:
    """Moves all events and mail 30 s into the past and marks all mail delivered."""
    world.delivered()
    with world.session() as session:
        session.execute(text("update event set at = at - interval '31 seconds'"))
        session.execute(text("update workload set submitted_at = submitted_at - interval '31 seconds'"))
        aged = "created_at = created_at - interval '31 seconds', delivered_at = delivered_at - interval '30 seconds'"
        session.execute(text(f"update outbox set {aged}"))


def _due(world: World, kind: str) -> list[str | None]:
    with world.session() as session:
        rows = select(Outbox.workload).where(Outbox.delivered_at.is_(None), Outbox.kind == kind).order_by(Outbox.id)
        return list(session.scalars(rows))


async def _deliver(world: World, url: str, client: Client) -> None:
    await Dispatcher(world.engine, url, client)._deliver_batch()


async def _listed(client: Client, query: str, count: int) -> None:
    """Waits until Temporal's listing, which lags, shows this many workflows."""
    give_up_s = asyncio.get_running_loop().time() + 20
    while (await client.count_workflows(query)).count != count:
        assert asyncio.get_running_loop().time() < give_up_s, query
        await asyncio.sleep(0.05)


async def test_who_is_well_is_left_alone(
    town: World, reconciler: Reconciler, client: Client, database_url: str
) -> None:
    """No workflow is started if one runs, if its start or mail is pending, or if the workload has ended."""
    runs, starting, told, ended = (town.submit() for _ in range(4))
    with town.session() as session:
        session.execute(text("update outbox set delivered_at = now() where workload <> :w"), {"w": runs})
    await _deliver(town, database_url, client)
    town.change(ended, Phase.CANCELLED)
    _age(town)
    with town.session() as session:
        outbox.start_workload(session, starting)
        outbox.mail(session, told, MailKind.CANCEL, 0, by="x")
    await _listed(client, f"WorkflowId = '{ids.workload_workflow_id(runs)}' AND ExecutionStatus = 'Running'", 1)
    await reconciler.round()
    assert (_due(town, "start"), _due(town, "mail")) == ([starting], [told])


async def test_a_fresh_workload_is_not_suspected(town: World, client: Client) -> None:
    """A workload that changed recently gets no new workflow even if none is listed, because listings lag."""
    town.submit()
    town.delivered()
    await Reconciler(town.engine, _patient(town, disagree_s=30.0), client).round()
    assert _due(town, "start") == []


async def _believes(world: World, client: Client, workload: str, change: Callable[[Workload], None]) -> None:
    """Starts a workload's workflow from a changed row, which is then rolled back; no worker runs the workflow."""
    with world.session() as session:
        change(session.get_one(Workload, workload))
        session.flush()
        start = read_start(session, workload)
        session.rollback()
    assert start is not None
    await start_workflow(client, start)


def _behind(row: Workload) -> None:
    row.phase, row.attempt, row.region = "pending", 0, None


def _ahead(row: Workload) -> None:
    row.attempt = 7


@pytest.mark.parametrize("believed", [_behind, _ahead])
async def test_a_workflow_that_was_rolled_back_is_told_again_and_then_replaced(
    town: World, reconciler: Reconciler, client: Client, database_url: str, believed: Callable[[Workload], None]
) -> None:
    """A workflow that differs from its row gets its mail again; if it still differs, a new workflow replaces it."""
    workload = town.running()
    await _believes(town, client, workload, believed)
    _age(town)
    handle = client.get_workflow_handle(ids.workload_workflow_id(workload))
    before = (await handle.describe()).run_id
    await reconciler.round()
    assert set(_due(town, "mail")) == {workload} and _due(town, "start") == []
    await _deliver(town, database_url, client)
    told = await told_workload(client, workload)
    assert [m["kind"] for m in told.mails] == ["awarded"]
    _age(town)
    for _ in range(2):
        await reconciler.round()
    await _deliver(town, database_url, client)
    assert (await handle.describe()).run_id != before
    state = (await told_workload(client, workload)).state
    assert (state["attempt"], state["placed"], state["ready"]) == (1, True, True)


async def test_a_workflow_that_agrees_is_not_touched(
    town: World, reconciler: Reconciler, client: Client, database_url: str
) -> None:
    """A workflow that matches its row gets no mail and is not restarted, in any number of rounds."""
    workload = town.running()
    await _believes(town, client, workload, lambda _: None)
    _age(town)
    await _listed(client, f"WorkflowId = '{ids.workload_workflow_id(workload)}' AND MizzenPhase = 'running'", 1)
    for _ in range(3):
        await reconciler.round()
    assert (_due(town, "mail"), _due(town, "start")) == ([], [])


async def test_a_workflow_whose_workload_has_ended_is_terminated(
    town: World, reconciler: Reconciler, client: Client
) -> None:
    """If a rollback restores the workflow of an ended workload, the workflow is terminated."""
    workload = town.running()
    await _believes(town, client, workload, lambda _: None)
    town.delivered()
    town.change(workload, Phase.SUCCEEDED)
    await _listed(client, f"WorkflowId = '{ids.workload_workflow_id(workload)}' AND MizzenPhase = 'running'", 1)
    await reconciler.round()
    found = await client.get_workflow_handle(ids.workload_workflow_id(workload)).describe()
    assert found.status is WorkflowExecutionStatus.TERMINATED


@pytest.mark.parametrize("kind", [MailKind.CANCEL, MailKind.EVICT, MailKind.SLOTS_READY])
async def test_mail_without_effect_is_delivered_again_less_and_less_often(
    town: World, client: Client, kind: MailKind
) -> None:
    """Delivered mail without effect is delivered again with exponential backoff, until it has an effect."""
    workload = town.running()
    if kind is MailKind.SLOTS_READY:
        with town.session() as session:
            session.get_one(Workload, workload).phase = "placing"
    town.delivered()
    with town.session() as session:
        outbox.mail(session, workload, kind, 0 if kind is MailKind.CANCEL else 1)
    house = Reconciler(town.engine, _patient(town, disagree_s=30.0), client)

    def delivered(created_s: float, delivered_s: float) -> None:
        with town.session() as session:
            session.execute(
                text(
                    "update outbox set created_at = now() - make_interval(secs => :c),"
                    " delivered_at = now() - make_interval(secs => :d) where body ->> 'kind' = :k"
                ),
                {"c": created_s, "d": delivered_s, "k": kind.value},
            )

    again = []
    for created_s, delivered_s in ((21, 20), (41, 40), (100, 40), (200, 140)):
        delivered(created_s, delivered_s)
        await house.round()
        again.append(_due(town, "mail") == [workload])
    assert again == [False, True, False, True]
    delivered(41, 40)
    with town.session() as session:
        session.execute(text("update workload set phase = 'succeeded', finished_at = now()"))
    await house.round()
    assert _due(town, "mail") == []
