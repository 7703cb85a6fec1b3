"""The GMS-scan pass (MAST 4.2): gives every workload its rank and credit, and puts the pending ones in order."""

from collections import defaultdict

from domain.priority import LOWEST_LEVEL, OVER_QUOTA_RANK, rank_of
from domain.reasons import Reason
from domain.scheduling import PlacedWorkload, QueuedWorkload, QueueSnapshot, Ranked, ScanResult, TenantState
from gms.credit import age_credit, average_share, fair_credit
from gms.quota import Ledger, all_types


def scan(snapshot: QueueSnapshot) -> ScanResult:
    """Ranks everything that is pending or placed, from nothing but the snapshot.

    For each tenant, first what is placed, oldest award first, then what is pending, most credit first. Whatever fits
    what is left of the tenant's quota counts against it and takes the tenant's level, or its own wish if that is
    lower; anything else is over-quota, counts for nothing, and a later, smaller one may still fit. That holds for
    placed workloads too: one that does not fit is over-quota, and those awarded after it are each judged by what the
    ones within quota left. No decision depends on another tenant's, except through the credit.

    Held workloads are neither ranked nor counted. The queue is in the order: rank, more credit, submitted earlier, id.

    Raises:
        ValueError: a workload, held or not, names a tenant that the snapshot lacks.
    """
    tenants = {tenant.name: tenant for tenant in snapshot.tenants}
    placed, pending = _by_tenant(snapshot, tenants)
    average = average_share(snapshot.tenants)
    queue: list[tuple[tuple[int, float, float, str], Ranked]] = []
    placed_ranks: dict[str, int] = {}
    for tenant in snapshot.tenants:
        ledger = Ledger(tenant)
        for holder in sorted(placed[tenant.name], key=lambda w: (w.awarded_at_s, w.id)):
            within = ledger.count_placed(holder.gpus, holder.cpus_milli)
            placed_ranks[holder.id] = rank_of(_level(tenant, holder.level_wish), not within)
        fair = fair_credit(snapshot.weights, tenant.window_share, average)
        credited = [
            (age_credit(snapshot.weights, snapshot.now_s - w.submitted_at_s) + fair, w) for w in pending[tenant.name]
        ]
        credited.sort(key=lambda pair: (-pair[0], pair[1].submitted_at_s, pair[1].id))
        for credit, workload in credited:
            ranked = _rank(workload, tenant, ledger, credit)
            queue.append(((ranked.rank, -credit, workload.submitted_at_s, workload.id), ranked))
    queue.sort(key=lambda entry: entry[0])
    return ScanResult(tuple(ranked for _, ranked in queue), placed_ranks)


def _by_tenant(
    snapshot: QueueSnapshot, tenants: dict[str, TenantState]
) -> tuple[dict[str, list[PlacedWorkload]], dict[str, list[QueuedWorkload]]]:
    placed: dict[str, list[PlacedWorkload]] = defaultdict(list)
    pending: dict[str, list[QueuedWorkload]] = defaultdict(list)
    everyone: tuple[PlacedWorkload | QueuedWorkload, ...] = (*snapshot.placed, *snapshot.pending)
    for workload in everyone:
        if workload.tenant not in tenants:
            raise ValueError(
                f"workload {workload.id!r} has tenant {workload.tenant!r}, which is none of the snapshot's tenants"
            )
    for holder in snapshot.placed:
        placed[holder.tenant].append(holder)
    for queued in snapshot.pending:
        if not queued.held:
            pending[queued.tenant].append(queued)
    return placed, pending


def _level(tenant: TenantState, wish: int | None) -> int:
    """The tenant's level, or the wish where that is lower (numerically above)."""
    return tenant.level if wish is None else max(tenant.level, wish)


def _rank(workload: QueuedWorkload, tenant: TenantState, ledger: Ledger, credit: float) -> Ranked:
    outcome = ledger.count_pending(workload.jobs)
    if isinstance(outcome, Reason):
        types = all_types(workload.jobs)
        return Ranked(workload.id, OVER_QUOTA_RANK, LOWEST_LEVEL, True, credit, types, outcome)
    level = _level(tenant, workload.level_wish)
    return Ranked(workload.id, rank_of(level, False), level, False, credit, outcome.gpu_types, None)
