"""The plain scan pass: what `gms.scan` must equal, for tests and benches only.

It follows MAST 4.2 step by step over all tenants together: credits, then the placed workloads, then the pending ones in
the order of their credit.
"""

from math import fsum

from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobRequest, QueuedWorkload, QueueSnapshot, Ranked, ScanResult, TenantState

_CPUS = "cpus"
_Amounts = dict[str, int]
"""GPU type to slots, and under `cpus` thousandths of a core."""


def scan(snapshot: QueueSnapshot) -> ScanResult:
    """Ranks and queue order, as `gms.scan.scan` documents them.

    Raises:
        ValueError: a workload names a tenant that the snapshot lacks.
    """
    tenants = {tenant.name: tenant for tenant in snapshot.tenants}
    for name in [w.tenant for w in snapshot.placed] + [w.tenant for w in snapshot.pending]:
        if name not in tenants:
            raise ValueError(f"unknown tenant {name!r}")
    used: dict[str, _Amounts] = {name: {} for name in tenants}

    placed_ranks = {}
    for placed in sorted(snapshot.placed, key=lambda w: (w.awarded_at_s, w.id)):
        tenant = tenants[placed.tenant]
        need = {**placed.gpus, _CPUS: placed.cpus_milli}
        if _blocking(tenant, used[tenant.name], need):
            placed_ranks[placed.id] = 8
        else:
            _add(used[tenant.name], need)
            placed_ranks[placed.id] = max(tenant.level, placed.level_wish or 1)

    average = _average(snapshot)
    credited = [(_credit(snapshot, tenants[w.tenant], average, w), w) for w in snapshot.pending if not w.held]
    credited.sort(key=lambda pair: (-pair[0], pair[1].submitted_at_s, pair[1].id))

    queue = []
    submitted = {}
    for credit, workload in credited:
        tenant = tenants[workload.tenant]
        types, reason = _judge(tenant, used[tenant.name], workload.jobs)
        level = 7 if reason else max(tenant.level, workload.level_wish or 1)
        queue.append(Ranked(workload.id, 8 if reason else level, level, reason is not None, credit, types, reason))
        submitted[workload.id] = workload.submitted_at_s
    queue.sort(key=lambda ranked: (ranked.rank, -ranked.credit, submitted[ranked.id], ranked.id))
    return ScanResult(tuple(queue), placed_ranks)


def _average(snapshot: QueueSnapshot) -> float:
    shares = []
    for tenant in snapshot.tenants:
        if tenant.quota_cpus_milli is None or max([tenant.quota_cpus_milli, *tenant.quota_gpus.values()]) > 0:
            shares.append(tenant.window_share)
    return fsum(shares) / len(shares) if shares else 0.0


def _credit(snapshot: QueueSnapshot, tenant: TenantState, average: float, workload: QueuedWorkload) -> float:
    weights = snapshot.weights
    age = max(0.0, snapshot.now_s - workload.submitted_at_s)
    expression_10 = weights.w_age * min(age, weights.age_cap_s)
    expression_11 = weights.w_fair * (1 - tenant.window_share / average) if average else 0.0
    return expression_10 + expression_11


def _blocking(tenant: TenantState, used: _Amounts, need: _Amounts) -> list[str]:
    """The resources of which `need` on top of `used` is more than the quota."""
    blocking = []
    for resource, amount in need.items():
        quota = tenant.quota_cpus_milli if resource == _CPUS else tenant.quota_gpus.get(resource, 0)
        if amount and quota is not None and used.get(resource, 0) + amount > quota:
            blocking.append(resource)
    return blocking


def _add(used: _Amounts, need: _Amounts) -> None:
    for resource, amount in need.items():
        used[resource] = used.get(resource, 0) + amount


def _judge(
    tenant: TenantState, used: _Amounts, jobs: tuple[JobRequest, ...]
) -> tuple[tuple[tuple[str, ...], ...], Reason | None]:
    """The types on which the jobs may be placed, and why the workload is over-quota; counts it if it is not."""
    every_type = tuple(job.gpu_types for job in jobs)
    cpus = sum(job.tasks * job.cpus_milli_per_task for job in jobs)

    need = {_CPUS: cpus}
    for gpu_type in {t for types in every_type for t in types}:
        need[gpu_type] = sum(job.tasks * job.gpus_per_task for job in jobs if gpu_type in job.gpu_types)
    if not _blocking(tenant, used, need):
        _add(used, need)
        return every_type, None

    need = {}
    restricted: list[tuple[str, ...]] = []
    for job in jobs:
        slots = job.tasks * job.gpus_per_task
        if slots == 0 or not job.gpu_types:
            restricted.append(job.gpu_types)
            continue
        for gpu_type in job.gpu_types:
            if not _blocking(tenant, used, {gpu_type: need.get(gpu_type, 0) + slots}):
                need[gpu_type] = need.get(gpu_type, 0) + slots
                restricted.append((gpu_type,))
                break
        else:
            first = job.gpu_types[0]
            numbers = (used.get(first, 0), tenant.quota_gpus.get(first, 0), need.get(first, 0) + slots)
            return every_type, _exceeded(tenant, first, *numbers)
    need[_CPUS] = cpus
    if _blocking(tenant, used, need):
        milli = (used.get(_CPUS, 0), tenant.quota_cpus_milli or 0, cpus)
        return every_type, _exceeded(tenant, _CPUS, *(amount / 1000 for amount in milli))
    _add(used, need)
    return tuple(restricted), None


def _exceeded(tenant: TenantState, resource: str, used: float, quota: float, needs: float) -> Reason:
    detail = {"tenant": tenant.name, "resource": resource, "used": used, "quota": quota, "needs": needs}
    return Reason(ReasonCode.QUOTA_EXCEEDED, detail)
