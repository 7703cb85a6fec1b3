"""Repair in place: a gang that has lost a machine books its next attempt's place on its other machines (`rms.repair`).

It is called when the tasks have stopped, right before the release. So no slot is idle because of a booking.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine, Row, text
from sqlalchemy.orm import Session

from activities.scheduling.avoided_machines import NOTHING_AVOIDED, avoided_by
from activities.scheduling.awards import PlannedAward, connected
from activities.scheduling.bids import pools_of_tenants
from activities.scheduling.bookings import PlannedBooking, book
from activities.scheduling.decision_rows import SnapshotReader
from domain.capacity import CapacityKind, with_pools
from domain.demand import demand_of
from domain.isolation import strongest
from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobPlacement, PlacementRequest
from infra.db import published_queue
from infra.db.buckets import failing_buckets
from infra.db.session import transaction
from rms.repair import DamagedGang, repair

# The others return to the queue: replicas of services and workloads with a single attempt end, and runners start again.
_GANG = text(
    "select w.id, a.attempt, a.region, a.rank, a.plan -> 'jobs' as placed, w.ask, w.tenant, t.isolation"
    " from attempt as a join workload as w on (w.id, w.attempt) = (a.workload, a.attempt)"
    " join tenant as t on t.name = w.tenant"
    " where (a.workload, a.attempt) = (:workload, :attempt) and a.released_at is null and a.evicting_since is null"
    " and w.held_by is null and w.spec ->> 'serving' is null and w.spec ->> 'spread' is null"
    " and not coalesce((w.spec ->> 'one_attempt')::bool, false)"
    " and (w.array_id is null or w.array_index is not null)"
)
_RESERVING = text(
    "select w.workload from waiting as w, jsonb_array_elements(w.reasons -> 'reasons') as r"
    " where r ->> 'code' = any(:codes) and r -> 'detail' ->> 'region' = :region"
)
_RESERVED = [ReasonCode.RESERVED.value, ReasonCode.RESERVED_OPEN.value]


def book_repair(engine: Engine, workload: str, attempt: int, lost: Collection[str]) -> bool:
    """Books the place of a gang's next attempt on its machines without the `lost` ones, and on free resources nearby.

    The attempt must have no running tasks on the machines that it keeps. Returns False if the gang is to be queued.
    """
    with transaction(engine, isolation="REPEATABLE READ") as session:
        row = session.execute(_GANG, {"workload": workload, "attempt": attempt}).one_or_none()
        found = None if row is None else _booking(session, row, lost)
    if found is None:
        return False
    with connected(engine) as connection:
        return book(connection, [found])


def _booking(session: Session, row: Row[Any], lost: Collection[str]) -> PlannedBooking | None:
    placed = tuple(
        JobPlacement(one["job"], one["cluster"], one["gpu_type"], tuple((m, n) for m, n in one["machines"]))
        for one in row.placed
    )
    used = {machine for job in placed for machine, _ in job.machines}
    if len(used) < 2 or _is_reserved(session, row.region, row.rank) or failing_buckets(session, [row.region]):
        return None
    demand, pools = demand_of(row.ask), pools_of_tenants(session).get(row.tenant, ())
    required = {row.id: strongest(demand.isolation, row.isolation)}
    avoided = avoided_by(session, required, [row.id] if demand.has_image else []).get(row.id, NOTHING_AVOIDED)
    jobs = tuple(replace(job, capacity=with_pools(job.capacity, pools)) for job in demand.jobs)
    request = PlacementRequest(row.id, row.rank, jobs, avoids=avoided.machines, tenant=row.tenant)
    # Work that leaves machines which owners lend is placed by the queue (`activities.scheduling.moves`).
    machines = [
        one.state()
        for one in SnapshotReader(session).machines_in([row.region])
        if one.open and one.capacity != CapacityKind.VOLUNTARY and one.id not in lost
    ]
    plan = repair(row.region, machines, DamagedGang(request, placed))
    if plan is None:
        return None
    reason = Reason(ReasonCode.MACHINE_LOST, {"kept": sorted(used & {one.id for one in machines})})
    return PlannedBooking(PlannedAward(plan, row.rank, demand.jobs), row.attempt, reason, keeps=True, stops=False)


def _is_reserved(session: Session, region: str, rank: int) -> bool:
    """Returns whether a waiting workload of this rank or a better one has a reservation in the region."""
    reserving = list(session.scalars(_RESERVING, {"codes": _RESERVED, "region": region}))
    if not reserving:
        return False
    found = published_queue.load(session).find_all(reserving)
    return any(one not in found or found[one].rank <= rank for one in reserving)
