"""Builds the placement problem inside one region (MAST 3.5).

Datacenters take the role of regions and partitions the role of tables, so that the solver that places tables in regions
also places partitions in datacenters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from domain.ids import partition_read, split_read
from domain.instance import Homes, InstanceRegion, PlacedTable, Reads, RecurringJob, TetrisInstance, job_region


@dataclass(frozen=True, slots=True)
class Placed:
    """The tables of an installation, their locations, and the jobs that read them."""

    tables: Sequence[PlacedTable]
    jobs: Sequence[RecurringJob]
    reads: Reads
    supply: Mapping[str, Mapping[str, float]]
    """Region to its GPU hours of supply by GPU type."""
    parts: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """(table, region) of a partial replica to the partitions in it, each as `table/partition`."""


@dataclass(frozen=True, slots=True)
class StoredPartition:
    """A partition that is stored in the region."""

    table: str
    name: str
    size_bytes: float
    datacenter: str | None
    """None: the partition is not assigned to a datacenter yet."""


def datacenter_name(region: str, datacenter: str) -> str:
    """Returns the globally unique name of a datacenter: `region/datacenter`."""
    return f"{region}/{datacenter}"


def region_instance(
    placed: Placed, homes: Homes, region: str, datacenters: Sequence[InstanceRegion], held: Sequence[StoredPartition]
) -> TetrisInstance:
    """Returns the placement instance of one region after the plan `homes`; tables that are not in `homes` stay.

    The instance's tables are the partitions that the region stores, except those of tables whose home moves away. Its
    jobs are the jobs that run in the region, each with the partitions that it reads there. Partitions that are not
    assigned yet start in the datacenter with the most free storage, the largest partition first.

    Raises:
        ValueError: `homes` names a table that does not exist.
    """
    tables = {table.name: table for table in placed.tables}
    if unknown := sorted(homes.keys() - tables.keys()):
        raise ValueError(f"homes: there is no table {unknown[0]!r}")
    left = {name for name, home in homes.items() if tables[name].home == region != home}
    kept = [partition for partition in held if partition.table not in left]
    by_table: dict[str, list[str]] = {}
    for partition in kept:
        by_table.setdefault(partition.table, []).append(partition_read(partition.table, partition.name))
    jobs = [
        replace(job, tables=names)
        for job, where in zip(placed.jobs, running_regions(placed, homes), strict=True)
        if where == region and (names := _partitions(job, placed.reads, by_table))
    ]
    return TetrisInstance(tuple(datacenters), tuple(_start(kept, region, datacenters)), tuple(jobs))


def running_regions(placed: Placed, homes: Homes) -> list[str | None]:
    """Returns the region in which each job runs, with replicas taken into account; None: the job runs nowhere.

    A job runs in its region by the homes (`domain.instance.job_region`) if that region has the job's hardware.
    Otherwise it runs in a region that has the hardware and a copy of everything that the job reads: the one with the
    highest supply, then the first by name.
    """
    tables = {table.name: table for table in placed.tables}
    home = {table.name: homes.get(table.name, table.home) for table in placed.tables}
    # After a move, the replica at the new home is the home copy, and the copy at the old home is deleted.
    copies = {table.name: frozenset((home[table.name], *table.replicas)) for table in placed.tables}
    return [_running_region(job, placed, copies, job_region(job, tables, home)) for job in placed.jobs]


def _running_region(
    job: RecurringJob, placed: Placed, copies: Mapping[str, frozenset[str]], at_home: str | None
) -> str | None:
    def hours(region: str) -> float:
        return 0.0 if job.gpu_type is None else placed.supply[region].get(job.gpu_type, 0.0)

    able = [region for region in placed.supply if job.gpu_type is None or hours(region) > 0]
    if at_home in able or not job.tables:
        return at_home
    wanted: dict[str, set[str]] = {}
    for name in placed.reads.by_job.get(job.name, ()):
        wanted.setdefault(split_read(name)[0], set()).add(name)

    def has(region: str, table: str) -> bool:
        parts = placed.parts.get((table, region), frozenset())
        return region in copies[table] or (table in wanted and wanted[table] <= parts)

    serving = [region for region in able if all(has(region, table) for table in job.tables)]
    return min(serving, key=lambda region: (-hours(region), region), default=at_home)


def _partitions(job: RecurringJob, reads: Reads, by_table: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Returns the partitions in `by_table` that a job reads."""
    own = set(reads.by_job.get(job.name, ()))
    partly = {split_read(name)[0] for name in own}
    there = [name for table in job.tables for name in by_table.get(table, ())]
    return tuple(name for name in there if split_read(name)[0] not in partly or name in own)


def _start(held: Sequence[StoredPartition], region: str, datacenters: Sequence[InstanceRegion]) -> list[PlacedTable]:
    room = {datacenter.name: datacenter.storage_bytes for datacenter in datacenters}
    home: dict[StoredPartition, str] = {}
    # Partitions with a datacenter come first; the unassigned ones get the storage that is left.
    for partition in sorted(held, key=lambda p: (p.datacenter is None, -p.size_bytes, p.table, p.name)):
        if partition.datacenter is None:
            where = min(room, key=lambda name: (-room[name], name))
        else:
            where = datacenter_name(region, partition.datacenter)
        home[partition] = where
        room[where] -= partition.size_bytes
    return [PlacedTable(partition_read(p.table, p.name), p.size_bytes, home[p]) for p in held]
