"""Manifests of partitions, and the results of checking their copies against them.

A copy that a check found wrong stays marked as wrong until a later check finds it correct. While a replica has a wrong
copy, no job starts on the replica, no copy of its table is dropped or deleted, and the replica is repaired from another
region.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import and_, func, insert, or_, select, text, update
from sqlalchemy.orm import Session

from infra.db import events, outbox
from infra.db.tables import Partition, PartitionManifest, Replica, ReplicaPartition, Table


def clock(session: Session) -> datetime:
    """Returns the current time of the database's clock."""
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return now


def home_of(session: Session, table: str) -> str | None:
    """Returns a table's home region, or None if the table does not exist."""
    return session.scalar(select(Table.home_region).where(Table.name == table))


class NewManifest(NamedTuple):
    """The packed manifest of a new partition."""

    partition: str
    body: bytes
    objects: int
    complete: bool


def add_manifests(
    session: Session, table: str, home: str, manifests: Iterable[NewManifest], read_at: datetime
) -> None:  # fmt: skip
    """Writes the manifests of new partitions. Marks the home's copies of complete ones as verified at `read_at`."""
    given = list(manifests)
    if not given:
        return
    now = clock(session)
    rows = [
        {
            "data_table": table, "partition": m.partition, "body": m.body, "objects": m.objects,
            "checksummed_at": now if m.complete else None,
        }
        for m in given
    ]  # fmt: skip
    session.execute(insert(PartitionManifest), rows)
    held = ReplicaPartition
    read = held.data_table == table, held.region == home, held.partition.in_([m.partition for m in given if m.complete])
    session.execute(update(held).where(*read).values(verified_at=read_at))


def save_manifest(
    session: Session, table: str, partition: str, body: bytes, objects: int, *, complete: bool
) -> None:  # fmt: skip
    """Writes a partition's manifest, unless it is already complete. Does nothing if the partition does not exist."""
    if session.get(Partition, (table, partition)) is None:
        return
    row = session.get(PartitionManifest, (table, partition), with_for_update=True)
    if row is None:
        row = PartitionManifest(data_table=table, partition=partition)
        session.add(row)
    elif row.checksummed_at is not None:
        return
    row.body, row.objects = body, objects
    row.checksummed_at = clock(session) if complete else None
    session.flush()


def manifest_body(session: Session, table: str, partition: str) -> tuple[bytes, bool] | None:
    """Returns a partition's packed manifest and whether it is complete, or None if it has none yet."""
    row = session.get(PartitionManifest, (table, partition), populate_existing=True)
    return None if row is None else (row.body, row.checksummed_at is not None)


def found_right(session: Session, table: str, partition: str, region: str, began_at: datetime) -> None:
    """Records that a region's copy of a partition matched its manifest in a check that began at `began_at`.

    Removes the mark as wrong, unless the copy was found wrong after `began_at`. If the replica has no wrong copy left,
    writes an event and wakes the scheduler. Does nothing if the copy does not exist.
    """
    replica, held = _locked(session, table, partition, region)
    if replica is None or held is None:
        return
    held.verified_at = max(held.verified_at or began_at, began_at)
    held.check_began_at = held.checked_to = None
    if held.wrong_at is not None and held.wrong_at < began_at:
        held.wrong = held.wrong_at = None
    session.flush()
    if replica.wrong_since is None:
        return
    own = ReplicaPartition.data_table == table, ReplicaPartition.region == region
    if session.scalar(select(ReplicaPartition.partition).where(*own, ReplicaPartition.wrong.is_not(None)).limit(1)):
        return
    detail = {"table": table, "wrong_since": replica.wrong_since.isoformat()}
    replica.wrong_since = None
    events.record(session, "replica.repaired", region=region, detail=detail)
    outbox.wake_scheduler(session)


def found_wrong(session: Session, table: str, partition: str, region: str, what: str) -> None:
    """Records that a region's copy of a partition differs from its manifest (`what`), and starts its repair.

    Does nothing if the copy does not exist or is not ready.
    """
    replica, held = _locked(session, table, partition, region)
    if replica is None or held is None or held.ready_at is None:
        return
    known = held.wrong is not None
    held.wrong, held.wrong_at = what, clock(session)
    held.check_began_at = held.checked_to = None
    replica.wrong_since = replica.wrong_since or held.wrong_at
    session.flush()
    if known:
        return
    detail = {"table": table, "partition": partition, "found": what}
    events.record(session, "replica.wrong", region=region, detail=detail)
    if replica.state != "deleting":
        home = session.get_one(Table, table).home_region
        outbox.replicate(session, table, home, region)


def note_check(session: Session, table: str, partition: str, region: str, began_at: datetime, path: str) -> None:
    """Records that a check of a copy, begun at `began_at`, has reached `path`, so that it can resume after it."""
    own = (ReplicaPartition.data_table == table, ReplicaPartition.partition == partition)
    values = {"check_began_at": began_at, "checked_to": path}
    session.execute(update(ReplicaPartition).where(*own, ReplicaPartition.region == region).values(**values))


