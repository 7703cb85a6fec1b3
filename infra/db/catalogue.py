"""The catalogue of tables: where tables can be read, how stale their replicas are, and requests for replicas.

Triggers in the database enforce its invariants (`functions/catalogue.sql`).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeAlias

from sqlalchemy import and_, func, or_, select, text
from sqlalchemy.orm import Session

from domain.instance import HIGH_PRIORITY
from infra.db import events, outbox
from infra.db.models import Region, Workload
from infra.db.tables import Partition, Replica, ReplicaPartition, Table
from infra.errors import CatalogueError

Replicas: TypeAlias = Mapping[str, Mapping[str, datetime | None]]
"""For each table the regions with a replica of the whole table, each with `stale_since` (None if it is complete)."""


def ready_replicas(session: Session, tables: Collection[str]) -> Replicas:
    """Returns the regions in which each table can be read completely: ready replicas without copies marked wrong.

    The home is included.
    """
    out: dict[str, dict[str, datetime | None]] = {table: {} for table in tables}
    if out:
        usable = (
            Replica.data_table.in_(sorted(out)),
            Replica.state == "ready",
            Replica.whole,
            Replica.wrong_since.is_(None),
        )
        found = select(Replica.data_table, Replica.region, Replica.stale_since).where(*usable)
        for table, region, stale_since in session.execute(found):
            out[table][region] = stale_since
    return out


def can_read(replicas: Replicas, tables: Iterable[str], region: str, *, level: int) -> bool:
    """Whether a workload of this level can read all its tables in `region`.

    A workload of high priority needs complete replicas (MAST 3.5); others may read stale ones.
    """
    return all(
        region in replicas[table] and (level > HIGH_PRIORITY or replicas[table][region] is None) for table in tables
    )


def lacking(session: Session, table: str, region: str, *, limit: int) -> list[Partition]:
    """Returns the partitions that a replica lacks or whose copy is marked wrong, in the order of their appending.

    A replica of the whole table must have all partitions; a partial one those with rows in `replica_partition`.
    """
    held = ReplicaPartition.data_table == Partition.data_table, ReplicaPartition.partition == Partition.name
    statement = (
        select(Partition)
        .join(Replica, Replica.data_table == Partition.data_table)
        .outerjoin(ReplicaPartition, and_(*held, ReplicaPartition.region == Replica.region))
        .where(Replica.data_table == table, Replica.region == region)
        .where(or_(ReplicaPartition.ready_at.is_(None), ReplicaPartition.wrong.is_not(None)))
        .where(or_(Replica.whole, ReplicaPartition.partition.is_not(None)))
        .order_by(Partition.created_at, Partition.name)
        .limit(limit)
    )
    return list(session.scalars(statement))


def held_bytes(session: Session, table: str, region: str) -> int:
    """Returns the total size of the partitions that a replica has."""
    held = ReplicaPartition.data_table == Partition.data_table, ReplicaPartition.partition == Partition.name
    statement = (
        select(func.coalesce(func.sum(Partition.size_bytes), 0))
        .join(ReplicaPartition, and_(*held))
        .where(Partition.data_table == table, ReplicaPartition.region == region, ReplicaPartition.ready_at.is_not(None))
    )
    return int(session.execute(statement).scalar_one())


@dataclass(frozen=True)
class NoRoom:
    """A region without enough storage for a planned copy. `str()` is a message with the figures."""

    region: str
    stored_bytes: int
    """Bytes of replicas in the region, including those being copied and those in their grace."""
    more_bytes: int
    storage_bytes: int

    def __str__(self) -> str:
        over = self.stored_bytes + self.more_bytes - self.storage_bytes
        unit = "byte" if over == 1 else "bytes"
        return (
            f"{self.region} would hold {over:,} {unit} more than its storage: it stores {self.stored_bytes:,} of"
            f" {self.storage_bytes:,}, and {self.more_bytes:,} would be added"
        )


class StorageFull(CatalogueError):
    """A region does not have enough storage for a replica."""


def no_room(session: Session, region: str, more_bytes: int, *, lock: bool = False) -> NoRoom | None:
    """Checks whether `more_bytes` fit into a region's storage. Returns None if they fit, or if the region's storage has
    no limit; else the sizes that show that they do not.

    `lock` locks the region's row, so that concurrent transactions that add data there wait for the end of this one. The
    lock must be taken before locks of tables.
    """
    row = session.get(Region, region, with_for_update={"key_share": True} if lock else None)
    if row is None or row.storage_bytes is None or more_bytes <= 0:
        return None
    stored = int(session.execute(_STORED, {"region": region}).scalar_one())
    return NoRoom(region, stored, more_bytes, row.storage_bytes) if stored + more_bytes > row.storage_bytes else None


def whole_bytes(session: Session, tables: Collection[str], region: str) -> int:
    """Returns how many bytes complete replicas of these tables in a region would add to what is stored there now."""
    return int(session.execute(_WHOLE, {"region": region, "tables": sorted(tables)}).scalar_one())


_STORED = text("""
    select coalesce((select sum(t.size_bytes) from replica as r join data_table as t on t.name = r.data_table
                     where r.region = :region and r.whole), 0)
        + coalesce((select sum(p.size_bytes) from replica as r join replica_partition as h using (data_table, region)
                        join data_partition as p on p.data_table = h.data_table and p.name = h.partition
                    where r.region = :region and not r.whole), 0)
