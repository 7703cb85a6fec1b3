"""A region's bids: its answer to each workload of a batch, all computed on the same state (MAST 4.3)."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC

from pydantic import TypeAdapter
from sqlalchemy import Engine, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from temporalio import activity

import rms.bid
from activities.scheduling.avoided_machines import NO_DOUBTS, NOTHING_AVOIDED, Avoided, Doubted, avoided_by, doubted
from activities.scheduling.moves import LeftWorkload, moves_of
from activities.scheduling.scan_result import ScannedWorkload, batch
from activities.scheduling.scheduler_state import SchedulerState
from domain.capacity import with_pools
from domain.demand import WorkloadDemand, demand_of
from domain.isolation import Isolation, strongest
from domain.phases import QUEUED_PHASES
from domain.protocol.activities import Activity
from domain.protocol.scheduling import BidRequest
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Bid, JobRequest, PlacementRequest
from gms.auction.candidate import Candidate
from gms.auction.immunity import immune_to
from infra.db.catalogue import Replicas, can_read, ready_replicas
from infra.db.logs import RegionBid
from infra.db.session import transaction
from rms.gang import Planner
from rms.refusal import no_hardware

BIDS = TypeAdapter(list[Bid])
"""Converts bids to and from JSON."""


# Arrays instead of lists of parameters keep the statement the same for every batch.
_ASKS = text(
    "select w.id, w.ask, extract(epoch from w.submitted_at)::float8 + w.paused_s, greatest(t.level, w.level),"
    " t.isolation, t.name"
    " from workload as w join tenant as t on t.name = w.tenant"
    " where w.id = any(:ids) and w.phase = any(:phases) and w.finished_at is null and w.held_by is null"
)
_POOLS = text("select unnest(tenants), region || '/' || name from pool where tenants <> '{}' order by 2")
_EVICTIONS = text("select victim, evictor from eviction where change = newest_outside_change()")


@dataclass(frozen=True)
class BidSubject:
    """One workload of a batch, with the facts that regions need for their bids."""

    queued: ScannedWorkload
    demand: WorkloadDemand
    request: PlacementRequest
    replicas: Replicas
    """The ready replicas of its tables, and possibly of other tables."""
    waits_from_s: float
    """The time from which its wait counts: its submission, later by its time on hold."""
    level: int
    """Its priority, which does not depend on its tenant's use: 1 is the highest."""

    def may_run_in(self, region: str) -> bool:
        """Returns whether its document allows the region and it can read all of its tables there."""
        demand = self.demand
        return demand.allows_region(region) and can_read(self.replicas, demand.tables, region, level=self.level)


def asked(session: Session, queued: Sequence[ScannedWorkload]) -> list[BidSubject]:
    """Returns the workloads that are still queued and not on hold, in queue order, with their demand from Postgres."""
    if not queued:
        return []
    rows = session.execute(_ASKS, {"ids": list({e.row for e in queued}), "phases": sorted(QUEUED_PHASES)})
    demands, said = dict[str, WorkloadDemand](), dict[str, tuple[float, int]]()
    required, tenants = dict[str, Isolation](), dict[str, str]()
    for workload, written, at_s, level, isolation, tenant in rows:
        demands[workload], said[workload], tenants[workload] = demand_of(written), (at_s, level), tenant
        required[workload] = strongest(demands[workload].isolation, isolation)
    avoided = avoided_by(session, required, [workload for workload, demand in demands.items() if demand.has_image])
    machines = {workload: one.machines for workload, one in avoided.items()}
    moving = moves_of(
        session,
        {e.workload: _jobs(e, demands[e.row]) for e in queued if e.element is None and e.row in demands},
        {workload: demand.max_runtime_s for workload, demand in demands.items()},
        machines,
    )
    evictors, doubts, pools = newest_evictors(session), doubted(session), pools_of_tenants(session)
    replicas = ready_replicas(session, {t for demand in demands.values() for t in demand.tables})
    return [
        BidSubject(
            e,
            demands[e.row],
            placement_request(
                e,
                demands[e.row],
                tenants[e.row],
                immune_to(e.workload, evictors),
                moving.get(e.workload),
                avoided.get(e.row, NOTHING_AVOIDED),
                doubts,
                pools.get(tenants[e.row], ()),
            ),
            replicas,
            *said[e.row],
        )
        for e in queued
        if e.row in demands
    ]


def pools_of_tenants(session: Session) -> dict[str, list[str]]:
    """Returns the pools, as `region/name`, that only some tenants may use, for each of these tenants."""
    out: dict[str, list[str]] = defaultdict(list)
    for tenant, pool in session.execute(_POOLS):
        out[tenant].append(pool)
    return out


