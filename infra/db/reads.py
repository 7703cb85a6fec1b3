"""The reads of runs: whole tables, or single partitions of tables (`domain.ids.READ_RULE`)."""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.ids import partition_read, split_read
from domain.instance import Reads

_FETCHED = 5000


def unknown_reads(session: Session, reads: Collection[str]) -> dict[str, str]:
    """Returns the entries of `reads` that do not exist in the catalogue, each with an error message."""
    rows = session.execute(_UNKNOWN, {"reads": sorted(reads)})
    return {
        read: f"table {split_read(read)[0]} has no such partition; append it first, or leave it out"
        if has_table
        else "there is no such table; register it first, or leave it out"
        for read, has_table in rows
    }


def partial_reads(session: Session, now: datetime, window_days: float) -> Reads:
    """Returns the partitions that jobs read of tables that they do not read completely.

    The jobs and the window are those of `infra.db.usage.recurring_jobs`. A job is omitted for a table if one of its
    runs read the whole table, or if its runs together read every partition.
    """
    size_bytes: dict[str, float] = {}
    by_job: dict[str, list[str]] = {}
    rows = session.execute(_PARTIAL.execution_options(yield_per=_FETCHED), {"now": now, "days": window_days})
    for source, job, table, names, sizes in rows:
        reads = [partition_read(table, name) for name in names]
        size_bytes.update(zip(reads, map(float, sizes), strict=True))
        by_job.setdefault(f"{source}/{job}", []).extend(reads)
    return Reads(size_bytes, {job: tuple(reads) for job, reads in by_job.items()})


_UNKNOWN = text("""
    select read, t.name is not null as has_table
    from unnest(cast(:reads as text[])) as read left join data_table as t on t.name = split_part(read, '/', 1)
    where t.name is null or strpos(read, '/') > 0 and not exists (
        select from data_partition as p where p.data_table = t.name and p.name = split_part(read, '/', 2))
""")
_PARTIAL = text("""
    with listed as (
        select distinct source, job, tables from usage_run
        where ended_at > cast(:now as timestamptz) - cast(:days as float8) * interval '1 day' and ended_at <= :now
    ), read as (
        select distinct source, job, split_part(entry, '/', 1) as data_table, split_part(entry, '/', 2) as partition
        from listed, unnest(tables) as entry
    ), partial as (
        select source, job, data_table from read group by source, job, data_table having min(partition) <> ''
    ), counted as (
        select data_table, count(*) as partitions from data_partition
        where data_table in (select data_table from partial) group by data_table
    )
    select source, job, data_table, array_agg(p.name order by p.name collate "C") as names,
           array_agg(p.size_bytes order by p.name collate "C") as sizes
    from partial join read using (source, job, data_table) join counted as c using (data_table)
        join data_partition as p using (data_table)
    where p.name = read.partition
    group by source, job, data_table, c.partitions having count(*) < c.partitions
    order by source collate "C", job collate "C", data_table collate "C"
""")
