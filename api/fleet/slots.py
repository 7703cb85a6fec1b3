"""Slots of machines, for the console's pictures of the fleet: counts by region, and the use of each slot."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Float, cast, func, or_, select
from sqlalchemy.dialects.postgresql import BIT
from sqlalchemy.orm import Session

from domain.capacity import CPU, CapacityKind
from infra.db.models import Allocation, Cluster, Machine, Workload


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


@dataclass(frozen=True)
class MachineSlots:
    """The slots of one machine, as bit masks."""

    id: str
    gpus: int
    held: int
    promised: int
    withheld: int
    state: str
    is_closed: bool
    """Whether the machine is cordoned or being drained."""
    is_busy: bool
    """Whether workloads hold CPUs of the machine."""


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


def slots_of_machines(session: Session, region: str) -> list[MachineSlots]:
    """Returns the slots of a region's machines, sorted by id."""
    found = session.execute(
        select(
            Machine.id, Machine.gpus, Machine.held, Machine.promised, Machine.withheld, Machine.state,
            or_(Machine.cordon.is_not(None), Machine.draining), Machine.free_cpus_milli < Machine.cpus_milli,
        ).where(Machine.region == region).order_by(Machine.id)
    )  # fmt: skip
    return [MachineSlots(*row) for row in found]


class MachineTerms(NamedTuple):
    """How a machine was obtained, and what it costs."""

    kind: CapacityKind
    usd_per_h: float | None
    """The price of a GPU, or of a core of a machine without GPUs; None: unknown."""


def terms_of_machines(session: Session, region: str) -> dict[str, MachineTerms]:
    """Returns the terms of a region's machines, by machine."""
    resource = func.coalesce(Machine.gpu_type, CPU)
    found = session.execute(
        select(Machine.id, Cluster.capacity, cast(Cluster.prices.op("->>")(resource), Float))
        .select_from(Machine)
        .join(Cluster, (Cluster.region == Machine.region) & (Cluster.name == Machine.cluster))
        .where(Machine.region == region)
    )
    return {id_: MachineTerms(CapacityKind(kind), usd_per_h) for id_, kind, usd_per_h in found}


class HeldSlots(NamedTuple):
    """Slots of one machine that a tenant held."""

    machine: str
    tenant: str
    slots: int


def slots_held_at(session: Session, region: str, at: datetime) -> list[HeldSlots]:
    """Returns the slots of the region's present machines that tenants held at a time in the past."""
    was_held = (Allocation.held_at <= at) & (Allocation.released_at.is_(None) | (Allocation.released_at > at))
    wanted = (
        select(Allocation.machine, Workload.tenant, Allocation.slots)
        .join(Machine, Machine.id == Allocation.machine)
        .join(Workload, Workload.id == Allocation.workload)
        .where(Machine.region == region, was_held)
    )
    return [HeldSlots(*row) for row in session.execute(wanted)]


def as_held(machines: Sequence[MachineSlots], held: Sequence[HeldSlots]) -> list[MachineSlots]:
    """Returns the machines with only these slots held. Their other states at that time are not recorded."""
    masks: dict[str, int] = {}
    for one in held:
        masks[one.machine] = masks.get(one.machine, 0) | one.slots
    return [
        replace(
            machine, held=masks.get(machine.id, 0), is_busy=machine.id in masks, promised=0, withheld=0, state="ready",
            is_closed=False,
        )
        for machine in machines
    ]  # fmt: skip


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


def moves(session: Session, region: str, tenant: str | None, begin: datetime, end: datetime, limit: int) -> list[Stay]:
    """Returns the attempts that started or ended between two times, those with the most GPUs first.

    `tenant`: the only tenant whose attempts are returned; None: all.
    """
    came = Allocation.held_at.between(begin, end)
    left = Allocation.released_at.between(begin, end)
    wanted = (
        select(
            Allocation.workload, Workload.name, Workload.tenant, Allocation.attempt, func.count(),
            func.sum(func.bit_count(cast(Allocation.slots, BIT(64)))), func.min(Allocation.held_at),
            func.max(Allocation.released_at),
        )
        .join(Machine, Machine.id == Allocation.machine)
        .join(Workload, Workload.id == Allocation.workload)
        .where(Machine.region == region, Allocation.released_at.is_(None) | (Allocation.released_at >= begin))
        .where(came | left)
        .group_by(Allocation.workload, Workload.name, Workload.tenant, Allocation.attempt)
        .order_by(func.sum(func.bit_count(cast(Allocation.slots, BIT(64)))).desc(), Allocation.workload)
        .limit(limit)
    )  # fmt: skip
    if tenant is not None:
        wanted = wanted.where(Workload.tenant == tenant)
    return [Stay(*row) for row in session.execute(wanted)]


def slots_of_tenants(session: Session, region: str, tenant: str | None) -> list[tuple[str, str, int]]:
    """Returns rows of (machine, tenant, mask of held slots), of all tenants or only of `tenant`."""
    wanted = (
        select(Allocation.machine, Workload.tenant, Allocation.slots)
        .join(Machine, Machine.id == Allocation.machine)
        .join(Workload, Workload.id == Allocation.workload)
        .where(Allocation.released_at.is_(None), Allocation.slots != 0, Machine.region == region)
    )
    if tenant is not None:
        wanted = wanted.where(Workload.tenant == tenant)
    return [(machine, owner, slots) for machine, owner, slots in session.execute(wanted)]
