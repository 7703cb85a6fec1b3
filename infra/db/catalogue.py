"""The catalogue of tables: where they can be read, how stale their replicas are, and asking for a replica.

What must always hold of it the database keeps by itself (`migrations/0005_catalogue.sql`).
"""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import and_, exists, func, or_, select
from sqlalchemy.orm import Session

from infra.db import events, outbox
from infra.db.models import Partition, Replica, ReplicaPartition, Table, Workload


def ready_replicas(session: Session, tables: Collection[str]) -> dict[str, frozenset[str]]:
    """For each of `tables`, the regions that have a replica of the whole table, the home among them."""
    out: dict[str, set[str]] = {table: set() for table in tables}
    if out:
        usable = Replica.data_table.in_(sorted(out)), Replica.state == "ready", Replica.whole
        for table, region in session.execute(select(Replica.data_table, Replica.region).where(*usable)):
            out[table].add(region)
    return {table: frozenset(regions) for table, regions in out.items()}


def missing_since(session: Session, tables: Collection[str]) -> dict[tuple[str, str], datetime]:
    """For each (table, region) of a whole replica that is stale, when the first partition was appended that it lacks.

    It is complete as of any time before. A replica that is not here lacks nothing, as none at home does.
    """
    has = exists().where(
        ReplicaPartition.data_table == Replica.data_table,
        ReplicaPartition.partition == Partition.name,
        ReplicaPartition.region == Replica.region,
        ReplicaPartition.ready_at.is_not(None),
    )
    statement = (
        select(Replica.data_table, Replica.region, func.min(Partition.created_at))
        .join(Partition, Partition.data_table == Replica.data_table)
        .where(Replica.data_table.in_(sorted(tables)), Replica.whole, Replica.state != "copying", ~has)
        .group_by(Replica.data_table, Replica.region)
    )
    return {(table, region): since for table, region, since in session.execute(statement)}


def lacking(session: Session, table: str, region: str, *, limit: int) -> list[Partition]:
    """Partitions that a replica is to have and has not, in the order of their appending.

    Of a replica of the whole table those are any; else those whose rows in `replica_partition` are not ready.
    """
    held = ReplicaPartition.data_table == Partition.data_table, ReplicaPartition.partition == Partition.name
    statement = (
        select(Partition)
        .join(Replica, Replica.data_table == Partition.data_table)
        .outerjoin(ReplicaPartition, and_(*held, ReplicaPartition.region == Replica.region))
        .where(Replica.data_table == table, Replica.region == region, ReplicaPartition.ready_at.is_(None))
        .where(or_(Replica.whole, ReplicaPartition.partition.is_not(None)))
        .order_by(Partition.created_at, Partition.name)
        .limit(limit)
    )
    return list(session.scalars(statement))


def held_bytes(session: Session, table: str, region: str) -> int:
    """Bytes of the partitions that a replica has."""
    held = ReplicaPartition.data_table == Partition.data_table, ReplicaPartition.partition == Partition.name
    statement = (
        select(func.coalesce(func.sum(Partition.size_bytes), 0))
        .join(ReplicaPartition, and_(*held))
        .where(Partition.data_table == table, ReplicaPartition.region == region, ReplicaPartition.ready_at.is_not(None))
    )
    return int(session.execute(statement).scalar_one())


def want_replica(
    session: Session, table: str, region: str, *, workload: Workload | None = None, **detail: object
) -> Replica | None:
    """The replica of a whole table in a region; where there is none, its copy from home is started, for `workload`.

    One that is being deleted and still has its objects is taken back, as stale as it is; one whose time is over stays
    as it is. `detail` goes into the event of a copy. None: there is no such table.
    """
    row = session.get(Replica, (table, region))
    if row is not None and row.state != "deleting" and row.whole:
        return row
    known = session.get(Table, table, with_for_update=True)  # as everyone does who adds a replica
    if known is None:
        return None
    row = session.get(Replica, (table, region), with_for_update=True)
    if row is not None and row.state == "deleting":
        now = session.execute(select(func.clock_timestamp())).scalar_one()
        if row.delete_at is None or row.delete_at <= now:
            return row
        row.state, row.delete_at = "ready", None
        session.flush()
        events.record(session, "replica.kept", region=region, detail={"table": table, **detail})
        outbox.wake_scheduler(session)
    if row is not None and row.whole:
        return row
    if row is None:
        row = Replica(data_table=table, region=region)
        session.add(row)
    row.whole, row.state, row.done_bytes = True, "copying", 0
    row.source_region = known.home_region
    row.requested_by = None if workload is None else workload.id
    session.flush()
    session.refresh(row)
    outbox.replicate(session, table, known.home_region, region)
    events.record(
        session,
        "replica.copying",
        tenant=None if workload is None else workload.tenant,
        workload=None if workload is None else workload.id,
        region=region,
        detail={"table": table, "source": known.home_region, **detail},
    )
    return row
