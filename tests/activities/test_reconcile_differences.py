"""Workflows whose state differs from that of the database, and which reconciliation tells or replaces."""

from collections.abc import Callable

import pytest
from sqlalchemy import text
from temporalio.client import Client, WorkflowExecutionStatus

from activities.lifecycle.reconcile import Reconciler
from activities.lifecycle.workload_start import read_start, start_workflow
from domain import ids
from domain.phases import Phase
from domain.protocol.workload_messages import MessageKind
from infra.db import outbox
from infra.db.models import Workload
from tests.activities.reconciling import age, deliver, due, listed, patient
from tests.activities.temporal import told_workload
from tests.activities.world import World


@pytest.fixture
def reconciler(town: World, client: Client) -> Reconciler:
    """The reconciler of the town, without a worker."""
    return Reconciler(town.engine, patient(town), client)


async def test_who_is_well_is_left_alone(
    town: World, reconciler: Reconciler, client: Client, database_url: str
) -> None:
    """No workflow is started if one runs, if its start or a message is pending, or if the workload has ended."""
    runs, starting, told, ended = (town.submit() for _ in range(4))
    with town.session() as session:
        session.execute(text("update outbox set delivered_at = now() where workload <> :w"), {"w": runs})
    await deliver(town, database_url, client)
    town.change(ended, Phase.CANCELLED)
    age(town)
    with town.session() as session:
        outbox.start_workload(session, starting)
        outbox.message(session, told, MessageKind.CANCEL, 0, by="x")
    await listed(client, f"WorkflowId = '{ids.workload_workflow_id(runs)}' AND ExecutionStatus = 'Running'", 1)
    await reconciler.round()
    assert (due(town, "start"), due(town, "mail")) == ([starting], [told])


async def test_a_fresh_workload_is_not_suspected(town: World, client: Client) -> None:
    """A workload that changed recently gets no new workflow even if none is listed, because listings lag."""
    town.submit()
    town.delivered()
    await Reconciler(town.engine, patient(town, disagree_s=30.0), client).round()
    assert due(town, "start") == []


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
    """A workflow that differs from its row gets its messages again; if it still differs, a new workflow replaces it."""
    workload = town.running()
    await _believes(town, client, workload, believed)
    age(town)
    handle = client.get_workflow_handle(ids.workload_workflow_id(workload))
    before = (await handle.describe()).run_id
    await reconciler.round()
    assert set(due(town, "mail")) == {workload} and due(town, "start") == []
    await deliver(town, database_url, client)
    told = await told_workload(client, workload)
    assert [m["kind"] for m in told.mails] == ["awarded"]
    age(town)
    for _ in range(2):
        await reconciler.round()
    await deliver(town, database_url, client)
    assert (await handle.describe()).run_id != before
    state = (await told_workload(client, workload)).state
    assert (state["attempt"], state["placed"], state["ready"]) == (1, True, True)


async def test_a_workflow_that_agrees_is_not_touched(
    town: World, reconciler: Reconciler, client: Client, database_url: str
) -> None:
    """A workflow that matches its row gets no message and is not restarted, in any number of rounds."""
    workload = town.running()
    await _believes(town, client, workload, lambda _: None)
    age(town)
    await listed(client, f"WorkflowId = '{ids.workload_workflow_id(workload)}' AND MizzenPhase = 'running'", 1)
    for _ in range(3):
        await reconciler.round()
    assert (due(town, "mail"), due(town, "start")) == ([], [])


async def test_a_workflow_whose_workload_has_ended_is_terminated(
    town: World, reconciler: Reconciler, client: Client
) -> None:
    """If a rollback restores the workflow of an ended workload, the workflow is terminated."""
    workload = town.running()
    await _believes(town, client, workload, lambda _: None)
    town.delivered()
    town.change(workload, Phase.SUCCEEDED)
    await listed(client, f"WorkflowId = '{ids.workload_workflow_id(workload)}' AND MizzenPhase = 'running'", 1)
    await reconciler.round()
    found = await client.get_workflow_handle(ids.workload_workflow_id(workload)).describe()
    assert found.status is WorkflowExecutionStatus.TERMINATED


@pytest.mark.parametrize("kind", [MessageKind.CANCEL, MessageKind.EVICT, MessageKind.SLOTS_READY])
async def test_mail_without_effect_is_delivered_again_less_and_less_often(
    town: World, client: Client, kind: MessageKind
) -> None:
    """Delivered messages without effect are delivered again with exponential backoff, until they have an effect."""
    workload = town.running()
    if kind is MessageKind.SLOTS_READY:
        with town.session() as session:
            session.get_one(Workload, workload).phase = "placing"
    town.delivered()
    with town.session() as session:
        outbox.message(session, workload, kind, 0 if kind is MessageKind.CANCEL else 1)
    house = Reconciler(town.engine, patient(town, disagree_s=30.0), client)

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
        again.append(due(town, "mail") == [workload])
    assert again == [False, True, False, True]
    delivered(41, 40)
    with town.session() as session:
        session.execute(text("update workload set phase = 'succeeded', finished_at = now()"))
    await house.round()
    assert due(town, "mail") == []
