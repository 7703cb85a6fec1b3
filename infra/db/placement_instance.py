"""Builds a Tetris instance (MAST 3.2) from a snapshot of the catalogue, the fleet and the usage of tables."""

from collections import defaultdict
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from domain.instance import InstanceRegion, PlacedTable, TetrisInstance, Weights
from infra.config.data import TetrisSettings
from infra.db import models, tables
from infra.db.usage import recurring_jobs
from infra.errors import CatalogueError

HOURS_A_DAY = 24
_FETCHED = 5000
_DEFAULT = TetrisSettings()


def gather(
    session: Session,
    tetris: TetrisSettings = _DEFAULT,
    *,
    now: datetime | None = None,
    window_days: float | None = None,
    move_quota_bytes: float | None = None,
) -> TetrisInstance:
    """Builds the placement problem from the session's transaction, which should be a snapshot (`REPEATABLE READ`).

    GPU hours and CPU hours are means per day. The supply includes cordoned machines, because they return, but no lost
    machines. The replicas are ready replicas of whole tables, including stale ones.

    Args:
        session: the session to read from.
        tetris: the settings of Tetris.
        now: end of the window of usage; by default the start of the transaction.
        window_days: length of the window of usage; by default that of the settings.
        move_quota_bytes: limit on the bytes to copy; None means no limit.

    Raises:
        CatalogueError: there is no region, or a region's `storage_bytes` is not set.
        ValueError: `window_days` is not greater than 0.
    """
    return TetrisInstance(
        regions=_regions(session),
        tables=gather_tables(session),
        jobs=recurring_jobs(
            session, now or transaction_time(session), tetris.window_days if window_days is None else window_days
        ),
        weights=weights_of(tetris),
        home_threshold=tetris.home_threshold,
        move_quota_bytes=move_quota_bytes,
    )


def weights_of(tetris: TetrisSettings) -> Weights:
    """Returns the weights of the objective's terms from the settings."""
    weights = tetris.weights
    by_priority = dict(sorted(weights.by_priority.items()))
    return Weights(weights.read, weights.gpu, weights.storage, weights.overload, by_priority)


def transaction_time(session: Session) -> datetime:
    """Returns when the session's transaction began, the default end of the window of usage."""
    now: datetime = session.execute(select(func.transaction_timestamp())).scalar_one()
    return now


def supply_by_region(session: Session) -> dict[str, dict[str, float]]:
    """Returns for each region the GPU hours per day, by GPU type, of its machines that are not lost."""
    supply: dict[str, dict[str, float]] = defaultdict(dict)
    machine = models.Machine
    slots = (
        select(machine.region, machine.gpu_type, func.sum(machine.gpus))
        .where(machine.state != "lost", machine.gpu_type.is_not(None), machine.gpus > 0)
        .group_by(machine.region, machine.gpu_type)
        .order_by(machine.region, machine.gpu_type)
    )
    for region, gpu_type, gpus in session.execute(slots):
        supply[region][str(gpu_type)] = float(gpus) * HOURS_A_DAY
    return supply


def _regions(session: Session) -> tuple[InstanceRegion, ...]:
    supply = supply_by_region(session)
    rows = session.scalars(select(models.Region).order_by(models.Region.name)).all()
    if not rows:
        raise CatalogueError("regions: there is no region; add one with a bucket first")
    if unsaid := [row.name for row in rows if row.storage_bytes is None]:
        raise CatalogueError(
            f"storage_bytes of region {', '.join(unsaid)}: is not set; set how many bytes of tables the bucket may hold"
            " (mizzen regions set REGION --storage 5PB)"
        )
    return tuple(
        InstanceRegion(
            row.name, float(row.storage_bytes or 0), supply.get(row.name, {}), dict(sorted(row.cpu_hours.items()))
        )
        for row in rows
    )


def gather_tables(session: Session) -> tuple[PlacedTable, ...]:
    """Returns all tables, sorted by name, each with the regions other than its home that have a usable replica.

    A usable replica is ready, of the whole table, and not marked wrong.
    """
    table, replica = tables.Table, tables.Replica
    elsewhere = (
        select(replica.data_table, func.array_agg(replica.region).label("regions"))
        .join(table, table.name == replica.data_table)
        .where(
            replica.state == "ready", replica.whole, replica.wrong_since.is_(None), replica.region != table.home_region
        )
        .group_by(replica.data_table)
        .subquery()
    )
    statement = (
        select(table.name, table.size_bytes, table.home_region, elsewhere.c.regions)
        .outerjoin(elsewhere, elsewhere.c.data_table == table.name)
        .order_by(table.name.collate("C"))
        .execution_options(yield_per=_FETCHED)
    )
    return tuple(
        PlacedTable(name, float(size_bytes), home, tuple(sorted(regions or ())))
        for name, size_bytes, home, regions in session.execute(statement)
    )
