"""The costs of workloads: the hours of the resources that they held, at the prices of their clusters at that time.

Costs of an attempt on a machine start when it holds all resources that it was awarded there, and end when it releases
them. They include the time in which tasks are prepared, and in which they save before an eviction. If a platform
reclaims a machine, the attempt releases its machines before the tasks save, so the save costs nothing. Hours without a
known price cost nothing and are counted separately.

The costs of ended attempts are summed up by day, once for each attempt: a trigger notes an attempt when it ends
(`functions/costs.sql`), and `count_ended` adds it, with its preemption and lost work (`EndedTotal`). So costs are kept
when workloads are deleted, and the costs of a tenant are those sums and what few attempts have held since.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from sqlalchemy import BigInteger, ForeignKeyConstraint, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from domain.capacity import CPU, CapacityKind
from domain.lifecycle.retry_limits import PREEMPTIONS
from infra.db.base import Base


class CostDay(Base):
    """What the ended attempts of a tenant held of one resource on one day (UTC). Kept for ever."""

    __tablename__ = "cost_day"
    day: Mapped[date] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(primary_key=True)
    """Not a foreign key, because costs outlive their tenant."""
    capacity: Mapped[str] = mapped_column(primary_key=True)
    resource: Mapped[str] = mapped_column(primary_key=True)
    """A GPU type, or `cpu`."""
    hours: Mapped[float]
    unpriced_h: Mapped[float]
    usd: Mapped[float]


class EndedTotal(Base):
    """How many ended attempts of a region were preempted, and the work that they lost. Kept for ever."""

    __tablename__ = "ended_total"
    region: Mapped[str] = mapped_column(primary_key=True)
    """Not a foreign key, because the totals of a removed region are kept."""
    preemptions: Mapped[int] = mapped_column(BigInteger)
    lost_s: Mapped[float]


class CostPending(Base):
    """An attempt that has ended and is not in the sums yet."""

    __tablename__ = "cost_pending"
    workload: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    __table_args__ = (
        ForeignKeyConstraint(["workload", "attempt"], ["attempt.workload", "attempt.attempt"], ondelete="CASCADE"),
    )


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


_HELD = """
    held as (
        select l.workload, l.attempt, l.machine, l.cpus_milli, bit_count(l.slots::bit(64)) as gpus,
               split_part(l.machine, '/', 1) as region, split_part(l.machine, '/', 2) as cluster,
               {begun} as begun_at, coalesce(l.released_at, now()) as ended_at
        from allocation as l where (l.workload, l.attempt) in ({runs}) and l.held_at < coalesce(l.released_at, now())
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
    ), summed as (
        select d.day, w.tenant, d.capacity, d.resource, sum(d.hours) as hours,
               coalesce(sum(d.hours) filter (where d.price is null), 0) as unpriced_h,
               coalesce(sum(d.hours * d.price), 0) as usd
        from daily as d join workload as w on w.id = d.workload where d.hours > 0
        group by d.day, w.tenant, d.capacity, d.resource
    )
"""
"""The costs of attempts by day (`summed`). `{runs}` selects the attempts, `{begun}` the begin of what they held."""
_UNCOUNTED = """
    select workload, attempt from attempt where released_at is null
    union all select workload, attempt from cost_pending
"""
_FROM_FIRST = "greatest(l.held_at, cast(:first as timestamp) at time zone 'UTC')"
_COSTS = text(
    f"with {_HELD.format(cpu=CPU, runs=_UNCOUNTED, begun=_FROM_FIRST)}"
    """
    select day, tenant, capacity, resource, sum(hours) as hours, sum(unpriced_h) as unpriced_h, sum(usd) as usd
    from (select * from summed union all select * from cost_day) as found
    where day between :first and :last and (cast(:tenant as text) is null or tenant = :tenant)
    group by day, tenant, capacity, resource order by day, tenant, capacity, resource
    """
)
_ENDED = """
    select a.region, coalesce(a.outcome ->> 'code' = any(:codes), false)::int as preemptions,
           coalesce(a.lost_s, 0) as lost_s
    from attempt as a
"""
"""The preemption and the lost work of each attempt. An attempt without an outcome was not preempted."""
_CODES = [code.value for code in PREEMPTIONS]
_OWN = "select workload, attempt from attempt where workload = :workload"
_OF_WORKLOAD = text(
    f"with {_HELD.format(cpu=CPU, runs=_OWN, begun='l.held_at')} select * from summed order by day, capacity, resource"
)
_COUNT = text(
    """
    with taken as (
        delete from cost_pending where (workload, attempt) in (
            select workload, attempt from cost_pending order by workload, attempt limit :most for update skip locked)
        returning workload, attempt
    ),
    """
    f"{_HELD.format(cpu=CPU, runs='select workload, attempt from taken', begun='l.held_at')}"
    """
    , added as (
        insert into cost_day as known (day, tenant, capacity, resource, hours, unpriced_h, usd)
        select * from summed order by day, tenant, capacity, resource
        on conflict (day, tenant, capacity, resource) do update
        set hours = known.hours + excluded.hours, unpriced_h = known.unpriced_h + excluded.unpriced_h,
            usd = known.usd + excluded.usd
    ), ended as (
        insert into ended_total as known (region, preemptions, lost_s)
        select region, sum(preemptions), sum(lost_s) from (
    """
    f"{_ENDED} join taken using (workload, attempt)"
    """
        ) as one group by region order by region
        on conflict (region) do update
        set preemptions = known.preemptions + excluded.preemptions, lost_s = known.lost_s + excluded.lost_s
    )
    select count(*) from taken
    """
)
_TOTALS = text(
    f"""
    select region, sum(preemptions) as preemptions, sum(lost_s) as lost_s
    from (select region, preemptions, lost_s from ended_total
          union all {_ENDED} join cost_pending using (workload, attempt)) as one
    group by region order by region
    """
)


def costs(session: Session, first: date, last: date, tenant: str | None = None) -> list[Cost]:
    """Returns the costs of the days (UTC) from `first` to `last`, of one tenant or of all.

    The result is sorted by day, tenant, capacity kind and resource.
    """
    return _read(session, _COSTS, {"first": first, "last": last, "tenant": tenant})


def costs_of(session: Session, workload: str) -> list[Cost]:
    """Returns all costs of one workload so far, by day."""
    return _read(session, _OF_WORKLOAD, {"workload": workload})


def count_ended(session: Session, most: int) -> int:
    """Adds up to `most` ended attempts to the sums by day, and returns how many."""
    return int(session.execute(_COUNT, {"most": most, "codes": _CODES}).scalar_one())


def ended_totals(session: Session) -> list[tuple[str, int, float]]:
    """Returns the preemptions of all attempts that have ended so far, and the work that they lost, by region."""
    rows: Sequence[Any] = session.execute(_TOTALS, {"codes": _CODES}).all()
    return [(row.region, int(row.preemptions), float(row.lost_s)) for row in rows]


def _read(session: Session, statement: Any, asked: dict[str, Any]) -> list[Cost]:
    rows: Sequence[Any] = session.execute(statement, asked).all()
    return [Cost(r.day, r.tenant, CapacityKind(r.capacity), r.resource, r.hours, r.unpriced_h, r.usd) for r in rows]
