"""Helpers of the tests of reconciliation: settings, messages and Temporal's listing."""

import asyncio

from sqlalchemy import select, text
from temporalio.client import Client

from activities.lifecycle.dispatch import Dispatcher
from infra.config.settings import Settings
from infra.db.logs import Outbox
from tests.activities.world import World


def patient(world: World, **changes: float) -> Settings:
    """Returns settings under which every difference is due immediately and each round lists all workflows."""
    reconcile = world.settings.reconcile.model_copy(update={"disagree_s": 0.0, "sweep_s": 0.0, **changes})
    return world.settings.model_copy(update={"reconcile": reconcile})


def age(world: World) -> None:
    """Moves all events and messages 30 s into the past and marks all messages delivered."""
    world.delivered()
    with world.session() as session:
        session.execute(text("update event set at = at - interval '31 seconds'"))
        session.execute(text("update workload set submitted_at = submitted_at - interval '31 seconds'"))
        aged = "created_at = created_at - interval '31 seconds', delivered_at = delivered_at - interval '30 seconds'"
        session.execute(text(f"update outbox set {aged}"))


def due(world: World, kind: str) -> list[str | None]:
    """Returns the workloads with undelivered messages of a kind, oldest first."""
    with world.session() as session:
        rows = select(Outbox.workload).where(Outbox.delivered_at.is_(None), Outbox.kind == kind).order_by(Outbox.id)
        return list(session.scalars(rows))


async def deliver(world: World, url: str, client: Client) -> None:
    """Delivers all messages that are due."""
    await Dispatcher(world.engine, url, client)._deliver_batch()


async def listed(client: Client, query: str, count: int) -> None:
    """Waits until Temporal's listing, which lags, shows this many workflows."""
    give_up_s = asyncio.get_running_loop().time() + 20
    while (await client.count_workflows(query)).count != count:
        assert asyncio.get_running_loop().time() < give_up_s, query
        await asyncio.sleep(0.05)
