"""Usage of tables by jobs: what each run read and used, and the recurring jobs that the runs of a window are."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from domain.instance import Job
from domain.priority import LOWEST_LEVEL
from infra.db.logs import UsageRun

OWN_SOURCE = "mizzen"
OWN_APP = "training"
"""The app of workloads in a region's quotas of CPU hours."""
_FETCHED = 5000


def record_runs(session: Session, runs: Sequence[dict[str, Any]]) -> int:
    """Writes runs (columns of `UsageRun`), but for those whose source and id are there already; how many were new."""
    if not runs:
        return 0
    statement = insert(UsageRun).on_conflict_do_nothing().returning(UsageRun.run)
    return len(session.execute(statement, runs).all())


# Its jobs' level is what the user wished for, but never above the tenant's.
_RECORD = text("""
    insert into usage_run (source, run, job, kind, app, priority, tables, gpu_hours, cpu_hours, ended_at)
    select :source, w.id || '.' || a.attempt, w.tenant || '/' || coalesce(w.spec ->> 'recurring', w.spec ->> 'name'),
           'ml', :app, least(greatest(t.level, coalesce(w.level, t.level)), :lowest),
           array(select jsonb_array_elements_text(w.spec -> 'tables')),
           coalesce((select jsonb_object_agg(key, value::float8 * ran.h) from jsonb_each_text(a.gpu_types)), '{}'),
           a.cpus_milli / 1000.0 * ran.h, a.released_at
    from attempt as a join workload as w on w.id = a.workload join tenant as t on t.name = w.tenant,
         lateral (select greatest(0, extract(epoch from a.released_at - a.started_at)) / 3600 as h) as ran
    where a.workload = :workload and a.attempt = :attempt and a.started_at is not null and a.released_at is not null
    on conflict do nothing
""")


def record_attempt(session: Session, workload: str, attempt: int) -> None:
    """Writes what an attempt used that has been released, if its tasks ran: all it held, from their start on.

    Runs of a recurring workload share its tenant's name for it; others are known by the workload's own name.
    """
    own = {"source": OWN_SOURCE, "app": OWN_APP, "lowest": LOWEST_LEVEL, "workload": workload, "attempt": attempt}
    session.execute(_RECORD, own)


def recurring_jobs(session: Session, now: datetime, window_days: float) -> tuple[Job, ...]:
    """The jobs that ran in the window before `now`, by source and name, as `source/job`.

    A job has the tables of which the catalogue has something that any of its runs read (`infra.db.reads` says which
    partitions), the GPU type that took most of its hours, and
    kind, app and priority of its newest run. Its hours, and its weight (the number of runs), are a day's: of the days
    for which its source has told of runs, from the first one's end in the window on, up to `window_days`.

    Raises:
        ValueError: `window_days` is not above 0.
    """
    if not window_days > 0:
        raise ValueError(f"window_days: {window_days!r}: must be above 0")
    rows = session.execute(_JOBS.execution_options(yield_per=_FETCHED), {"now": now, "days": window_days})
    return tuple(
        Job(
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


# Runs of a job repeat themselves: what they read is made distinct before it is taken apart.
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
