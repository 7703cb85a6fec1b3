"""Workloads that continue in their place, after the loss of a machine or after an eviction (`rms.repair`).

The transaction of the release searches the place, when the tasks have stopped, and awards it. So no slot is idle
meanwhile. If the place does not hold any more at the award, the workload waits in the queue.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.orm import Session

from activities.scheduling.avoided_machines import NOTHING_AVOIDED, avoided_by
from activities.scheduling.awards import PlannedAward, body_of
from activities.scheduling.bids import newest_evictors, pools_of_tenants
from activities.scheduling.decision_rows import SnapshotReader
from activities.scheduling.scheduler_state import as_running, by_workload
from domain import ids
from domain.capacity import CapacityKind, with_pools
from domain.demand import demand_of
from domain.isolation import strongest
from domain.phases import QUEUED_PHASES
from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobPlacement, MachineState, PlacementRequest, RunningWorkload
from gms.auction.immunity import immune_to
from infra.db import published_queue
from infra.db.buckets import failing_buckets
from rms.consolidation import MOST_WAITING
from rms.repair import DamagedGang, repair, shrink

# The others return to the queue: replicas of services and workloads with a single attempt end, and runners start again.
_PLACED = (
    "select w.id, a.attempt, a.region, a.rank, a.plan -> 'jobs' as placed, w.ask, w.tenant, t.isolation, a.evictor,"
    " w.array_id, extract(epoch from now())::float8 as now_s"
    " from attempt as a join workload as w on (w.id, w.attempt) = (a.workload, a.attempt)"
    " join tenant as t on t.name = w.tenant"
    " where (a.workload, a.attempt) = (:workload, :attempt) and a.released_at is null"
    " and w.held_by is null and w.spec ->> 'serving' is null and w.spec ->> 'spread' is null"
    " and not coalesce((w.spec ->> 'one_attempt')::bool, false)"
)
_GANG = text(f"{_PLACED} and a.evicting_since is null and (w.array_id is null or w.array_index is not null)")
_VICTIM = text(
    f"{_PLACED} and a.evictor is not null and w.array_id is null and w.spec -> 'jobs' -> 0 ->> 'most_tasks' is not null"
)
# What becomes free when the victim releases its slots: what its evictors await of each machine goes to them.
_LEAVES = text(
    "select l.machine, bit_count((l.slots & ~coalesce(next.slots, 0))::bit(64)),"
    " greatest(l.cpus_milli - l.awaited_cpus_milli - coalesce(next.cpus_milli, 0), 0),"
    " greatest(l.memory_bytes - l.awaited_memory_bytes - coalesce(next.memory_bytes, 0), 0)"
    " from allocation as l cross join lateral ("
    "  select bit_or(o.awaited) as slots, sum(o.awaited_cpus_milli)::bigint as cpus_milli,"
    "   sum(o.awaited_memory_bytes)::bigint as memory_bytes"
    "  from eviction as e join allocation as o on (o.workload, o.attempt) = (e.evictor, e.evictor_attempt)"
    "  where (e.victim, e.victim_attempt) = (l.workload, l.attempt) and o.machine = l.machine and o.released_at is null"
    " ) as next where (l.workload, l.attempt) = (:workload, :attempt) and l.released_at is null"
)
_AHEAD = text(
    "select id, ask, tenant from workload where id = any(:ids) and phase = any(:phases) and finished_at is null"
    " and held_by is null order by id"
)
_RESERVING = text(
    "select w.workload from waiting as w, jsonb_array_elements(w.reasons -> 'reasons') as r"
    " where r ->> 'code' = any(:codes) and r -> 'detail' ->> 'region' = :region"
)
_ONE_AT_A_TIME = text("select pg_advisory_xact_lock(hashtext('repair'), hashtext(:region))")
_RESERVED = [ReasonCode.RESERVED.value, ReasonCode.RESERVED_OPEN.value]


@dataclass(frozen=True)
class NextPlace:
    """Where a workload continues, and what the transaction that awards it must have locked."""

    award: dict[str, Any]
    """See `awards.body_of`."""
    workloads: frozenset[str] = frozenset()
    """The victims, and the array of an element."""
    machines: frozenset[str] = frozenset()


def place_repaired(
    session: Session, workload: str, attempt: int, lost: Collection[str], min_runtime_s: float
) -> NextPlace | None:
    """Returns the place of a gang's next attempt, on its machines without the `lost` ones and on others nearby.

    The attempt must have no running tasks on the machines that it keeps. `min_runtime_s` protects the other workloads.
    None: the gang returns to the queue. A lock of the region is held until the transaction ends. So gangs that have
    lost the same machine are placed one after the other, and do not choose the same place.
    """
    row = session.execute(_GANG, {"workload": workload, "attempt": attempt}).one_or_none()
    if row is None or len({machine for job in row.placed for machine, _ in job["machines"]}) < 2:
        return None
    session.execute(_ONE_AT_A_TIME, {"region": row.region})
    if _is_reserved(session, row.region, row.rank) or failing_buckets(session, [row.region]):
        return None
    gang = _gang(session, row)
    immune = immune_to(row.id, newest_evictors(session))
    gang = replace(gang, request=replace(gang.request, may_not_evict=immune))
    machines = [one for one in _machines(session, row.region) if one.id not in lost]
    attempts = dict[str, int]()

    def others() -> Iterator[RunningWorkload]:
        for one in _others(session, row.region, min_runtime_s):
            if one.id != row.id:
                attempts[one.id] = one.attempt
                yield one

    plan = repair(row.region, machines, gang, others, row.now_s)
    if plan is None:
        return None
    victims = {one: attempts[one] for one in plan.victims}
    body = body_of(PlannedAward(plan, row.rank, gang.request.jobs, victims))
    used = {machine for job in gang.placed for machine, _ in job.machines}
    body["detail"]["kept"] = sorted(used & {one.id for one in machines})
    array = () if row.array_id is None else (row.array_id,)
    return NextPlace(body, frozenset((*victims, *array)), frozenset(body["detail"]["machines"]))


def place_left(session: Session, workload: str, attempt: int, silent: Collection[str]) -> NextPlace | None:
    """Returns the place of the tasks that an elastic workload keeps when it is evicted.

    `silent` are machines on which tasks may still run. None: it is not elastic or not evicted, or it returns to the
    queue.
    """
    asked = {"workload": workload, "attempt": attempt}
    row = session.execute(_VICTIM, asked).one_or_none()
    if row is None or _is_reserved(session, row.region, row.rank) or failing_buckets(session, [row.region]):
        return None
    gang = _gang(session, row)
    leaves = {machine: amounts for machine, *amounts in session.execute(_LEAVES, asked)}
    machines = [
        _with(one, *leaves.get(one.id, (0, 0, 0))) for one in _machines(session, row.region) if one.id not in silent
    ]
    plan = shrink(row.region, machines, gang, _ahead(session, row.region, row.rank))
    if plan is None:
        return None
    body = body_of(PlannedAward(plan, row.rank, gang.request.jobs))
    (before,), (after,) = gang.placed, plan.jobs
    shrunk = {"tasks": before.tasks, "fewer": after.tasks, "evictor": row.evictor}
    body["plan"]["shrunk"] = body["detail"]["shrunk"] = shrunk
    body["reason"] = Reason(ReasonCode.SHRUNK, shrunk).to_json()
    return NextPlace(body)


def _others(session: Session, region: str, min_runtime_s: float) -> Iterator[RunningWorkload]:
    """Yields the workloads that hold resources in a region."""
    reader = SnapshotReader(session)
    live = list(reader.live_attempts_in(region))
    held = by_workload(reader.holdings([(one.workload, one.attempt) for one in live]))
    for one in live:
        if one.workload in held:
            yield as_running(one, held[one.workload], min_runtime_s)


def _gang(session: Session, row: Row[Any]) -> DamagedGang:
    """Returns the request of a placed workload, and where its tasks are."""
    placed = tuple(
        JobPlacement(one["job"], one["cluster"], one["gpu_type"], tuple((m, n) for m, n in one["machines"]))
        for one in row.placed
    )
    demand, pools = demand_of(row.ask), pools_of_tenants(session).get(row.tenant, ())
    required = {row.id: strongest(demand.isolation, row.isolation)}
    avoided = avoided_by(session, required, [row.id] if demand.has_image else []).get(row.id, NOTHING_AVOIDED)
    jobs = tuple(replace(job, capacity=with_pools(job.capacity, pools)) for job in demand.jobs)
    return DamagedGang(PlacementRequest(row.id, row.rank, jobs, avoids=avoided.machines, tenant=row.tenant), placed)


def _machines(session: Session, region: str) -> Iterator[MachineState]:
    """Yields the machines of a region that take work.

    Work that leaves machines which owners lend is placed by the queue (`activities.scheduling.moves`).
    """
    for one in SnapshotReader(session).machines_in([region]):
        if one.open and one.capacity != CapacityKind.VOLUNTARY:
            yield one.state()


def _with(machine: MachineState, gpus: int, cpus_milli: int, memory_bytes: int) -> MachineState:
    """Returns a machine with more free resources."""
    return replace(
        machine,
        free_gpus=machine.free_gpus + gpus,
        free_cpus_milli=machine.free_cpus_milli + cpus_milli,
        free_memory_bytes=machine.free_memory_bytes + memory_bytes,
    )


def _ahead(session: Session, region: str, rank: int) -> Iterator[PlacementRequest]:
    """Yields the workloads of better ranks that wait at the head of the queue and may run in a region."""
    queue, pools = published_queue.load(session), pools_of_tenants(session)
    head = queue.ids[:MOST_WAITING][queue.rank[:MOST_WAITING] < rank]
    waiting = {bytes(one).decode() for one in head.tolist()}
    rows = waiting | {ids.array_of(one) for one in waiting}  # Elements without a row of their own are like their array.
    for row in session.execute(_AHEAD, {"ids": sorted(rows), "phases": sorted(QUEUED_PHASES)}):
        demand = demand_of(row.ask)
        if demand.allows_region(region):
            jobs = tuple(
                replace(job, capacity=with_pools(job.capacity, pools.get(row.tenant, ()))) for job in demand.jobs
            )
            yield PlacementRequest(row.id, rank, jobs, tenant=row.tenant)


def _is_reserved(session: Session, region: str, rank: int) -> bool:
    """Returns whether a waiting workload of this rank or a better one has a reservation in the region."""
    reserving = list(session.scalars(_RESERVING, {"codes": _RESERVED, "region": region}))
    if not reserving:
        return False
    found = published_queue.load(session).find_all(reserving)
    return any(one not in found or found[one].rank <= rank for one in reserving)
