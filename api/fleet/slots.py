"""Slots of machines, for the console's pictures of the fleet: counts by region, and the use of each slot."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from sqlalchemy import ColumnElement, TextClause, cast, func, or_, select, text
from sqlalchemy.dialects.postgresql import BIT
from sqlalchemy.orm import Session

from domain.capacity import CPU, CapacityKind
from infra.db.logs import MachineChange
from infra.db.models import WAS_HELD, Cluster, Machine


@dataclass(frozen=True)
class RegionSlots:
    """Machines and GPU slots of a region."""

    region: str
    machines: int
    ready: int
    closed: int
    """Machines that are cordoned or being drained."""
    gpus: int
    held: int
    withheld: int


class MachineTerms(NamedTuple):
    """How a machine was obtained, and what it costs."""

    kind: CapacityKind
    usd_per_h: float | None
    """The price of a GPU, or of a core of a machine without GPUs; None: unknown."""


class SlotHolders(NamedTuple):
    """Slots that workloads of known tenants hold, an element for each allocation."""

    machine: npt.NDArray[np.int64]
    """Index of the machine in `RegionMasks.ids`."""
    slots: npt.NDArray[np.uint64]
    tenant: npt.NDArray[np.int64]
    """Index of the tenant in the list of the query."""


@dataclass(frozen=True)
class RegionMasks:
    """The slots of a region's machines, sorted by id: columns with an element for each machine.

    Slots are bit masks. A machine without GPUs has one slot, which is held while workloads hold CPUs of the machine.
    """

    names: str
    """The ids of the machines, one a line."""
    slots: npt.NDArray[np.int64]
    """Number of slots."""
    held: npt.NDArray[np.uint64]
    promised: npt.NDArray[np.uint64]
    withheld: npt.NDArray[np.uint64]
    is_lost: npt.NDArray[np.bool_]
    is_closed: npt.NDArray[np.bool_]
    """Whether the machine is cordoned or being drained."""
    holders: SlotHolders
    terms: Sequence[MachineTerms] = ()
    """Empty unless they were requested."""

    @property
    def ids(self) -> list[str]:
        """The ids of the machines."""
        return self.names.split("\n") if self.names else []


def _counts() -> tuple[ColumnElement[Any], ...]:
    """Returns the columns of `RegionSlots` after the region."""
    closed = or_(Machine.cordon.is_not(None), Machine.draining)
    return (
        func.count(), func.count().filter(Machine.state == "ready"), func.count().filter(closed),
        func.sum(Machine.gpus), func.sum(func.bit_count(cast(Machine.held, BIT(64)))),
        func.sum(func.bit_count(cast(Machine.withheld, BIT(64)))),
    )  # fmt: skip


def slots_by_region(session: Session) -> list[RegionSlots]:
    """Returns the counts of all regions that have machines, sorted by name."""
    found = session.execute(select(Machine.region, *_counts()).group_by(Machine.region).order_by(Machine.region))
    return [RegionSlots(region, *map(int, counts)) for region, *counts in found]


@dataclass(frozen=True)
class ClusterSlots(RegionSlots):
    """Machines and GPU slots of a cluster."""

    cluster: str
    zone: str
    kind: CapacityKind


def slots_by_cluster(session: Session, region: str) -> list[ClusterSlots]:
    """Returns the counts of a region's clusters that have machines, sorted by zone and name."""
    found = session.execute(
        select(Machine.region, *_counts(), Cluster.name, func.coalesce(Cluster.zone, ""), Cluster.capacity)
        .join(Cluster, (Cluster.region == Machine.region) & (Cluster.name == Machine.cluster))
        .where(Machine.region == region)
        .group_by(Machine.region, Cluster.name, Cluster.zone, Cluster.capacity)
        .order_by(func.coalesce(Cluster.zone, ""), Cluster.name)
    )
    return [
        ClusterSlots(region, machines, ready, closed, gpus, held, withheld, cluster, zone, CapacityKind(kind))
        for region, machines, ready, closed, gpus, held, withheld, cluster, zone, kind in found
    ]


_MACHINES = """
    select coalesce(string_agg(id, E'\\n' order by number), '') as names,
           string_agg(int8send(slots), '' order by number) as slots,
           string_agg(int8send(held), '' order by number) as held,
           string_agg(int8send(promised), '' order by number) as promised,
           string_agg(int8send(withheld), '' order by number) as withheld,
           string_agg(int8send(is_lost::int), '' order by number) as is_lost,
           string_agg(int8send(is_closed::int), '' order by number) as is_closed,
           string_agg(term, E'\\n' order by number) as terms from m"""
_HOLDERS = """
    select string_agg(int8send(number), '') as machine, string_agg(int8send(mask), '') as mask,
           string_agg(int8send(tenant), '') as tenant from h where tenant is not null"""
