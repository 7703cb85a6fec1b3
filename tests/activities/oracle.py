"""Full reads of Postgres for every decision. The columns in memory must give the same results."""

from collections import defaultdict
from datetime import datetime
from math import inf

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from domain.phases import QUEUED_PHASES
from domain.scheduling import (
    CreditWeights,
    Holding,
    MachineState,
    PlacedWorkload,
    QueuedWorkload,
    QueueSnapshot,
    RegionSnapshot,
    RunningWorkload,
    TenantState,
)
from domain.spec import WorkloadSpec
from infra.config.scheduling import SchedulerSettings
from infra.db.models import Allocation, Attempt, Cluster, Machine, Workload
from infra.db.tenants import Tenant


def now_s(session: Session) -> float:
    """Returns the time of the database's clock, which all schedulers share."""
    now: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return now.timestamp()


def queue_snapshot(session: Session, settings: SchedulerSettings, now: float | None = None) -> QueueSnapshot:
    """Returns the input of a GMS scan at the time `now`, by default the current time."""
    now = now_s(session) if now is None else now
    shares = window_shares(session, now, settings.fair_window_s)  # No scan has marked a time without contest.
    people = user_shares(session, now, settings.fair_window_s)
    tenants = tuple(
        TenantState(
            name=row.name,
            level=row.level,
            quota_gpus={k: int(v) for k, v in row.quota_gpus.items()},
            quota_cpus_milli=row.quota_cpus_milli,
            window_share=shares.get(row.name, 0.0),
            user_shares={user: share for (tenant, user), share in people.items() if tenant == row.name},
        )
        for row in session.scalars(select(Tenant).order_by(Tenant.name))
    )
    pending = tuple(
        QueuedWorkload(
            id=row.id,
            tenant=row.tenant,
            submitted_at_s=row.submitted_at.timestamp() + row.paused_s,
            jobs=WorkloadSpec.model_validate(row.spec).requests(),
            requested_level=row.level,
            held=row.held_by is not None,
            user=row.submitted_by,
            gpu_s=_gpu_s(WorkloadSpec.model_validate(row.spec)),
        )
        for row in session.scalars(
            select(Workload).where(Workload.phase.in_(sorted(QUEUED_PHASES)), Workload.finished_at.is_(None))
        )
    )
    placed = tuple(
        PlacedWorkload(
            id=row.id,
            tenant=row.tenant,
            awarded_at_s=attempt.awarded_at.timestamp(),
            gpus={k: int(v) for k, v in attempt.gpu_types.items()},
            cpus_milli=attempt.cpus_milli,
            requested_level=row.level,
        )
        for row, attempt in session.execute(
            select(Workload, Attempt)
            .join(Attempt, Attempt.workload == Workload.id)
            .where(Attempt.released_at.is_(None))
            .order_by(Workload.id)
        )
    )
    weights = CreditWeights(
        w_age=settings.w_age,
        age_cap_s=settings.age_cap_s,
        w_fair=settings.w_fair,
        w_user=settings.w_user,
        w_short=settings.w_short,
    )
    return QueueSnapshot(now_s=now, tenants=tenants, pending=pending, placed=placed, weights=weights)


def _gpu_s(spec: WorkloadSpec) -> float:
    gpus = sum(job.tasks * job.gpus_per_task for job in spec.requests())
    return inf if spec.limits.max_runtime_s is None else spec.limits.max_runtime_s * (gpus or 1)


def window_shares(session: Session, now: float, window_s: float) -> dict[str, float]:
    """Returns each tenant's average use over the window: the larger of its shares of its quotas of GPUs and CPUs."""
    gpus, cpus = _fleet(session)
    quotas = {t.name: (sum(t.quota_gpus.values()), t.quota_cpus_milli) for t in session.scalars(select(Tenant))}
    shares = {}
    for tenant, _, gpu_s, cpu_s in _uses(session, now, window_s, by="w.tenant, ''"):
        quota_gpus, quota_cpus = quotas[tenant]
        whole = cpus if quota_cpus is None else max(1000.0, quota_cpus)
        shares[tenant] = max(
            gpu_s / window_s / max(1, quota_gpus) if gpus else 0.0, cpu_s / window_s / whole if cpus else 0.0
        )
    return shares


def user_shares(session: Session, now: float, window_s: float) -> dict[tuple[str, str], float]:
    """Returns the average use of each tenant's people: the larger of their shares of the fleet's GPUs and CPUs."""
    gpus, cpus = _fleet(session)
    shares = {
        (tenant, user): max(gpu_s / window_s / gpus if gpus else 0.0, cpu_s / window_s / cpus if cpus else 0.0)
        for tenant, user, gpu_s, cpu_s in _uses(session, now, window_s, by="w.tenant, w.submitted_by")
    }
    return {person: share for person, share in shares.items() if share > 0}


