"""Moves running over-quota workloads, so that whole machines become free for gangs that wait (`rms.consolidation`).

Everything is read from one snapshot of Postgres, and the booking checks again whether it still holds. So it does not
matter which process searches, and a search after a restart obeys the same limit.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from activities.scheduling.avoided_machines import NOTHING_AVOIDED, avoided_by
from activities.scheduling.awards import PlannedAward, connected
from activities.scheduling.bookings import PlannedBooking, book
from activities.scheduling.decision_rows import SnapshotReader
from domain.capacity import CapacityKind
from domain.demand import demand_of
from domain.isolation import Isolation, strongest
from domain.phases import Phase
from domain.priority import OVER_QUOTA_RANK
from domain.reasons import Reason, ReasonCode
from domain.scheduling import Holding, JobRequest, MachineState
from infra.config.scheduling import SchedulerSettings
from infra.db import outbox
from infra.db.buckets import failing_buckets
from infra.db.session import transaction
from rms.consolidation import Consolidation, Mover, consolidation, may_move, moves_left, wanted_types

_MOVED = text(
    "select extract(epoch from released_at)::float8 from attempt"
    " where released_at > now() - interval '1 hour' and outcome ->> 'code' = :code"
    " union all select extract(epoch from booked_at)::float8 from booking where code = :code"
)
_NOW = text("select extract(epoch from now())::float8")
# Not moved: replicas of services and other workloads with a single attempt, and runners, whose elements would be
# started again. The last checkpoint may be of an earlier attempt, from which this one has resumed.
_CANDIDATES = text(
    "select w.id, a.attempt, a.region, a.rank, w.ask, w.tenant, t.isolation,"
    " extract(epoch from now() - a.started_at)::float8 as ran_s,"
    " extract(epoch from now() - coalesce(a.checkpoint_at, case when a.resumed_step is not null then a.started_at end)"
    " )::float8 as unsaved_s"
    " from attempt as a join workload as w on (w.id, w.attempt) = (a.workload, a.attempt)"
    " join tenant as t on t.name = w.tenant"
    " where a.released_at is null and a.evicting_since is null and a.rank >= :over_quota and w.phase = :running"
    " and w.held_by is null and w.spec ->> 'serving' is null and w.spec ->> 'spread' is null"
    " and not coalesce((w.spec ->> 'one_attempt')::bool, false)"
    " and w.spec -> 'jobs' -> 0 ->> 'most_tasks' is null and (w.array_id is null or w.array_index is not null)"
    " and coalesce(a.checkpoint_at, case when a.resumed_step is not null then a.started_at end) is not null"
    " order by w.id"
)


class _Best(NamedTuple):
    region: str
    found: Consolidation


def consolidate(
    engine: Engine,
    settings: SchedulerSettings,
    waiting: Iterable[Sequence[JobRequest]],
    reserved: Collection[str] = (),
) -> int:
    """Starts the best moves for gangs that wait, whose jobs are given; returns the number of moves.

    `reserved` are machines that are left to reservations. In a region whose bucket fails, no workload moves, because it
    could not save.
    """
    types = wanted_types(waiting)
    if not types or not settings.moves_per_h:
        return 0
    with transaction(engine, isolation="REPEATABLE READ") as session:
        now_s = session.execute(_NOW).scalar_one()
        moved_at_s = session.scalars(_MOVED, {"code": ReasonCode.MOVED.value})
        left = moves_left(now_s, moved_at_s, settings.moves_per_h)
        movers = _movers(session, settings) if left > 0 else {}
        for region in failing_buckets(session, list(movers)):
            del movers[region]
        best = _best(SnapshotReader(session), movers, types, left, reserved) if movers else None
    if best is None:
        return 0
    with connected(engine) as connection:
        booked = book(connection, _bookings(best))
    if not booked:
        return 0
    with transaction(engine) as session:
        outbox.wake_readers(session)
    return len(best.found.movers)


def _movers(session: Session, settings: SchedulerSettings) -> dict[str, list[Mover]]:
    """Returns the workloads that may be moved, by region."""
    values = {"over_quota": OVER_QUOTA_RANK, "running": Phase.RUNNING.value}
    rows = [
        row
        for row in session.execute(_CANDIDATES, values)
        if may_move(row.ran_s, row.unsaved_s, settings.min_runtime_s)
    ]
    if not rows:
        return {}
    held: dict[str, list[Holding]] = defaultdict(list)
    for h in SnapshotReader(session).holdings([(row.id, row.attempt) for row in rows]):
        held[h.workload].append(Holding(h.machine, h.gpus, h.cpus_milli, h.memory_bytes))
    demands = {row.id: demand_of(row.ask) for row in rows}
    required: dict[str, Isolation] = {row.id: strongest(demands[row.id].isolation, row.isolation) for row in rows}
    avoided = avoided_by(session, required, [id_ for id_, demand in demands.items() if demand.has_image])
    out: dict[str, list[Mover]] = defaultdict(list)
    for row in rows:
        avoids = avoided.get(row.id, NOTHING_AVOIDED).machines
        jobs, holdings = demands[row.id].jobs, tuple(held[row.id])
        mover = Mover(row.id, row.attempt, row.rank, jobs, holdings, row.unsaved_s, row.tenant, avoids)
        out[row.region].append(mover)
    return out


def _best(
    reader: SnapshotReader,
    movers: dict[str, list[Mover]],
    types: frozenset[str],
    most_moves: int,
    reserved: Collection[str],
) -> _Best | None:
    """Returns the best consolidation of all regions. Machines that owners lend are left alone."""
    machines: dict[str, list[MachineState]] = defaultdict(list)
    for row in reader.machines_in(movers):
        is_left = row.capacity == CapacityKind.VOLUNTARY or row.id in reserved
        if row.open and not is_left:
            machines[row.region].append(row.state())
    found = [
        _Best(region, one)
        for region, here in movers.items()
        if (one := consolidation(region, machines[region], here, types, most_moves)) is not None
    ]
    return min(found, key=lambda one: (one.found.key, one.region), default=None)


def _bookings(best: _Best) -> list[PlannedBooking]:
    out = []
    for mover, plan in zip(best.found.movers, best.found.plans, strict=True):
        there = sorted({machine for job in plan.jobs for machine, _ in job.machines})
        here = sorted({h.machine for h in mover.holdings})
        reason = Reason(ReasonCode.MOVED, {"from": here, "to": there, "freed": best.found.freed})
        out.append(PlannedBooking(PlannedAward(plan, mover.rank, mover.jobs), mover.attempt, reason))
    return out