def placement_request(
    queued: ScannedWorkload,
    demand: WorkloadDemand,
    tenant: str,
    immune: frozenset[str] = frozenset(),
    moving: LeftWorkload | None = None,
    avoided: Avoided = NOTHING_AVOIDED,
    doubts: Doubted = NO_DOUBTS,
    pools: Sequence[str] = (),
) -> PlacementRequest:
    """Returns the request of a queued workload to a region's RMS, with its rank and eligible GPU types from the scan.

    `immune` are the workloads that it may not evict, `moving` set if it has left owners' machines, `avoided` the
    machines that it may not use, `doubts` the machines that it uses only if no other machine has room, and `pools` the
    pools that only its tenant and some others may use.
    """
    leaving = moving or LeftWorkload(_jobs(queued, demand), frozenset())
    jobs = leaving.jobs
    if pools:
        jobs = tuple(replace(job, capacity=with_pools(job.capacity, pools)) for job in jobs)
    return PlacementRequest(
        queued.workload,
        queued.rank,
        jobs,
        immune,
        frozenset(queued.displaces),
        avoided.machines,
        avoided.until_s,
        leaving.shuns,
        *doubts,
        avoided.too_open,
        avoided.no_engine,
        demand.spread,
        tenant=tenant,
    )


def _jobs(queued: ScannedWorkload, demand: WorkloadDemand) -> tuple[JobRequest, ...]:
    jobs = demand.jobs
    if queued.most_tasks:
        jobs = tuple(replace(job, most_tasks=queued.most_tasks) for job in jobs)
    if queued.gpu_types is None:
        return jobs
    return tuple(replace(job, gpu_types=t) for job, t in zip(jobs, queued.gpu_types, strict=True))


def newest_evictors(session: Session) -> dict[str, set[str]]:
    """Returns, for each workload, its evictors since the last submission, end, or change of a level or quota."""
    out: dict[str, set[str]] = defaultdict(set)
    for victim, evictor in session.execute(_EVICTIONS):
        out[victim].add(evictor)
    return out


def closed(planner: Planner, asked: BidSubject) -> Bid:
    """Returns the answer of a region in which a workload may not run (`BidSubject.may_run_in`), without a bid of the
    RMS.
    """
    name, workload = planner.region.name, asked.request.workload
    if not asked.demand.allows_region(name):
        return Bid(workload, name, None, (Reason(ReasonCode.REGION_EXCLUDED, {"region": name}),))
    planner.begin(asked.request)
    return Bid(workload, name, None, (*no_hardware(planner, asked.request), *_unreadable(asked, name)))


def _unreadable(asked: BidSubject, region: str) -> Iterator[Reason]:
    """Yields a reason for each table that has no replica in the region, or only a stale one that it may not read."""
    for table in sorted(asked.demand.tables):
        if can_read(asked.replicas, [table], region, level=asked.level):
            continue
        detail: dict[str, object] = {"region": region, "table": table}
        stale_since = asked.replicas[table].get(region)
        if stale_since is None:
            yield Reason(ReasonCode.DATA_NOT_HERE, detail)
        else:
            at = stale_since.astimezone(UTC).isoformat(timespec="seconds")
            yield Reason(ReasonCode.DATA_STALE, {**detail, "stale_since": at})


def region_bid(planner: Planner, asked: BidSubject, *, ignore_data: bool = False) -> Bid:
    """Returns a region's answer for one workload outside of an auction (MAST 4.3): a plan, or why there is none.

    `ignore_data`: the workload's tables are assumed to be there.
    """
    region = planner.region
    if not (asked.may_run_in(region.name) or (ignore_data and asked.demand.allows_region(region.name))):
        return closed(planner, asked)
    return rms.bid.bid_in(planner, asked.request)


class RegionActivities:
    """The activity of a region's RMS processes in an auction. It writes nothing but the region's bids."""

    def __init__(self, engine: Engine, state: SchedulerState) -> None:
        self._engine = engine
        self._state = state

    @activity.defn(name=Activity.BID.value)
    def bid(self, request: BidRequest) -> int:
        """Bids on the workloads of a batch that may run in the region, on one state; returns the number of plans."""
        with transaction(self._engine) as session:
            wanted = asked(session, batch(session, request.scan, request.first))
        with self._state.current() as state:
            if request.region not in state.regions:
                return 0
            bidder = state.auction(request.scan).bidder(request.region)
            open_to = [a for a in wanted if a.may_run_in(request.region)]
            bids = [bidder.bid(Candidate(a.request, max_runtime_s=a.demand.max_runtime_s)) for a in open_to]
        row = {"scan": request.scan, "first": request.first, "region": request.region}
        with transaction(self._engine) as session:
            found = insert(RegionBid).values(**row, bids=BIDS.dump_json(bids))
            session.execute(found.on_conflict_do_nothing())
        return sum(b.plan is not None for b in bids)


def region_bids(session: Session, scan: int, first: int) -> dict[str, list[Bid]]:
    """Returns the bids on a batch by region."""
    rows = session.execute(
        select(RegionBid.region, RegionBid.bids).where(RegionBid.scan == scan, RegionBid.first == first)
    )
    return {region: BIDS.validate_json(bids) for region, bids in rows}
