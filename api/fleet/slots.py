"""Slots of machines, for pictures of the fleet: counts by region, and the use of each slot of a region."""

from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import cast, func, or_, select
from sqlalchemy.dialects.postgresql import BIT
from sqlalchemy.orm import Session

from infra.db.models import Allocation, Machine, Workload


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
    """Whether it is cordoned or being drained."""
    is_busy: bool
    """Whether CPUs of it are held."""


def slots_by_region(session: Session) -> list[RegionSlots]:
    """Returns the counts of all regions that have machines, sorted by name."""
    closed = or_(Machine.cordon.is_not(None), Machine.draining)
    found = session.execute(
        select(
            Machine.region, func.count(), func.count().filter(Machine.state == "ready"), func.count().filter(closed),
            func.sum(Machine.gpus), func.sum(func.bit_count(cast(Machine.held, BIT(64)))),
            func.sum(func.bit_count(cast(Machine.withheld, BIT(64)))),
        ).group_by(Machine.region).order_by(Machine.region)
    )  # fmt: skip
    return [RegionSlots(region, *map(int, counts)) for region, *counts in found]


def slots_of_machines(session: Session, region: str) -> list[MachineSlots]:
    """Returns the slots of a region's machines, sorted by id."""
    found = session.execute(
        select(
            Machine.id, Machine.gpus, Machine.held, Machine.promised, Machine.withheld, Machine.state,
            or_(Machine.cordon.is_not(None), Machine.draining), Machine.free_cpus_milli < Machine.cpus_milli,
        ).where(Machine.region == region).order_by(Machine.id)
    )  # fmt: skip
    return [MachineSlots(*row) for row in found]


def slots_of_tenants(session: Session, region: str, tenant: str | None) -> dict[str, list[tuple[str, int]]]:
    """Returns the tenants of held slots, with their masks, by machine: all, or only `tenant`."""
    wanted = (
        select(Allocation.machine, Workload.tenant, Allocation.slots)
        .join(Machine, Machine.id == Allocation.machine)
        .join(Workload, Workload.id == Allocation.workload)
        .where(Allocation.released_at.is_(None), Allocation.slots != 0, Machine.region == region)
    )
    if tenant is not None:
        wanted = wanted.where(Workload.tenant == tenant)
    out: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for machine, owner, slots in session.execute(wanted):
        out[machine].append((owner, slots))
    return dict(out)