def sources_of(session: Session, table: str, partition: str, target: str) -> list[tuple[str, bool]]:
    """Returns the regions from which a partition can be copied to `target`, each with whether its copy is marked wrong.

    Copies that are not marked come first; among these the table's home, then the most recently verified. Replicas that
    are being dropped but are still in their grace are included, because they may have the last correct copy.
    """
    statement = (
        select(ReplicaPartition.region, ReplicaPartition.wrong.is_not(None))
        .join(Table, Table.name == ReplicaPartition.data_table)
        .where(ReplicaPartition.data_table == table, ReplicaPartition.partition == partition)
        .where(ReplicaPartition.ready_at.is_not(None), ReplicaPartition.region != target)
        .order_by(
            ReplicaPartition.wrong.is_not(None),
            (ReplicaPartition.region == Table.home_region).desc(),
            ReplicaPartition.verified_at.desc().nulls_last(),
            ReplicaPartition.region,
        )
    )
    return [(region, wrong) for region, wrong in session.execute(statement)]


def unverified(
    session: Session, table: str, region: str, *, since: datetime, of: str | None = None, limit: int = 1
) -> list[Partition]:
    """Returns partitions of a region's replica whose copy was not verified since `since`, or is marked wrong.

    With `of`, returns only partitions that the replica in that other region has, too.
    """
    held = ReplicaPartition
    statement = (
        select(Partition)
        .join(held, and_(held.data_table == Partition.data_table, held.partition == Partition.name))
        .where(held.data_table == table, held.region == region, held.ready_at.is_not(None))
        .where(or_(held.verified_at.is_(None), held.verified_at < since, held.wrong.is_not(None)))
        .order_by(Partition.created_at, Partition.name)
        .limit(limit)
    )
    if of is not None:
        other = select(ReplicaPartition.partition).where(
            ReplicaPartition.data_table == table, ReplicaPartition.region == of, ReplicaPartition.ready_at.is_not(None)
        )
        statement = statement.where(Partition.name.in_(other))
    return list(session.scalars(statement))


def held_partitions(session: Session, table: str, region: str, *, after: str, limit: int) -> list[Partition]:
    """Returns partitions that a region's replica has, sorted by name, with names greater than `after`."""
    held = ReplicaPartition
    statement = (
        select(Partition)
        .join(held, and_(held.data_table == Partition.data_table, held.partition == Partition.name))
        .where(held.data_table == table, held.region == region, held.ready_at.is_not(None), Partition.name > after)
        .order_by(Partition.name)
        .limit(limit)
    )
    return list(session.scalars(statement))


def without_checksums(session: Session, table: str, region: str) -> str | None:
    """Returns the first partition of a region's replica whose manifest is not complete, or None."""
    held, manifest = ReplicaPartition, PartitionManifest
    statement = (
        select(held.partition)
        .outerjoin(manifest, and_(manifest.data_table == held.data_table, manifest.partition == held.partition))
        .where(held.data_table == table, held.region == region, held.ready_at.is_not(None))
        .where(manifest.checksummed_at.is_(None))
        .order_by(held.partition)
        .limit(1)
    )
    return session.scalar(statement)


def tables_without_checksums(session: Session, home: str) -> list[str]:
    """Returns the tables with home region `home` that have a partition without a complete manifest."""
    manifest = PartitionManifest
    statement = (
        select(Table.name)
        .join(Partition, Partition.data_table == Table.name)
        .outerjoin(manifest, and_(manifest.data_table == Partition.data_table, manifest.partition == Partition.name))
        .where(Table.home_region == home, manifest.checksummed_at.is_(None))
        .distinct()
        .order_by(Table.name)
    )
    return list(session.scalars(statement))


def wrong_region(session: Session, table: str) -> str | None:
    """Returns the first region whose replica of a table has a copy marked wrong, or None."""
    wrong = Replica.data_table == table, Replica.wrong_since.is_not(None)
    return session.scalar(select(Replica.region).where(*wrong).order_by(Replica.region).limit(1))


_DUE = text("""
    select h.data_table, h.partition, r.verify_asked_at > coalesce(h.verified_at, '-infinity') as asked
    from replica_partition as h
        join replica as r on r.data_table = h.data_table and r.region = h.region
        join data_table as t on t.name = h.data_table
        left join partition_manifest as m on m.data_table = h.data_table and m.partition = h.partition
    where h.region = :region and h.ready_at is not null and r.state <> 'deleting'
        and (m.checksummed_at is not null or t.home_region = :region)
        and case when h.wrong_at is not null
            then h.wrong_at < greatest(r.verify_asked_at, clock_timestamp() - make_interval(secs => :again_s))
            else coalesce(h.verified_at < greatest(
                r.verify_asked_at, clock_timestamp() - make_interval(secs => :every_s)), true) end
    order by (r.verify_asked_at > coalesce(h.verified_at, '-infinity')) desc nulls last,
        h.verified_at nulls first, h.data_table, h.partition
    limit :limit
""")


def due_checks(
    session: Session, region: str, *, every_s: float, again_s: float, limit: int
) -> Iterator[tuple[str, str, bool]]:
    """Yields table and partition of copies in a region that are due for a check, and whether an operator requested it.

    Requested checks come first, then copies that were never verified, then the longest time since the last check. A
    copy is due `every_s` after its last check, `again_s` after it was found wrong, and at once on an operator's
    request. Copies outside the home are due only once the manifest is complete, because it is made from the home's
    objects.
    """
    values = {"region": region, "every_s": every_s, "again_s": again_s, "limit": limit}
    for table, partition, asked in session.execute(_DUE, values):
        yield table, partition, bool(asked)


def _locked(
    session: Session, table: str, partition: str, region: str
) -> tuple[Replica | None, ReplicaPartition | None]:  # fmt: skip
    replica = session.get(Replica, (table, region), with_for_update=True, populate_existing=True)
    key = table, partition, region
    return replica, session.get(ReplicaPartition, key, with_for_update=True, populate_existing=True)
