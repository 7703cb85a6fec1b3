"""The catalogue of tables: where they can be read, how stale their replicas are, and asking for a replica.

What must always hold of it the database keeps by itself (`migrations/0005_catalogue.sql`).
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
"""Table to the regions that have a replica of all of it, each with since when that is stale (None: it is complete)."""


def ready_replicas(session: Session, tables: Collection[str]) -> Replicas:
    """For each of `tables`, where it can be read whole, the home among them; not where it is known to be wrong."""
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
    """Whether a workload of this level finds its tables in a region: of high priority, complete ones (MAST 3.5)."""
    return all(
        region in replicas[table] and (level > HIGH_PRIORITY or replicas[table][region] is None) for table in tables
    )


def lacking(session: Session, table: str, region: str, *, limit: int) -> list[Partition]:
    """Partitions that a replica is to have and has not, or has wrong, in the order of their appending.

    Of a replica of the whole table those are any; else those whose rows in `replica_partition` are not ready.
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
    """Bytes of the partitions that a replica has."""
    held = ReplicaPartition.data_table == Partition.data_table, ReplicaPartition.partition == Partition.name
    statement = (
        select(func.coalesce(func.sum(Partition.size_bytes), 0))
        .join(ReplicaPartition, and_(*held))
        .where(Partition.data_table == table, ReplicaPartition.region == region, ReplicaPartition.ready_at.is_not(None))
    )
    return int(session.execute(statement).scalar_one())


@dataclass(frozen=True)
class NoRoom:
    """A region whose storage does not take what is to be brought there; `str()` says so with the figures."""

    region: str
    stored_bytes: int
    """Of tables, copies that are being made and those in their grace included."""
    more_bytes: int
    storage_bytes: int

    def __str__(self) -> str:
        over = self.stored_bytes + self.more_bytes - self.storage_bytes
        unit = "byte" if over == 1 else "bytes"
        return (
            f"{self.region} would hold {over:,} {unit} more than its storage: it stores {self.stored_bytes:,} of"
            f" {self.storage_bytes:,}, and {self.more_bytes:,} would come"
        )


class StorageFull(CatalogueError):
    """A region's storage does not take a replica."""


def no_room(session: Session, region: str, more_bytes: int, *, lock: bool = False) -> NoRoom | None:
    """Why so many bytes more do not fit into a region; None: they do, or nobody has said what it may hold.

    `lock`: others who bring something there wait until this transaction ends. Taken before the locks of tables.
    """
    row = session.get(Region, region, with_for_update={"key_share": True} if lock else None)
    if row is None or row.storage_bytes is None or more_bytes <= 0:
        return None
    stored = int(session.execute(_STORED, {"region": region}).scalar_one())
    return NoRoom(region, stored, more_bytes, row.storage_bytes) if stored + more_bytes > row.storage_bytes else None


