"""The machines that owners lend, and the GPU hours that these have given.

Only attempts count that were launched with lent machines. A trigger notes their allocations when they end
(`functions/costs.sql`), and `count_given` adds these to the sums once, when their evidence is final. So the sums are
kept when workloads are deleted, and a read adds to them what the machine holds now and what ended in the last hour.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime

from sqlalchemy import BigInteger, ForeignKeyConstraint, Index, select, text, true, tuple_
from sqlalchemy.orm import Mapped, Session, aliased, mapped_column

from domain.capacity import CapacityKind
from domain.lifecycle.credit import EVIDENCE_S
from infra.db.base import Base
from infra.db.models import Cluster, Machine

DAYS = 30
"""Whole days (UTC) before today whose hours can be shown on their own."""
_FINAL_S = EVIDENCE_S + 300.0
"""Age of an end, in seconds, at which no transaction that writes evidence is still open."""
_LENT = select(Cluster.region, Cluster.name).where(Cluster.capacity == CapacityKind.VOLUNTARY.value)
_EVIDENCE = """
    evidence as (
        select h.machine, h.held_at, h.ended_at, bit_count(h.slots::bit(64)) as gpus,
               a.outcome ->> 'code' = 'platform_notice' as is_reclaimed,
               case when seen.at_s is not null then least(h.ended_at, to_timestamp(seen.at_s)) end as earned_at
        from held as h join attempt as a using (workload, attempt) cross join lateral (
            select greatest((a.earned -> 'checkpoint' ->> 1)::float8,
                            (a.earned -> 'steps' -> h.machine ->> 1)::float8) as at_s) as seen
        where a.launch_limit_s is not null
    )
"""
"""SQL: until when other evidence confirms that an allocation of `held` was used (`domain.lifecycle.credit`)."""
_SUMS = """
    coalesce(sum(gpus * extract(epoch from ended_at - held_at)), 0)::float8 / 3600 as held_gpu_h,
    coalesce(sum(gpus * extract(epoch from earned_at - held_at)) filter (where earned_at > held_at), 0)::float8 / 3600
        as given_gpu_h,
    min(held_at) as since, count(*) filter (where is_reclaimed) as reclaimed
