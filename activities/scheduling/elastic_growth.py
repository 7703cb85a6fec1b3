"""Running elastic workloads grow after a pass, into slots that no waiting workload can use (`gms.auction.growth`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from sqlalchemy import Engine, Row, text
from sqlalchemy.orm import Session

from activities.scheduling.avoided_machines import NOTHING_AVOIDED, avoided_by
from activities.scheduling.awards import PlannedAward, connected
from activities.scheduling.bids import placement_request, pools_of_tenants
from activities.scheduling.bookings import PlannedBooking, book
from activities.scheduling.scan_result import ScannedQueue, ScannedWorkload
from activities.scheduling.scheduler_state import SchedulerState
from domain.demand import WorkloadDemand, demand_of
from domain.isolation import strongest
from domain.priority import OVER_QUOTA_RANK
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Plan
from domain.slots import tasks_of_jobs
from gms.auction.growth import Grower
from infra.db import outbox
from infra.db.buckets import failing_buckets
from infra.db.session import transaction

_ELASTIC = text(
    "select w.id, w.ask, w.tenant, t.isolation, a.attempt, a.region, a.rank, a.plan,"
    " extract(epoch from a.started_at)::float8 as started_at_s,"
    " (select coalesce(sum(extract(epoch from e.released_at - e.started_at)), 0)::float8 from attempt as e"
    "  where e.workload = w.id and e.attempt < a.attempt) as ran_before_s"
    " from workload as w join tenant as t on t.name = w.tenant"
    " join attempt as a on a.workload = w.id and a.attempt = w.attempt"
    " where w.finished_at is null and w.spec -> 'jobs' -> 0 ->> 'most_tasks' is not null and w.phase = 'running'"
    " and w.held_by is null"
    " and a.released_at is null and a.evicting_since is null"
    " and a.started_at < now() - make_interval(secs => :min_runtime_s) order by a.rank, a.started_at, w.id"
)


@dataclass(frozen=True)
class _Elastic:
    """A running elastic workload that may have more tasks."""

    grower: Grower
    region: str
    attempt: int
    rank: int
    demand: WorkloadDemand

    def booking(self, plan: Plan) -> PlannedBooking:
        """Returns the booking of a place with more tasks."""
        detail = {"tasks": self.grower.tasks, "more": plan.jobs[0].tasks}
        award = PlannedAward(plan, self.rank, self.demand.jobs)
        return PlannedBooking(award, self.attempt, Reason(ReasonCode.RESIZED, detail), keeps=True)


def grow(engine: Engine, state: SchedulerState, scanned: ScannedQueue, min_runtime_s: float) -> int:
    """Lets at most one workload of each region, and one within-quota workload of each tenant, grow, the most important
    first; returns how many grow.

    The caller holds the state, after the last batch of the pass. A workload that started less than `min_runtime_s` ago
    does not grow.
    """
    with transaction(engine) as session:
        elastic = _elastic(session, scanned, min_runtime_s)
        closed = failing_buckets(session, state.regions) if elastic else {}  # A workload that stops there cannot save.
    regions = state.regions.keys() - closed.keys() - scanned.unasked
    bookings: dict[str, PlannedBooking] = {}
    for one in elastic:
        tenant = one.grower.request.tenant
        if one.region not in regions or one.region in bookings or tenant in scanned.grown:
            continue
        plan = state.auction(scanned.number).bidder(one.region).grow(one.grower)
        if plan is not None:
            bookings[one.region] = one.booking(plan)
            if one.rank < OVER_QUOTA_RANK:
                scanned.grown.add(tenant)
    if not bookings:
        return 0
    with connected(engine) as connection:
        grown = sum(book(connection, [one]) for one in bookings.values())
    if grown:
        with transaction(engine) as session:
            outbox.wake_readers(session)
    return grown


def _elastic(session: Session, scanned: ScannedQueue, min_runtime_s: float) -> list[_Elastic]:
    rows = session.execute(_ELASTIC, {"min_runtime_s": min_runtime_s}).all()
    return list(_growers(session, scanned, rows)) if rows else []


def _growers(session: Session, scanned: ScannedQueue, rows: Sequence[Row[Any]]) -> Iterator[_Elastic]:
    demands = {row.id: demand_of(row.ask) for row in rows}
    required = {row.id: strongest(demands[row.id].isolation, row.isolation) for row in rows}
    avoided = avoided_by(session, required, [id_ for id_, demand in demands.items() if demand.has_image])
    pools = pools_of_tenants(session)
    for row in rows:
        demand, tasks = demands[row.id], sum(tasks_of_jobs(row.plan["jobs"]).values())
        gpu_type = row.plan["jobs"][0]["gpu_type"]
        most = scanned.most_tasks(row.tenant, row.rank, replace(demand.jobs[0], tasks=tasks), gpu_type)
        if most <= tasks:
            continue
        types = ((gpu_type,),) if gpu_type is not None else None
        queued = ScannedWorkload(row.id, row.rank, types, None, most_tasks=most)
        request = placement_request(
            queued, demand, row.tenant, avoided=avoided.get(row.id, NOTHING_AVOIDED), pools=pools.get(row.tenant, ())
        )
        ends_by_s = inf if demand.max_runtime_s == inf else row.started_at_s + demand.max_runtime_s - row.ran_before_s
        yield _Elastic(Grower(request, tasks, row.started_at_s, ends_by_s), row.region, row.attempt, row.rank, demand)
