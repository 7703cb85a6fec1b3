"""Placement of partitions in the datacenters of a region: builds the Tetris instance and stores the assignment."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from domain.datacenters import Placed, StoredPartition, datacenter_name, region_instance
from domain.ids import partition_read, split_read
from domain.instance import Homes, InstanceRegion, TetrisInstance
from infra.config.data import TetrisSettings
from infra.db import models, tables
from infra.db.placement_instance import HOURS_A_DAY, gather_tables, supply_by_region, transaction_time, weights_of
from infra.db.reads import partial_reads
from infra.db.usage import recurring_jobs
from infra.errors import CatalogueError

_DEFAULT = TetrisSettings()


class AssignmentError(CatalogueError):
    """Partitions cannot be assigned to datacenters. `wrong` maps each partition's name to the reason."""

    def __init__(self, wrong: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {told}" for name, told in wrong.items()))
        self.wrong = wrong


def gather_datacenters(
    session: Session,
    region: str,
    tetris: TetrisSettings = _DEFAULT,
    *,
    homes: Homes | None = None,
    now: datetime | None = None,
    window_days: float | None = None,
) -> TetrisInstance:
    """Builds the Tetris instance of one region's datacenters (`domain.datacenters`).

    Its jobs are those that run in the region if the tables have these `homes`. Reads the session's snapshot, like
    `infra.db.placement_instance.gather`: the partitions of ready replicas in the region, and the GPU hours of the
    machines in each datacenter's clusters.

    Raises:
        CatalogueError: the region does not exist, has no datacenters, or `storage_bytes` of a datacenter is not set.
        ValueError: `window_days` is not greater than 0, or `homes` names a table that does not exist.
    """
    until = now or transaction_time(session)
    days = tetris.window_days if window_days is None else window_days
    datacenters = _datacenters(session, region)
    supply = supply_by_region(session)
    placed = Placed(
        tables=gather_tables(session),
        jobs=recurring_jobs(session, until, days),
        reads=partial_reads(session, until, days),
        supply={name: supply.get(name, {}) for name in session.scalars(select(models.Region.name))},
        parts=_parts(session),
    )
    found = region_instance(placed, homes or {}, region, datacenters, _held(session, region))
    return replace(found, weights=weights_of(tetris), home_threshold=tetris.home_threshold)


def assign_partitions(session: Session, homes: Homes) -> int:
    """Stores the datacenter (`region/datacenter`) of each partition (`table/partition`). Returns the number of changes.

    All or nothing: each partition must be in a ready replica in that region, and the datacenter must exist.

    Raises:
        AssignmentError: a partition is not in a ready replica there, or a datacenter does not exist.
    """
    if not homes:
        return 0
    names = sorted(homes)
    read, placed = [split_read(name) for name in names], [homes[name].partition("/") for name in names]
    columns = {
        "name": names,
        "data_table": [table for table, _ in read],
        "partition": [partition or "" for _, partition in read],
        "region": [region for region, _, _ in placed],
        "datacenter": [datacenter for _, _, datacenter in placed],
    }
    there = set(session.scalars(_LOCK, columns))
    known: dict[str, set[str]] = defaultdict(set)
    for region, datacenter in session.execute(select(models.Datacenter.region, models.Datacenter.name)):
        known[region].add(datacenter)
    wrong = {}
    for name, (region, _, datacenter) in zip(names, placed, strict=True):
        if datacenter not in known[region]:
            have = ", ".join(sorted(known[region])) or "none"
            wrong[name] = f"region {region} has no datacenter {datacenter!r}; it has {have}"
        elif name not in there:
            wrong[name] = f"no ready replica in {region} has this partition; export the region's instance again"
    if wrong:
        raise AssignmentError(wrong)
    return len(session.execute(_ASSIGN, columns).all())


def _datacenters(session: Session, region: str) -> tuple[InstanceRegion, ...]:
    if session.get(models.Region, region) is None:
        raise CatalogueError(f"region {region}: does not exist")
    machine, cluster, datacenter = models.Machine, models.Cluster, models.Datacenter
    rows = session.scalars(select(datacenter).where(datacenter.region == region).order_by(datacenter.name)).all()
    set_it = f"PUT /v1/regions/{region}/datacenters/NAME"
    if not rows:
        raise CatalogueError(f"region {region} has no datacenters; set each with its storage and clusters ({set_it})")
    if unsaid := [row.name for row in rows if row.storage_bytes is None]:
        raise CatalogueError(f"storage_bytes of datacenter {', '.join(unsaid)} of {region}: is not set; use {set_it}")
    supply: dict[str, dict[str, float]] = defaultdict(dict)
    slots = (
        select(cluster.datacenter, machine.gpu_type, func.sum(machine.gpus))
        .join(cluster, (cluster.region == machine.region) & (cluster.name == machine.cluster))
        .where(machine.region == region, cluster.datacenter.is_not(None))
        .where(machine.state != "lost", machine.gpu_type.is_not(None), machine.gpus > 0)
        .group_by(cluster.datacenter, machine.gpu_type)
        .order_by(cluster.datacenter, machine.gpu_type)
    )
    for name, gpu_type, gpus in session.execute(slots):
        supply[str(name)][str(gpu_type)] = float(gpus) * HOURS_A_DAY
    return tuple(
        InstanceRegion(datacenter_name(region, row.name), float(row.storage_bytes or 0), supply[row.name])
        for row in rows
    )


def _held(session: Session, region: str) -> list[StoredPartition]:
    held, partition, replica = tables.ReplicaPartition, tables.Partition, tables.Replica
    statement = (
        select(held.data_table, held.partition, partition.size_bytes, held.datacenter)
        .join(partition, (partition.data_table == held.data_table) & (partition.name == held.partition))
        .join(replica, (replica.data_table == held.data_table) & (replica.region == held.region))
        .where(held.region == region, held.ready_at.is_not(None), replica.state == "ready")
        .order_by(held.data_table.collate("C"), held.partition.collate("C"))
    )
    return [StoredPartition(table, name, float(size), where) for table, name, size, where in session.execute(statement)]


def _parts(session: Session) -> dict[tuple[str, str], frozenset[str]]:
    held, replica = tables.ReplicaPartition, tables.Replica
    statement = (
        select(held.data_table, held.region, func.array_agg(held.partition))
        .join(replica, (replica.data_table == held.data_table) & (replica.region == held.region))
        .where(held.ready_at.is_not(None), replica.state == "ready", ~replica.whole)
        .group_by(held.data_table, held.region)
    )
    return {
        (table, region): frozenset(partition_read(table, name) for name in names)
        for table, region, names in session.execute(statement)
    }


# Locks the rows in a fixed order, so that concurrent assignments cannot deadlock.
_LOCK = text("""
    select asked.name
    from unnest(cast(:name as text[]), cast(:data_table as text[]), cast(:partition as text[]), cast(:region as text[]))
        as asked(name, data_table, partition, region)
        join replica_partition as h using (data_table, partition, region)
        join replica as r using (data_table, region)
    where h.ready_at is not null and r.state = 'ready'
    order by h.data_table, h.partition, h.region for no key update of h
""")
_ASSIGN = text("""
    update replica_partition as h set datacenter = asked.datacenter
    from unnest(cast(:data_table as text[]), cast(:partition as text[]), cast(:region as text[]),
                cast(:datacenter as text[])) as asked(data_table, partition, region, datacenter)
    where h.data_table = asked.data_table and h.partition = asked.partition and h.region = asked.region
        and h.datacenter is distinct from asked.datacenter
    returning h.partition
""")