def _fleet(session: Session) -> tuple[float, float]:
    amounts = func.coalesce(func.sum(Machine.gpus), 0), func.coalesce(func.sum(Machine.cpus_milli), 0)
    gpus, cpus = session.execute(select(*amounts).where(Machine.state == "ready")).one()
    return float(gpus), float(cpus)


def _uses(session: Session, now: float, window_s: float, by: str) -> list[tuple[str, str, float, float]]:
    rows = session.execute(
        text(
            f"""
            select {by},
                   sum(held_s * (select coalesce(sum(v::bigint), 0) from jsonb_each_text(a.gpu_types) as g(k, v))),
                   sum(held_s * a.cpus_milli)
            from (select workload, gpu_types, cpus_milli,
                         extract(epoch from least(coalesce(released_at, to_timestamp(:now)), to_timestamp(:now))
                                          - greatest(awarded_at, to_timestamp(:start)))::float8 as held_s
                  from attempt where released_at is null or released_at > to_timestamp(:start)) as a
            join workload as w on w.id = a.workload
            where held_s > 0
            group by 1, 2
            """
        ),
        {"now": now, "start": now - window_s},
    )
    return [(tenant, user, float(gpu_s or 0), float(cpu_s or 0)) for tenant, user, gpu_s, cpu_s in rows]


def region_snapshot(
    session: Session, region: str, settings: SchedulerSettings, now: float | None = None
) -> RegionSnapshot:
    """Returns a region's schedulable machines and placed workloads at the time `now`, by default the current time."""
    machines = session.scalars(
        select(Machine)
        .where(
            Machine.region == region,
            Machine.state == "ready",
            Machine.cordon.is_(None),
            Machine.draining.is_(False),
        )
        .order_by(Machine.id)
    ).all()
    clusters = {c.name: c for c in session.scalars(select(Cluster).where(Cluster.region == region))}
    now = now_s(session) if now is None else now
    holdings: dict[str, list[Holding]] = defaultdict(list)
    attempts: dict[str, Attempt] = {}
    for allocation, attempt, withheld in session.execute(
        select(Allocation, Attempt, Machine.withheld)
        .join(Machine, Machine.id == Allocation.machine)
        .join(Attempt, (Attempt.workload == Allocation.workload) & (Attempt.attempt == Allocation.attempt))
        .where(Allocation.released_at.is_(None), Attempt.region == region)
        .order_by(Allocation.workload, Allocation.machine)
    ):
        attempts[allocation.workload] = attempt
        holdings[allocation.workload].append(
            Holding(
                machine=allocation.machine,
                gpus=(allocation.slots & ~withheld).bit_count(),
                cpus_milli=allocation.cpus_milli - allocation.awaited_cpus_milli,
                memory_bytes=allocation.memory_bytes - allocation.awaited_memory_bytes,
            )
        )
    return RegionSnapshot(
        region=region,
        now_s=now,
        machines=tuple(
            MachineState(
                id=m.id,
                cluster=m.cluster,
                rack=m.rack,
                gpu_type=m.gpu_type,
                gpus=m.gpus,
                free_gpus=m.gpus - (m.held | m.withheld).bit_count(),
                free_cpus_milli=m.free_cpus_milli,
                free_memory_bytes=m.free_memory_bytes,
                cpus_milli=m.cpus_milli,
                memory_bytes=m.memory_bytes,
                capacity=clusters[m.cluster].capacity,
                gpu_usd_per_h=clusters[m.cluster].prices.get(m.gpu_type or "", 0.0),
                core_usd_per_h=clusters[m.cluster].prices.get("cpu", 0.0),
                departures_per_h=clusters[m.cluster].departures_per_h,
            )
            for m in machines
        ),
        running=tuple(
            _running(attempts[workload], tuple(held), now, settings) for workload, held in sorted(holdings.items())
        ),
    )


def _running(attempt: Attempt, held: tuple[Holding, ...], now: float, settings: SchedulerSettings) -> RunningWorkload:
    started = (attempt.started_at or attempt.awarded_at).timestamp()
    since = attempt.checkpoint_at or (attempt.started_at if attempt.resumed_step is not None else None)
    return RunningWorkload(
        id=attempt.workload,
        rank=attempt.rank,
        started_at_s=started,
        holdings=held,
        last_checkpoint_at_s=since.timestamp() if since else None,
        evictable=(
            attempt.ready_at is not None and attempt.evicting_since is None and now - started >= settings.min_runtime_s
        ),
        attempt=attempt.attempt,
    )