"""
_FIRST_DAY = f"(now() at time zone 'UTC')::date - {DAYS}"
_GIVEN = text(
    f"""
    with held as (
        select workload, attempt, machine, slots, held_at, now() as ended_at
        from allocation where machine = any(:machines) and released_at is null and held_at is not null
        union all
        select workload, attempt, machine, slots, held_at, released_at
        from given_pending join allocation using (workload, attempt, machine) where machine = any(:machines)
    ), {_EVIDENCE}, found as (
        select machine, {_SUMS},
               coalesce(sum(gpus * extract(epoch from earned_at - greatest(held_at, first.at)))
                        filter (where earned_at > greatest(held_at, first.at)), 0)::float8 / 3600 as given_gpu_h_30d
        from evidence, (select ({_FIRST_DAY})::timestamp at time zone 'UTC' as at) as first group by machine
        union all
        select machine, held_gpu_h, given_gpu_h, since, reclaimed, 0 from given_total where machine = any(:machines)
        union all
        select machine, 0, 0, null, 0, gpu_h from given_day where machine = any(:machines) and day >= {_FIRST_DAY}
    )
    select machine, sum(held_gpu_h) as held_gpu_h, sum(given_gpu_h) as given_gpu_h, min(since) as since,
           sum(reclaimed)::bigint as reclaimed, sum(given_gpu_h_30d) as given_gpu_h_30d
    from found group by machine
    """
)
_COUNT = text(
    f"""
    with taken as (
        delete from given_pending where (workload, attempt, machine) in (
            select workload, attempt, machine from given_pending
            where ended_at < now() - make_interval(secs => :final_s) order by ended_at, workload, machine limit :most
            for update skip locked)
        returning workload, attempt, machine
    ), held as (
        select workload, attempt, machine, slots, held_at, released_at as ended_at
        from taken join allocation using (workload, attempt, machine)
    ), {_EVIDENCE}, total as (
        insert into given_total as known (machine, held_gpu_h, given_gpu_h, since, reclaimed)
        select machine, {_SUMS} from evidence group by machine order by machine
        on conflict (machine) do update
        set held_gpu_h = known.held_gpu_h + excluded.held_gpu_h, given_gpu_h = known.given_gpu_h + excluded.given_gpu_h,
            since = least(known.since, excluded.since), reclaimed = known.reclaimed + excluded.reclaimed
    ), daily as (
        insert into given_day as known (machine, day, gpu_h)
        select machine, day::date, sum(gpus * extract(epoch from
            least(earned_at, (day + interval '1 day') at time zone 'UTC') - greatest(held_at, day at time zone 'UTC')
        ))::float8 / 3600
        from evidence, generate_series(date_trunc('day', held_at at time zone 'UTC'), earned_at at time zone 'UTC',
                                       interval '1 day') as day
        where earned_at > held_at and day >= {_FIRST_DAY} group by machine, day::date order by machine, day::date
        on conflict (machine, day) do update set gpu_h = known.gpu_h + excluded.gpu_h
    )
    select count(*) from taken
    """
)
_FORGET = text(f"delete from given_day where day < {_FIRST_DAY}")


class GivenPending(Base):
    """The allocation of an ended attempt that had lent machines, which is not in `given_total` yet."""

    __tablename__ = "given_pending"
    workload: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    machine: Mapped[str] = mapped_column(primary_key=True)
    ended_at: Mapped[datetime]
    __table_args__ = (
        ForeignKeyConstraint(
            ["workload", "attempt", "machine"],
            ["allocation.workload", "allocation.attempt", "allocation.machine"],
            ondelete="CASCADE",
        ),
        Index("given_pending_machine", "machine"),
    )


class GivenTotal(Base):
    """What a machine has given to ended attempts that had lent machines. Kept for ever."""

    __tablename__ = "given_total"
    machine: Mapped[str] = mapped_column(primary_key=True)
    """Not a foreign key, because what a removed machine has given is kept."""
    held_gpu_h: Mapped[float]
    given_gpu_h: Mapped[float]
    since: Mapped[datetime]
    reclaimed: Mapped[int] = mapped_column(BigInteger)


class GivenDay(Base):
    """The part of `given_total.given_gpu_h` on one day (UTC). Kept for `DAYS`."""

    __tablename__ = "given_day"
    machine: Mapped[str] = mapped_column(primary_key=True)
    day: Mapped[date] = mapped_column(primary_key=True)
    gpu_h: Mapped[float]


@dataclass(frozen=True)
class Given:
    """The GPU hours that a lent machine has given to workloads."""

    held_gpu_h: float
    """GPU hours that workloads have held."""
    given_gpu_h: float
    """The part of `held` that is confirmed by a checkpoint or another machine."""
    given_gpu_h_30d: float
    """The confirmed GPU hours of today and of the 30 days (UTC) before."""
    since: datetime | None
    """When a workload first held the machine."""
    reclaimed: int
    """Attempts that ended because the machine was taken back."""


NOTHING_GIVEN = Given(0.0, 0.0, 0.0, None, 0)


def lent_of(session: Session, machines: Mapping[str, Machine]) -> set[str]:
    """Returns the ids of the machines that owners lend."""
    clusters = {(region, name) for region, name in session.execute(_LENT)}
    return {id_ for id_, machine in machines.items() if (machine.region, machine.cluster) in clusters}


def lent_machines(session: Session, after: str, limit: int) -> list[Machine]:
    """Returns the first `limit` machines that owners lend, behind id `after`, sorted by region, cluster and name."""
    region, _, rest = after.partition("/")
    cluster = rest.partition("/")[0]
    # Cluster after cluster, so that Postgres stops at the limit and reads no machines of other clusters.
    lending = (
        select(Cluster.region, Cluster.name)
        .where(Cluster.capacity == CapacityKind.VOLUNTARY.value)
        .where(tuple_(Cluster.region, Cluster.name) >= tuple_(region, cluster))
        .order_by(Cluster.region, Cluster.name)
        .subquery()
    )
    own = (
        select(Machine)
        .where(Machine.region == lending.c.region, Machine.cluster == lending.c.name)
        .where(tuple_(Machine.region, Machine.cluster, Machine.id) > tuple_(region, cluster, after))
        .order_by(Machine.id)
        .limit(limit)
        .lateral()
    )
    machine = aliased(Machine, own)
    found = select(machine).select_from(lending).join(own, true())
    return list(session.scalars(found.order_by(lending.c.region, lending.c.name, machine.id).limit(limit)))


def given_by(session: Session, machines: Sequence[str]) -> dict[str, Given]:
    """Returns the GPU hours that machines have given, by machine id. Machines that were never used are absent."""
    found = session.execute(_GIVEN, {"machines": list(machines)})
    return {
        row.machine: Given(row.held_gpu_h, row.given_gpu_h, row.given_gpu_h_30d, row.since, row.reclaimed)
        for row in found
    }


def count_given(session: Session, most: int) -> int:
    """Adds up to `most` ended allocations, whose evidence is final, to the sums of their machines; returns how many."""
    return int(session.execute(_COUNT, {"most": most, "final_s": _FINAL_S}).scalar_one())


def forget_days(session: Session) -> None:
    """Deletes the sums of days that are not shown any more."""
    session.execute(_FORGET)
