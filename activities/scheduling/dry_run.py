"""Dry runs: computes what would happen to a workload if it were submitted now. Nothing is written."""

from collections.abc import Mapping

import numpy as np
from sqlalchemy import Engine, text

from activities.scheduling.avoided_machines import Avoided, doubted, weaker_machines, without_engine
from activities.scheduling.award_batch import candidates, closed_to
from activities.scheduling.bids import BidSubject, placement_request, pools_of_tenants
from activities.scheduling.decision_rows import QueuedRow
from activities.scheduling.queue_state import microseconds
from activities.scheduling.scan_result import ScannedWorkload
from activities.scheduling.scheduler_state import SchedulerState
from domain.demand import demand_of
from domain.isolation import strongest
from domain.priority import HIGHEST_LEVEL
from domain.protocol.scheduling import DryRunRequest, DryRunResult
from domain.reasons import Reason
from domain.scheduling import Ranked
from domain.spec import WorkloadSpec
from gms.scan import Scan
from infra.db.catalogue import ready_replicas
from infra.db.session import transaction
from infra.db.tenants import Tenant

DRY_RUN_ID = "~dry-run"
"""An id that sorts after every real id, so that a tie-break prefers workloads that exist."""


def dry_run(
    engine: Engine, state: SchedulerState, request: DryRunRequest, left_out: Mapping[str, Reason]
) -> DryRunResult:
    """Scans and bids as if the workload were queued. Restores the scheduler state afterwards.

    Plans are made and compared as in an auction: reservations of the newest pass are respected, and the regions in
    `left_out` do not bid, each for the given reason.
    """
    spec = WorkloadSpec.model_validate(request.spec)
    with transaction(engine) as session:
        # The demand is derived by the same SQL function as for submitted workloads.
        written = session.execute(
            text("select workload_ask(cast(:spec as jsonb))"), {"spec": spec.model_dump_json()}
        ).scalar_one()
        demand = demand_of(written)
        replicas = ready_replicas(session, demand.tables)
        doubts, pools = doubted(session), pools_of_tenants(session).get(spec.tenant, ())
        tenant = session.get_one(Tenant, spec.tenant)
        level = max(tenant.level, spec.level or HIGHEST_LEVEL)
        required = strongest(demand.isolation, tenant.isolation)
        no_engine = without_engine(session) if demand.has_image else frozenset[str]()
        avoided = Avoided(too_open=weaker_machines(session, [required])[required], no_engine=no_engine)
    with state.current():
        now_us = microseconds(state.now_s)
        own = QueuedRow(DRY_RUN_ID, spec.tenant, spec.level, False, now_us, written, user=request.submitted_by)
        try:
            state.queue.put_workloads([own])
            scan = state.queue.scan(state.now_s)
            ranks = state.queue.other_ranks(scan)
            ranked = _own(scan)
        finally:
            state.queue.put_workloads([own._replace(ask=None)])
        types, most = ranked.gpu_types, ranked.most_tasks
        queued = ScannedWorkload(DRY_RUN_ID, ranked.rank, types, ranked.reason, ranked.displaces, most_tasks=most)
        asked = BidSubject(
            queued,
            demand,
            placement_request(queued, demand, spec.tenant, avoided=avoided, doubts=doubts, pools=pools),
            replicas,
            state.now_s,
            level,
        )
        shut = closed_to(state, [asked], left_out)[DRY_RUN_ID]
        (wanted,) = candidates([asked], state.regions.keys() - left_out.keys(), state.now_s)
        with state.ranks(ranks):
            auction = state.newest_auction()
            bids = shut | {r: auction.bidder(r).offer(wanted) for r in sorted(state.regions) if r not in shut}
    answers = [bid for _, bid in sorted(bids.items())]
    reasons = ([ranked.reason] if ranked.reason else []) + [r for bid in answers for r in bid.reasons]
    best = wanted.best(answers)
    out = DryRunResult(
        admitted=best is not None,
        rank=ranked.rank,
        over_quota=ranked.over_quota,
        reasons=[r.to_json() for r in reasons],
    )
    if best is not None:
        out.region = best.region
        out.machines = sorted({m for job in best.jobs for m, _ in job.machines})
        out.victims = list(best.victims)
    return out


def _own(scan: Scan) -> Ranked:
    """Returns the rank that the scan gives to the workload of the dry run."""
    pending = scan.queue.pending
    (row,) = np.flatnonzero(pending.id == DRY_RUN_ID.encode())
    return scan.ranked(int(np.flatnonzero(scan.order == row)[0]))