""")
_WHOLE = text("""
    select coalesce(sum(t.size_bytes - coalesce(
        (select sum(p.size_bytes) from replica_partition as h
             join data_partition as p on p.data_table = h.data_table and p.name = h.partition
         where h.data_table = t.name and h.region = :region), 0)), 0)
    from data_table as t left join replica as r on r.data_table = t.name and r.region = :region
    where t.name = any(:tables) and r.whole is not true
""")


def want_replica(
    session: Session,
    table: str,
    region: str,
    *,
    fresh: bool = False,
    workload: Workload | None = None,
    placement_run: str | None = None,
    **detail: object,
) -> Replica | None:
    """Returns the replica of a whole table in a region, and starts its copy from the home if it is missing.

    A stale replica is sufficient, unless `fresh` is set. Then its missing partitions are copied (a top-up), and it can
    be read meanwhile. A replica that is being deleted is restored, possibly stale, if its grace is not over; after the
    grace it is returned unchanged.

    Args:
        session: the session whose transaction writes the replica.
        table: the table's name.
        region: the region.
        fresh: whether a stale replica must be topped up.
        workload: the workload that needs the replica, if any. If a nightly run is copying the replica, the copy is also
            started on demand, so that the workload does not wait for the run.
        placement_run: the nightly run that requests the replica and copies it itself, if any.
        **detail: more values for the event of the copy.

    Returns:
        The replica, or None if the table does not exist.

    Raises:
        StorageFull: the region does not have enough storage.
    """
    row = session.get(Replica, (table, region))
    if row is not None and _is_enough(row, fresh):
        if (
            row.state == "copying"
            and row.made_by == "placement_run"
            and workload is not None
            and row.requested_by is None
        ):
            row.requested_by = workload.id
            outbox.replicate(session, table, row.source_region or "", region)
        return row
    full = no_room(session, region, whole_bytes(session, [table], region), lock=True)
    if full is not None:
        raise StorageFull(str(full))
    known = session.get(Table, table, with_for_update=True)  # Every transaction that adds a replica takes this lock.
    if known is None:
        return None
    row = session.get(Replica, (table, region), with_for_update=True, populate_existing=True)
    if row is not None and row.state == "deleting" and not _taken_back(session, row, **detail):
        return row
    if row is not None and (_is_enough(row, fresh) or (placement_run is not None and row.stale_since is not None)):
        return row
    if row is None:
        row = Replica(data_table=table, region=region)
        session.add(row)
    wanted_by = None if workload is None else workload.id
    if row.stale_since is None:
        row.whole, row.state, row.ready_at = True, "copying", None
        row.requested_by = wanted_by
        row.made_by = "placement_run" if placement_run is not None else "operator" if workload is None else "workload"
    else:
        row.topping_up, row.topped_up_for = True, wanted_by
    row.source_region = known.home_region
    session.flush()
    session.refresh(row)
    if placement_run is None:
        outbox.replicate(session, table, known.home_region, region)
    events.record(
        session,
        "replica.copying" if row.state == "copying" else "replica.topping_up",
        tenant=None if workload is None else workload.tenant,
        workload=None if workload is None else workload.id,
        region=region,
        detail={"table": table, "source": known.home_region, **detail},
    )
    return row


def want_partitions(
    session: Session, table: str, region: str, partitions: Collection[str], placement_run: str
) -> Replica | None:
    """Returns a region's replica, with these partitions added to it. The nightly run `placement_run` copies them.

    Partitions that do not exist any more are skipped. A replica whose grace is over is returned unchanged. Returns None
    if the table does not exist.
    """
    known = session.get(Table, table, with_for_update=True)
    if known is None:
        return None
    row = session.get(Replica, (table, region), with_for_update=True, populate_existing=True)
    if row is not None and row.state == "deleting":
        if not _taken_back(session, row, placement_run=placement_run):
            return row
        if row.ready_at is None:
            row.state = "copying"
    if row is not None and row.whole:
        return row
    if row is None:
        row = Replica(data_table=table, region=region, whole=False, state="copying", made_by="placement_run")
        row.source_region = known.home_region
        session.add(row)
        events.record(
            session, "replica.copying", region=region, detail={"table": table, "placement_run": placement_run}
        )
    session.flush()
    held = ReplicaPartition.data_table == table, ReplicaPartition.region == region
    there = set(session.scalars(select(ReplicaPartition.partition).where(*held)))
    asked = Partition.data_table == table, Partition.name.in_(sorted(set(partitions) - there))
    for name in session.scalars(select(Partition.name).where(*asked)):
        session.add(ReplicaPartition(data_table=table, partition=name, region=region))
    session.flush()
    return row


def drop_replica(session: Session, table: str, region: str, *, grace_s: float, **detail: object) -> Replica | None:
    """Marks a replica for deletion: no new job reads it, and its objects are deleted after `grace_s`.

    It can be restored until then. A replica whose grace is over is returned unchanged. `detail` is added to the event.
    Returns None if the replica does not exist.

    Raises:
        CatalogueError: the region is the table's home.
    """
    known = session.get(Table, table, with_for_update=True)
    row = session.get(Replica, (table, region), with_for_update=True, populate_existing=True)
    if known is None or row is None:
        return None
    if known.home_region == region:
        raise CatalogueError(f"region {region} is the home of table {table}, so its replica cannot be dropped")
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    if row.delete_at is None or row.delete_at > now:
        row.state, row.delete_at = "deleting", now + timedelta(seconds=grace_s)
        said = {"table": table, "delete_at": row.delete_at.isoformat(), **detail}
        events.record(session, "replica.deleting", region=region, detail=said)
    return row


def _taken_back(session: Session, row: Replica, **detail: object) -> bool:
    """Restores a replica that is being deleted. Returns False if its grace is over.

    A replica that was complete becomes ready again. For one that was not, the caller must continue the copy.
    """
    now = session.execute(select(func.clock_timestamp())).scalar_one()
    if row.delete_at is None or row.delete_at <= now:
        return False
    row.delete_at = None
    if row.ready_at is not None:
        # The request to delete it has also ended its top-up.
        row.state, row.topping_up = "ready", False
        session.flush()
        events.record(session, "replica.kept", region=row.region, detail={"table": row.data_table, **detail})
        outbox.wake_scheduler(session)
    return True


def _is_enough(row: Replica, fresh: bool) -> bool:
    """Whether the replica provides, or will provide, the whole table, so that no copy needs to be started."""
    comes = row.state == "copying" or row.stale_since is None or row.topping_up
    return row.whole and row.state != "deleting" and (comes or not fresh)
