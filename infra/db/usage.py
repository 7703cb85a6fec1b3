"""Usage of tables by jobs: records what each run read and used, and derives the recurring jobs of a window."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from domain.instance import RecurringJob
from domain.priority import LOWEST_LEVEL
from infra.db.logs import UsageRun

OWN_SOURCE = "mizzen"
OWN_APP = "training"
"""The app that mizzen's workloads count as in a region's quotas of CPU hours."""
_FETCHED = 5000


def record_runs(session: Session, runs: Sequence[dict[str, Any]]) -> int:
    """Writes runs (columns of `UsageRun`), except those whose source and id exist. Returns the number of new runs."""
    if not runs:
        return 0
    statement = insert(UsageRun).on_conflict_do_nothing().returning(UsageRun.run)
    return len(session.execute(statement, runs).all())


# The priority of a run is the level that the user requested, but not better than the tenant's.
_RECORD = text("""
    insert into usage_run (source, run, job, kind, app, priority, tables, gpu_hours, cpu_hours, ended_at)
    select :source, w.id || '.' || a.attempt, w.tenant || '/' || coalesce(w.spec ->> 'recurring', w.spec ->> 'name'),
           'ml', :app, least(greatest(t.level, coalesce(w.level, t.level)), :lowest),
           array(select jsonb_array_elements_text(w.spec -> 'tables')),
           coalesce((select jsonb_object_agg(key, value::float8 * ran.h) from jsonb_each_text(a.gpu_types)), '{}'),
           a.cpus_milli / 1000.0 * ran.h, a.released_at
    from attempt as a join workload as w on w.id = a.workload join tenant as t on t.name = w.tenant,
         lateral (select greatest(0, extract(epoch from a.released_at - a.started_at)) / 3600 as h) as ran
    where (a.workload, a.attempt) in (select * from unnest(cast(:workloads as text[]), cast(:attempts as bigint[])))
      and a.started_at is not null and a.released_at is not null
    on conflict do nothing
""")


def record_attempts(session: Session, runs: Mapping[str, int]) -> None:
    """Records the usage of released attempts (workload to number) whose tasks ran: all resources since their start.

    The job is named after the workload's `recurring` name if it has one, else after the workload.
    """
    own = {"source": OWN_SOURCE, "app": OWN_APP, "lowest": LOWEST_LEVEL}
    session.execute(_RECORD, own | {"workloads": list(runs), "attempts": list(runs.values())})


def recurring_jobs(session: Session, now: datetime, window_days: float) -> tuple[RecurringJob, ...]:
    """Returns the jobs that ran in the window before `now`, named `source/job` and sorted by source and name.

    A job's tables are those that any of its runs read and that exist in the catalogue (`infra.db.reads` returns the
    partitions). Its GPU type is the one with the most hours. Its kind, app and priority are those of its newest run.
    Its hours and its weight (the number of runs) are averages per day, over the days since the source's first run in
    the window ended, at most `window_days`.

    Raises:
        ValueError: `window_days` is not greater than 0.
    """
    if not window_days > 0:
        raise ValueError(f"window_days: {window_days!r}: must be greater than 0")
    rows = session.execute(_JOBS.execution_options(yield_per=_FETCHED), {"now": now, "days": window_days})
    return tuple(
        RecurringJob(
            name=f"{r.source}/{r.job}",
            kind=r.kind,
            tables=tuple(r.tables),
            priority=r.priority,
            app=r.app,
            gpu_type=r.gpu_type,
            gpu_hours=r.gpu_hours,
            cpu_hours=r.cpu_hours,
            weight=r.weight,
        )
        for r in rows
    )


# Most runs of a job read the same tables, so the lists of tables are deduplicated before they are unnested.
_JOBS = text("""
    with run as not materialized (
        select * from usage_run
        where ended_at > cast(:now as timestamptz) - cast(:days as float8) * interval '1 day' and ended_at <= :now
    ), total as (
        select source, job, count(*) as runs, sum(cpu_hours) as cpu_hours,
               min(ended_at) as first_at, max(ended_at) as last_at
        from run group by source, job
    ), span as (
        select source, least(:days, floor(extract(epoch from :now - min(first_at))::float8 / 86400) + 1) as days
        from total group by source
    ), newest as (
        select distinct on (source, job) source, job, kind, app, priority
        from run join total using (source, job) where ended_at = last_at order by source, job, run desc
    ), typed as (
        select source, job, gpu.key as gpu_type, sum(gpu.value::float8) as hours
        from run, jsonb_each_text(gpu_hours) as gpu where gpu_hours <> '{}' group by source, job, gpu.key
    ), gpu as (
        select source, job, (array_agg(gpu_type order by hours desc, gpu_type collate "C"))[1] as gpu_type,
               sum(hours) as hours
        from typed group by source, job
    ), listed as (
        select distinct source, job, tables from run
    ), read as (
        select source, job, array_agg(distinct t.name collate "C") as tables
        from listed, unnest(tables) as entry join data_table as t on t.name = split_part(entry, '/', 1)
        where strpos(entry, '/') = 0 or exists (
            select from data_partition as p where p.data_table = t.name and p.name = split_part(entry, '/', 2))
        group by source, job
    )
    select n.source, n.job, n.kind, n.app, n.priority, coalesce(r.tables, '{}') as tables, g.gpu_type,
           coalesce(g.hours, 0) / s.days as gpu_hours, t.cpu_hours / s.days as cpu_hours, t.runs / s.days as weight
    from newest as n join span as s using (source) join total as t using (source, job)
        left join gpu as g using (source, job) left join read as r using (source, job)
    order by n.source collate "C", n.job collate "C"
""")
