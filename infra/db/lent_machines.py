"""The machines that owners lend, and the GPU hours that these have given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, text, true, tuple_
from sqlalchemy.orm import Session, aliased

from domain.capacity import CapacityKind
from infra.db.models import Cluster, Machine

_LENT = select(Cluster.region, Cluster.name).where(Cluster.capacity == CapacityKind.VOLUNTARY.value)
_GIVEN = text("""
    with held as (
        select machine, workload, attempt, bit_count(slots::bit(64)) as gpus, held_at, now() as ended_at
        from allocation where machine = any(:machines) and released_at is null and held_at is not null
        union all
        select machine, workload, attempt, bit_count(slots::bit(64)), held_at, released_at
        from allocation where machine = any(:machines) and released_at is not null and held_at is not null
    ), given as (
        select h.*, a.outcome ->> 'code' = 'platform_notice' as is_reclaimed,
               case when seen.at_s is not null then least(ended_at, to_timestamp(seen.at_s)) end as earned_at
        from held as h join attempt as a using (workload, attempt) cross join lateral (
            select greatest((a.earned -> 'checkpoint' ->> 1)::float8,
                            (a.earned -> 'steps' -> h.machine ->> 1)::float8) as at_s) as seen
    )
    select machine, coalesce(sum(gpus * extract(epoch from ended_at - held_at)), 0)::float8 / 3600 as held_gpu_h,
           coalesce(sum(gpus * extract(epoch from earned_at - held_at))
                    filter (where earned_at > held_at), 0)::float8 / 3600 as given_gpu_h,
           coalesce(sum(gpus * extract(epoch from earned_at - greatest(held_at, now() - interval '30 days')))
                    filter (where earned_at > greatest(held_at, now() - interval '30 days')), 0)::float8 / 3600
               as given_gpu_h_30d,
           min(held_at) as since, count(*) filter (where is_reclaimed) as reclaimed
    from given group by machine
""")
"""SQL columns: GPU hours confirmed by other evidence (`domain.lifecycle.credit`), and all GPU hours that were held."""


@dataclass(frozen=True)
class Given:
    """The GPU hours that a lent machine has given to workloads."""

    held_gpu_h: float
    """GPU hours that workloads have held."""
    given_gpu_h: float
    """The part of `held` that is confirmed by a checkpoint or another machine."""
    given_gpu_h_30d: float
    """The confirmed GPU hours of the last 30 days."""
    since: datetime | None
    """Begin of the records."""
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
