"""Endpoint that exports a snapshot of fleet, tenants and workloads for `mizzen what-if`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.auth import Operator
from api.routing import Router
from api.state import StateOf
from domain.capacity import CPU, CapacityKind
from domain.live import (
    LiveMachine,
    LivePlacement,
    LiveSnapshot,
    LiveTenant,
    LiveWorkload,
)
from domain.phases import Phase
from domain.priority import HIGHEST_LEVEL
from domain.scheduling import Holding
from domain.spec import WorkloadSpec
from infra.db.catalogue import Replicas, can_read, ready_replicas
from infra.db.models import Allocation, Attempt, Cluster, Machine, Region, Workload
from infra.db.session import transaction
from infra.db.tenants import Tenant

router = Router(prefix="/v1", tags=["fleet"])


@router.get("/snapshot", summary="Export a snapshot for the simulator")
def get_snapshot(state: StateOf, _: Operator) -> LiveSnapshot:
    """Returns the machines that accept work, the tenants with their quotas, and every workload that has not ended.

    `mizzen what-if` starts from this snapshot. It contains no commands, files or secrets.
    """
    with transaction(state.engine, isolation="REPEATABLE READ") as session:
        return LiveSnapshot(
            taken_at=session.execute(select(func.transaction_timestamp())).scalar_one(),
            machines=_machines(session),
            tenants=_tenants(session),
            workloads=_workloads(session),
        )


def _machines(session: Session) -> tuple[LiveMachine, ...]:
    rows = session.execute(
        select(Machine, Cluster)
        .join(Cluster, (Cluster.region == Machine.region) & (Cluster.name == Machine.cluster))
        .where(
            Machine.state == "ready", Machine.cordon.is_(None), Machine.draining.is_(False), Cluster.tenant.is_(None)
        )
        .order_by(Machine.id)
    )
    return tuple(
        LiveMachine(
            id=m.id,
            region=m.region,
            cluster=m.cluster,
            rack=m.rack,
            gpu_type=m.gpu_type,
            # A slot that the owner has taken is not counted, unless a workload still holds it.
            gpus=m.gpus - (m.withheld & ~m.held).bit_count(),
            cpus_milli=m.cpus_milli,
            memory_bytes=m.memory_bytes,
            capacity=CapacityKind(c.capacity),
            gpu_usd_per_h=c.prices.get(m.gpu_type or "", 0.0),
            core_usd_per_h=c.prices.get(CPU, 0.0),
            departures_per_h=c.departures_per_h,
        )
        for m, c in rows
    )


def _tenants(session: Session) -> tuple[LiveTenant, ...]:
    return tuple(
        LiveTenant(
            name=t.name,
            level=t.level,
            quota_gpus={kind: int(slots) for kind, slots in t.quota_gpus.items()},
            quota_cpus_milli=t.quota_cpus_milli,
        )
        for t in session.scalars(select(Tenant).order_by(Tenant.name))
    )


def _workloads(session: Session) -> tuple[LiveWorkload, ...]:
    live = session.scalars(select(Workload).where(Workload.finished_at.is_(None)).order_by(Workload.id)).all()
    ids = [row.id for row in live]
    attempts = session.scalars(select(Attempt).where(Attempt.workload.in_(ids))).all()
    now: datetime = session.execute(select(func.transaction_timestamp())).scalar_one()
    ran_s: dict[str, float] = defaultdict(float)
    current: dict[str, Attempt] = {}
    for attempt in attempts:
        if attempt.started_at is not None:
            ran_s[attempt.workload] += max(0.0, ((attempt.released_at or now) - attempt.started_at).total_seconds())
        if attempt.released_at is None and attempt.evicting_since is None:
            current[attempt.workload] = attempt
    holdings = _holdings(session, current)
    regions = tuple(session.scalars(select(Region.name).order_by(Region.name)))
    specs = {row.id: WorkloadSpec.model_validate(row.spec) for row in live}
    replicas = ready_replicas(session, {table for spec in specs.values() for table in spec.tables})
    levels = dict(session.execute(select(Tenant.name, Tenant.level)).all())
    may_be_in = {
        row.id: _regions(specs[row.id], max(levels[row.tenant], row.level or HIGHEST_LEVEL), regions, replicas)
        for row in live
    }
    return tuple(
        _workload(row, specs[row.id], may_be_in[row.id], ran_s[row.id], current.get(row.id), holdings) for row in live
    )


def _holdings(session: Session, current: Mapping[str, Attempt]) -> dict[str, list[Holding]]:
    """Returns the resources that current attempts hold or are promised, by workload."""
    out: dict[str, list[Holding]] = defaultdict(list)
    rows = session.scalars(
        select(Allocation).where(Allocation.released_at.is_(None)).order_by(Allocation.workload, Allocation.machine)
    )
    for row in rows:
        attempt = current.get(row.workload)
        if attempt is not None and attempt.attempt == row.attempt:
            gpus = (row.slots | row.awaited).bit_count()
            holding = Holding(machine=row.machine, gpus=gpus, cpus_milli=row.cpus_milli, memory_bytes=row.memory_bytes)
            out[row.workload].append(holding)
    return out


def _regions(spec: WorkloadSpec, level: int, regions: Iterable[str], replicas: Replicas) -> tuple[str, ...] | None:
    if not spec.tables and spec.regions_allowed is None and not spec.regions_excluded:
        return None
    return tuple(r for r in regions if spec.allows_region(r) and can_read(replicas, spec.tables, r, level=level))


def _workload(
    row: Workload,
    spec: WorkloadSpec,
    regions: tuple[str, ...] | None,
    ran_s: float,
    attempt: Attempt | None,
    holdings: Mapping[str, list[Holding]],
) -> LiveWorkload:
    placement = None
    if attempt is not None and row.phase != Phase.CHECKPOINTING and row.id in holdings:
        placement = LivePlacement(
            region=attempt.region,
            awarded_at=attempt.awarded_at,
            started_at=attempt.started_at,
            gpus={kind: int(slots) for kind, slots in attempt.gpu_types.items()},
            holdings=tuple(holdings[row.id]),
        )
    return LiveWorkload(
        id=row.id,
        tenant=row.tenant,
        submitted_at=row.submitted_at,
        paused_s=row.paused_s,
        level=row.level,
        submitted_by=row.submitted_by,
        held=(row.held_by or row.blocked) is not None,
        jobs=spec.requests(),
        regions=regions,
        ran_s=ran_s,
        max_runtime_s=spec.limits.max_runtime_s,
        placement=placement,
    )
