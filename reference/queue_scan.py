"""Plain reference implementation of `gms.scan`, for tests and benchmarks only.

It follows MAST 4.2 step by step for all tenants: ranks of placed workloads, credits, then the pending workloads by
level and descending credit.
"""

from dataclasses import replace
from math import ceil, fsum, inf, log2

from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobRequest, PlacedWorkload, QueuedWorkload, QueueSnapshot, Ranked, ScanResult, TenantState

_CPUS = "cpus"
_Amounts = dict[str, int]
"""Maps GPU types to slots, and the key `cpus` to thousandths of a core."""


def scan(snapshot: QueueSnapshot, *, flat: bool = False) -> ScanResult:
    """Returns the ranks and the queue order that `gms.scan.scan_queue` documents.

    Raises:
        ValueError: a workload names a tenant that is not in the snapshot.
    """
    tenants = {tenant.name: tenant for tenant in snapshot.tenants}
    for name in [w.tenant for w in snapshot.placed] + [w.tenant for w in snapshot.pending]:
        if name not in tenants:
            raise ValueError(f"unknown tenant {name!r}")
    everything: list[PlacedWorkload | QueuedWorkload] = [*snapshot.placed, *snapshot.pending]
    levels = {w.id: max(tenants[w.tenant].level, w.requested_level or 1) for w in everything}
    total: dict[str, _Amounts] = {name: {} for name in tenants}

    in_order = sorted(snapshot.placed, key=lambda w: (levels[w.id], w.awarded_at_s, w.id))
    placed_ranks = {}
    for placed in in_order:
        if _blocking(tenants[placed.tenant], total[placed.tenant], _held(placed)):
            placed_ranks[placed.id] = 8 if flat else 7 + levels[placed.id]
        else:
            _add(total[placed.tenant], _held(placed))
            placed_ranks[placed.id] = levels[placed.id]

    average = _average(snapshot)
    credited = [(_credit(snapshot, tenants[w.tenant], average, w), w) for w in snapshot.pending if not w.held]
    credited.sort(key=lambda pair: (-pair[0], pair[1].submitted_at_s, pair[1].id))
    places: dict[str, tuple[float, QueuedWorkload]] = {}
    for group in {(w.tenant, levels[w.id]) for _, w in credited}:
        mine = [(credit, w) for credit, w in credited if (w.tenant, levels[w.id]) == group]
        by_person = sorted(mine, key=lambda pair: -(pair[0] + _preference(snapshot, tenants[group[0]], pair[1])))
        places |= {w.id: place for (_, w), place in zip(by_person, mine, strict=True)}
    credited = [(places[w.id][0], w) for _, w in credited]
    credited.sort(key=lambda pair: (-pair[0], places[pair[1].id][1].submitted_at_s, places[pair[1].id][1].id))

    queue = []
    used: dict[str, _Amounts] = {name: {} for name in tenants}
    for level in range(1, 8):
        for placed in in_order:
            if placed_ranks[placed.id] == level:
                _add(used[placed.tenant], _held(placed))
        for credit, workload in credited:
            if levels[workload.id] != level:
                continue
            tenant = tenants[workload.tenant]
            types, need, reason = _judge(tenant, used[tenant.name], workload.jobs)
            displaced: list[str] = []
            if reason is None:
                _add(used[tenant.name], need)
                if _blocking(tenant, total[tenant.name], need):
                    own = [p for p in in_order if p.tenant == tenant.name and level < levels[p.id]]
                    left = _without_quota(tenant, used[tenant.name], own)
                    displaced = [id_ for id_ in left if placed_ranks[id_] < 8]
                _add(total[tenant.name], need)
            over = reason is not None
            rank = level if not over else 8 if flat else 7 + level
            queue.append(Ranked(workload.id, rank, level, over, credit, types, reason, tuple(sorted(displaced))))
    place = {id_: (workload.submitted_at_s, workload.id) for id_, (_, workload) in places.items()}
    queue.sort(key=lambda ranked: (ranked.rank, -ranked.credit, place[ranked.id]))
    workloads = {w.id: w for w in snapshot.pending}
    for number, ranked in enumerate(queue):
        workload = workloads[ranked.id]
        if workload.jobs[0].is_elastic and not ranked.over_quota:
            most = _most_tasks(tenants[workload.tenant], total[workload.tenant], workload.jobs[0], ranked.gpu_types[0])
            queue[number] = replace(ranked, most_tasks=most)
    return ScanResult(tuple(queue), placed_ranks)


def _most_tasks(tenant: TenantState, used: _Amounts, job: JobRequest, types: tuple[str, ...]) -> int:
    """Returns the most tasks of an elastic job that the quota suffices for, and counts those above the fewest."""
    one = {_CPUS: job.cpus_milli_per_task} | dict.fromkeys(types, job.gpus_per_task)
    tasks = job.tasks
    while tasks < job.most_tasks and not _blocking(tenant, used, one):
        _add(used, one)
        tasks += 1
    return tasks


def _held(placed: PlacedWorkload) -> _Amounts:
    return {**placed.gpus, _CPUS: placed.cpus_milli}


def _without_quota(tenant: TenantState, used: _Amounts, placed: list[PlacedWorkload]) -> list[str]:
    """Returns the ids of the placed workloads that do not fit into the quota if `used` is counted before them."""
    used, out = dict(used), []
    for workload in placed:
        if _blocking(tenant, used, _held(workload)):
            out.append(workload.id)
        else:
            _add(used, _held(workload))
    return out


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


def _preference(snapshot: QueueSnapshot, tenant: TenantState, workload: QueuedWorkload) -> float:
    """Returns the sum of the terms for little use of the person, and for a small known size of the workload."""
    by_use, by_size, shares = 0.0, 0.0, tenant.user_shares
    if shares and sum(shares.values()):
        average, own = fsum(shares.values()) / len(shares), shares.get(workload.user, 0.0)
        by_use = snapshot.weights.w_user * (average - own) / (average + own)
    if workload.gpu_s < inf:
        rounded = 2.0 ** ceil(log2(max(workload.gpu_s, 1.0)))
        by_size = snapshot.weights.w_short / (1 + rounded / (8 * 3600))
    return by_use + by_size


def _blocking(tenant: TenantState, used: _Amounts, need: _Amounts) -> list[str]:
    """Returns the resources for which `used` plus `need` exceeds the quota."""
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
) -> tuple[tuple[tuple[str, ...], ...], _Amounts, Reason | None]:
    """Returns the GPU types allowed for each job, their resource need, and the reason if the workload is over-quota."""
    every_type = tuple(job.gpu_types for job in jobs)
    cpus = sum(job.tasks * job.cpus_milli_per_task for job in jobs)

    need = {_CPUS: cpus}
    for gpu_type in {t for types in every_type for t in types}:
        need[gpu_type] = sum(job.tasks * job.gpus_per_task for job in jobs if gpu_type in job.gpu_types)
    if not _blocking(tenant, used, need):
        return every_type, need, None

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
            return every_type, need, _exceeded(tenant, first, *numbers)
    need[_CPUS] = cpus
    if _blocking(tenant, used, need):
        milli = (used.get(_CPUS, 0), tenant.quota_cpus_milli or 0, cpus)
        return every_type, need, _exceeded(tenant, _CPUS, *(amount / 1000 for amount in milli))
    return tuple(restricted), need, None


def _exceeded(tenant: TenantState, resource: str, used: float, quota: float, needs: float) -> Reason:
    detail = {"tenant": tenant.name, "resource": resource, "used": used, "quota": quota, "needs": needs}
    return Reason(ReasonCode.QUOTA_EXCEEDED, detail)