def whole_bytes(session: Session, tables: Collection[str], region: str) -> int:
    """Bytes that replicas of all of these tables in a region would store more than what is stored there now."""
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
    night: str | None = None,
    **detail: object,
) -> Replica | None:
    """The replica of a whole table in a region; where there is none, its copy from home is started, for `workload`.

    A stale one is enough, unless it is to be `fresh`: then it is topped up, and can be read meanwhile. A `night` copies
    by itself. A workload that wants what a night copies does not wait for the night: it is copied on demand from then
    on. One that is being deleted and still has its objects is taken back, as stale as it is; one whose time is over
    stays as it is. `detail` goes into the event of a copy. None: there is no such table.

    Raises:
        StorageFull: the region has no room for it.
    """
    row = session.get(Replica, (table, region))
    if row is not None and _is_enough(row, fresh):
        if row.state == "copying" and row.made_by == "night" and workload is not None and row.requested_by is None:
            row.requested_by = workload.id
            outbox.replicate(session, table, row.source_region or "", region)
        return row
    full = no_room(session, region, whole_bytes(session, [table], region), lock=True)
    if full is not None:
        raise StorageFull(str(full))
    known = session.get(Table, table, with_for_update=True)  # as everyone does who adds a replica
    if known is None:
        return None
    row = session.get(Replica, (table, region), with_for_update=True, populate_existing=True)
    if row is not None and row.state == "deleting" and not _taken_back(session, row, **detail):
        return row
    if row is not None and (_is_enough(row, fresh) or (night is not None and row.stale_since is not None)):
        return row
    if row is None:
        row = Replica(data_table=table, region=region)
        session.add(row)
    wanted_by = None if workload is None else workload.id
    if row.stale_since is None:
        row.whole, row.state, row.ready_at = True, "copying", None
        row.requested_by = wanted_by
        row.made_by = "night" if night is not None else "operator" if workload is None else "workload"
    else:
        row.topping_up, row.topped_up_for = True, wanted_by
    row.source_region = known.home_region
    session.flush()
    session.refresh(row)
    if night is None:
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
    session: Session, table: str, region: str, partitions: Collection[str], night: str
) -> Replica | None:
    """A region's replica of these partitions, or of more, which the night copies: those that there are none of by now
    are left out. One whose deletion is due stays as it is. None: there is no such table.
    """
    known = session.get(Table, table, with_for_update=True)
    if known is None:
        return None
    row = session.get(Replica, (table, region), with_for_update=True, populate_existing=True)
    if row is not None and row.state == "deleting":
        if not _taken_back(session, row, night=night):
            return row
        if row.ready_at is None:
            row.state = "copying"
    if row is not None and row.whole:
        return row
    if row is None:
        row = Replica(data_table=table, region=region, whole=False, state="copying", made_by="night")
        row.source_region = known.home_region
        session.add(row)
        events.record(session, "replica.copying", region=region, detail={"table": table, "night": night})
    session.flush()
    held = ReplicaPartition.data_table == table, ReplicaPartition.region == region
    there = set(session.scalars(select(ReplicaPartition.partition).where(*held)))
    asked = Partition.data_table == table, Partition.name.in_(sorted(set(partitions) - there))
    for name in session.scalars(select(Partition.name).where(*asked)):
        session.add(ReplicaPartition(data_table=table, partition=name, region=region))
    session.flush()
    return row


def drop_replica(session: Session, table: str, region: str, *, grace_s: float, **detail: object) -> Replica | None:
    """Nobody new reads a region's replica from now on, and its objects go when the grace is over; until then it can be
    taken back. One whose time is over stays as it is. `detail` goes into the event. None: there is no such replica.

    Raises:
        CatalogueError: the region is the table's home.
    """
    known = session.get(Table, table, with_for_update=True)
    row = session.get(Replica, (table, region), with_for_update=True, populate_existing=True)
    if known is None or row is None:
        return None
    if known.home_region == region:
        raise CatalogueError(f"region {region} is the home of table {table}, whose replica stays while it is")
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    if row.delete_at is None or row.delete_at > now:
        row.state, row.delete_at = "deleting", now + timedelta(seconds=grace_s)
        said = {"table": table, "delete_at": row.delete_at.isoformat(), **detail}
        events.record(session, "replica.deleting", region=region, detail=said)
    return row


def _taken_back(session: Session, row: Replica, **detail: object) -> bool:
    """Whether a replica that is being deleted is kept after all: not once its time is over.

    One that was complete is ready again; one that was not is the caller's to go on with.
    """
    now = session.execute(select(func.clock_timestamp())).scalar_one()
    if row.delete_at is None or row.delete_at <= now:
        return False
    row.delete_at = None
    if row.ready_at is not None:
        # What ended its top-up was that it should go.
        row.state, row.topping_up = "ready", False
        session.flush()
        events.record(session, "replica.kept", region=row.region, detail={"table": row.data_table, **detail})
        outbox.wake_scheduler(session)
    return True


def _is_enough(row: Replica, fresh: bool) -> bool:
    """Whether nothing needs to be started for those who want the whole table there."""
    comes = row.state == "copying" or row.stale_since is None or row.topping_up
    return row.whole and row.state != "deleting" and (comes or not fresh)
