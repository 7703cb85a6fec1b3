"""The costs of workloads: the hours of the resources that they held, at the prices of their clusters at that time.

Costs of an attempt on a machine start when it holds all resources that it was awarded there, and end when it releases
them. They include the time in which tasks are prepared, and in which they save before an eviction. If a platform
reclaims a machine, the attempt releases its machines before the tasks save, so the save costs nothing. Hours without a
known price cost nothing and are counted separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from domain.capacity import CPU, CapacityKind


@dataclass(frozen=True)
class Cost:
    """The hours and costs of one resource that a tenant's workloads held on one day (UTC)."""

    day: date
    tenant: str
    capacity: CapacityKind
    resource: str
    """A GPU type, or `cpu`."""
    hours: float
    """Hours of one GPU or of one core."""
    unpriced_h: float
    """The part of `hours` without a known price."""
    usd: float


_COSTS = """
    with held as (
        select l.workload, l.attempt, l.machine, l.cpus_milli, bit_count(l.slots::bit(64)) as gpus,
               split_part(l.machine, '/', 1) as region, split_part(l.machine, '/', 2) as cluster,
               greatest(l.held_at, :since) as begun_at, least(coalesce(l.released_at, now()), :until) as ended_at
        from allocation as l
        where (l.workload, l.attempt) in (
            select a.workload, a.attempt from attempt as a where a.released_at is null or a.released_at > :since)
          and l.held_at < :until and (l.released_at is null or l.released_at > :since) {which}
    ), typed as (
        select distinct a.workload, a.attempt, machine ->> 0 as machine, job ->> 'gpu_type' as gpu_type
        from (select distinct workload, attempt from held where gpus > 0) as own
             join attempt as a using (workload, attempt),
             jsonb_array_elements(a.plan -> 'jobs') as job, jsonb_array_elements(job -> 'machines') as machine
        where job ->> 'gpu_type' is not null
    ), used as (
        select workload, region, cluster, begun_at, ended_at, '{cpu}' as resource, cpus_milli / 1000.0 as many
        from held where cpus_milli > 0
        union all
        select workload, region, cluster, begun_at, ended_at, gpu_type, gpus
        from held join typed using (workload, attempt, machine) where gpus > 0
    ), price as (
        select *, lead(since, 1, 'infinity') over (partition by region, cluster order by since) as until
        from cluster_price where (region, cluster) in (select region, cluster from used)
    ), piece as (
        select u.workload, u.resource, u.many, p.capacity, (p.prices ->> u.resource)::float8 as price,
               greatest(u.begun_at, p.since) as begun_at, least(u.ended_at, p.until) as ended_at
        from used as u join price as p using (region, cluster) where p.since < u.ended_at and p.until > u.begun_at
    ), daily as (
        select workload, resource, capacity, price, day::date as day,
               many * extract(epoch from least(ended_at, (day + interval '1 day') at time zone 'UTC')
                                         - greatest(begun_at, day at time zone 'UTC'))::float8 / 3600 as hours
        from piece, generate_series(date_trunc('day', begun_at at time zone 'UTC'),
                                    ended_at at time zone 'UTC', interval '1 day') as day
    )
    select d.day, w.tenant, d.capacity, d.resource, sum(d.hours) as hours,
           coalesce(sum(d.hours) filter (where d.price is null), 0) as unpriced_h,
           coalesce(sum(d.hours * d.price), 0) as usd
    from daily as d join workload as w on w.id = d.workload where d.hours > 0
    group by d.day, w.tenant, d.capacity, d.resource order by d.day, w.tenant, d.capacity, d.resource
"""
_OF_ALL = text(_COSTS.format(cpu=CPU, which=""))
_OF_TENANT = text(_COSTS.format(cpu=CPU, which="and l.workload in (select id from workload where tenant = :tenant)"))
_OF_WORKLOAD = text(_COSTS.format(cpu=CPU, which="and l.workload = :workload"))


def costs(session: Session, since: datetime, until: datetime, tenant: str | None = None) -> list[Cost]:
    """Returns the costs between `since` and `until`, of one tenant or of all.

    The result is sorted by day, tenant, capacity kind and resource.
    """
    asked = {"since": since, "until": until}
    if tenant is None:
        return _read(session, _OF_ALL, asked)
    return _read(session, _OF_TENANT, {**asked, "tenant": tenant})


def costs_of(session: Session, workload: str) -> list[Cost]:
    """Returns all costs of one workload so far."""
    return _read(session, _OF_WORKLOAD, {"since": "-infinity", "until": "infinity", "workload": workload})


def _read(session: Session, statement: Any, asked: dict[str, Any]) -> list[Cost]:
    rows: Sequence[Any] = session.execute(statement, asked).all()
    return [Cost(r.day, r.tenant, CapacityKind(r.capacity), r.resource, r.hours, r.unpriced_h, r.usd) for r in rows]