_PACKED = f"select * from ({_MACHINES}) as machines, ({_HOLDERS}) as holders"
"""SQL: columns as bytes, because Python would need more time for rows than for the picture."""
_TENANT = "(select tenant from workload where id = a.workload)"
"""SQL: a lookup by key for each allocation. A join can become a scan of all workloads that the tenants ever had."""
_NOW = text(f"""
    with m as materialized (
        select id, gpus, greatest(gpus, 1) as slots, state = 'lost' as is_lost,
               case when gpus > 0 then held else (free_cpus_milli < cpus_milli)::int end as held, promised, withheld,
               cordon is not null or draining as is_closed, row_number() over (order by id) - 1 as number,
               case when :with_terms then (
                   select format('%s %s', capacity, prices ->> coalesce(m.gpu_type, '{CPU}'))
                   from cluster where region = m.region and name = m.cluster) end as term
        from machine as m where region = :region
    ), h as (
        select number, case when gpus > 0 then a.slots else 1 end as mask,
               array_position(cast(:tenants as text[]), {_TENANT}) - 1 as tenant
        from allocation as a join m on m.id = a.machine
        where cardinality(cast(:tenants as text[])) > 0 and a.released_at is null
    )
    {_PACKED}
""")
_PAST = text(f"""
    with a as materialized (
        select machine, workload, slots from allocation where released_at is null and held_at <= :at
        union all
        select machine, workload, slots from allocation
        where {WAS_HELD} @> cast(:at as timestamptz) and held_at is not null and released_at > :at
    ), m as materialized (
        select id, gpus, row_number() over (order by id) - 1 as number,
               case when registered_at > :at and own.machine is null then 0 else greatest(gpus, 1) end as slots,
               past.state is not distinct from 'lost' as is_lost, coalesce(past.is_closed, false) as is_closed,
               case when gpus > 0 then coalesce(own.slots, 0) else (own.machine is not null)::int end as held,
               0 as promised, 0 as withheld, null as term
        from machine left join (select machine, bit_or(slots) as slots from a group by 1) as own on own.machine = id
        left join lateral (
            select state, is_closed from machine_change where machine = id and since <= :at order by since desc limit 1
        ) as past on true
        where region = :region
    ), h as (
        select number, case when gpus > 0 then a.slots else 1 end as mask,
               array_position(cast(:tenants as text[]), {_TENANT}) - 1 as tenant
        from a join m on m.id = a.machine where cardinality(cast(:tenants as text[])) > 0
    )
    {_PACKED}
""")


def slots_now(session: Session, region: str, tenants: Sequence[str] = (), *, with_terms: bool = False) -> RegionMasks:
    """Returns the slots of a region's machines, with the allocations of these tenants."""
    return _masks(session, _NOW, {"region": region, "tenants": list(tenants), "with_terms": with_terms})


def slots_at(session: Session, region: str, tenants: Sequence[str], at: datetime) -> RegionMasks:
    """Returns the slots of a region's present machines at a time in the past, with the allocations of these tenants.

    A machine that registered after `at` has no slots. Slots that were promised, or that an owner had taken back, are
    not shown, because their past is not stored.
    """
    return _masks(session, _PAST, {"region": region, "tenants": list(tenants), "at": at})


def _masks(session: Session, statement: TextClause, given: Mapping[str, object]) -> RegionMasks:
    row = session.execute(statement, given).one()

    def column(packed: bytes | None) -> npt.NDArray[np.int64]:
        return np.frombuffer(packed or b"", ">i8").astype(np.int64)

    names = row.terms.split("\n") if row.terms is not None else []
    known = {name: _terms(name) for name in set(names)}
    return RegionMasks(
        names=row.names,
        slots=column(row.slots),
        held=column(row.held).view(np.uint64),
        promised=column(row.promised).view(np.uint64),
        withheld=column(row.withheld).view(np.uint64),
        is_lost=column(row.is_lost) != 0,
        is_closed=column(row.is_closed) != 0,
        holders=SlotHolders(column(row.machine), column(row.mask).view(np.uint64), column(row.tenant)),
        terms=[known[name] for name in names],
    )


def _terms(name: str) -> MachineTerms:
    kind, _, usd_per_h = name.partition(" ")
    return MachineTerms(CapacityKind(kind), float(usd_per_h) if usd_per_h else None)


class Stay(NamedTuple):
    """The slots that an attempt of a workload has held in a region, and when."""

    workload: str
    name: str
    tenant: str
    attempt: int
    machines: int
    gpus: int
    held_at: datetime
    released_at: datetime | None


_CAME_OR_LEFT = "(held_at between :begin and :end or released_at between :begin and :end)"
_MOVES = text(f"""
    select a.workload, w.name, w.tenant, a.attempt, count(*), sum(bit_count(a.slots::bit(64))), min(a.held_at),
           max(a.released_at)
    from (
        select * from allocation where released_at is null and {_CAME_OR_LEFT}
        union all
        select * from allocation
        where {WAS_HELD} && tstzrange(:begin, :end, '[]') and held_at is not null and released_at is not null
          and {_CAME_OR_LEFT}
    ) as a join machine as m on m.id = a.machine
    cross join lateral (select name, tenant from workload where id = a.workload offset 0) as w
    where m.region = :region and (cast(:tenant as text) is null or w.tenant = :tenant)
    group by a.workload, w.name, w.tenant, a.attempt order by 6 desc, 1 limit :limit
""")


def moves(session: Session, region: str, tenant: str | None, begin: datetime, end: datetime, limit: int) -> list[Stay]:
    """Returns the attempts that started or ended between two times, those with the most GPUs first.

    `tenant`: the only tenant whose attempts are returned; None: all.
    """
    given = {"region": region, "tenant": tenant, "begin": begin, "end": end, "limit": limit}
    return [Stay(*row) for row in session.execute(_MOVES, given)]


class StateChange(NamedTuple):
    """The state of a machine from a time on."""

    machine: str
    since: datetime
    state: str
    is_closed: bool
    """Whether the machine was cordoned or drained."""


def state_changes(session: Session, region: str, begin: datetime, end: datetime, limit: int) -> list[StateChange]:
    """Returns the changes of the states of a region's present machines between two times, the newest first."""
    found = session.execute(
        select(MachineChange.machine, MachineChange.since, MachineChange.state, MachineChange.is_closed)
        .join(Machine, Machine.id == MachineChange.machine)
        .where(Machine.region == region, MachineChange.since.between(begin, end))
        .order_by(MachineChange.since.desc(), MachineChange.machine)
        .limit(limit)
    )
    return [StateChange(*row) for row in found]
