"""Invariants of the database that must hold after every step."""

import functools
import itertools
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable

from sqlalchemy import select

import gms.scan
from domain.lifecycle.attempts import NEXT_PHASES
from domain.phases import PLACED_PHASES, TERMINAL_PHASES, Phase
from domain.priority import LOWEST_LEVEL
from domain.slots import slots_of_tasks, tasks_of_jobs
from domain.spec import WorkloadSpec
from infra.db.logs import Event, Outbox
from infra.db.models import Allocation, Attempt, Booking, Eviction, Machine, Workload
from infra.db.tenants import Tenant
from tests.activities.oracle import queue_snapshot
from tests.activities.world import World, by_workload


def check(world: World) -> None:
    """Checks all invariants of the current state."""
    check_machines(world)
    check_gangs(world)
    check_quota(world)
    check_events(world)
    check_mail(world)


def check_machines(world: World) -> None:
    """Checks masks and free amounts of machines against their allocations; victims must hold all promised slots."""
    with world.session() as session:
        live = session.scalars(select(Allocation).where(Allocation.released_at.is_(None))).all()
        unconfirmed = session.scalars(
            select(Allocation).where(Allocation.released_at.is_not(None), Allocation.stopped_at.is_(None))
        ).all()
        unreleased = session.scalars(select(Attempt).where(Attempt.released_at.is_(None)))
        attempts = {(a.workload, a.attempt) for a in unreleased}
        evictions = {
            (e.evictor, e.evictor_attempt, e.victim, e.victim_attempt) for e in session.scalars(select(Eviction))
        }
        bookings = session.scalars(select(Booking)).all()
        booked = {(b.workload, b.attempt + 1, b.workload, b.attempt) for b in bookings}
        held = {(a.workload, a.attempt) for a in live}
        for one in bookings:  # The running attempt holds its slots until the next one has them.
            assert {(one.workload, one.attempt), (one.workload, one.attempt + 1)} <= held
        assert held <= attempts | {(workload, attempt) for workload, attempt, *_ in booked}
        for machine in session.scalars(select(Machine)):
            assert machine.state != "ready" or all(a.machine != machine.id for a in unconfirmed)
            here = [a for a in live if a.machine == machine.id]
            assert machine.held == sum(a.slots for a in here) == _union(a.slots for a in here)
            assert machine.promised == sum(a.awaited for a in here) == _union(a.awaited for a in here)
            assert machine.promised & ~machine.held == 0
            assert machine.free_cpus_milli == machine.cpus_milli - sum(
                a.cpus_milli - a.awaited_cpus_milli for a in here
            )
            assert machine.free_memory_bytes == machine.memory_bytes - sum(
                a.memory_bytes - a.awaited_memory_bytes for a in here
            )
            for heir in here:
                for holder in here:
                    if heir.awaited & holder.slots:
                        pair = (heir.workload, heir.attempt, holder.workload, holder.attempt)
                        assert pair in evictions or pair in booked


def check_gangs(world: World) -> None:
    """Checks that each placed workload has one live attempt.

    The attempt holds or awaits everything that the gang needs, and is ready exactly when it holds everything.
    """
    with world.session() as session:
        allocations = by_workload(session)
        attempts = {a.workload: a for a in session.scalars(select(Attempt).where(Attempt.released_at.is_(None)))}
        assert set(allocations) == set(attempts)
        for workload in session.scalars(select(Workload)):
            placed = Phase(workload.phase) in PLACED_PHASES
            assert placed == (workload.id in attempts)
            assert (workload.finished_at is not None) == (Phase(workload.phase) in TERMINAL_PHASES)
            assert (workload.region is not None) == placed
            if not placed:
                continue
            attempt, own = attempts[workload.id], allocations[workload.id]
            assert attempt.attempt == workload.attempt and {a.attempt for a in own} == {workload.attempt}
            for allocation in own:
                awaits = allocation.awaited or allocation.awaited_cpus_milli or allocation.awaited_memory_bytes
                if allocation.held_at is None and not awaits:
                    # Slots that the owner has taken back meanwhile were handed over: the attempt does not become ready.
                    taken = session.get_one(Machine, allocation.machine).withheld
                    assert allocation.slots & taken and attempt.ready_at is None
                else:
                    assert (allocation.held_at is None) == bool(awaits)
            assert (attempt.ready_at is not None) == all(a.held_at is not None for a in own)
            spec = WorkloadSpec.model_validate(workload.spec)
            masks = {a.machine: a.slots | a.awaited for a in own}
            tasks = list(slots_of_tasks(spec.requests(), attempt.plan["jobs"], masks))
            assert Counter(t.job for t in tasks) == tasks_of_jobs(attempt.plan["jobs"])
            for one in spec.jobs:
                assert one.tasks <= tasks_of_jobs(attempt.plan["jobs"])[one.name] <= (one.most_tasks or one.tasks)
            for machine, mask in masks.items():
                slots = [slot for t in tasks if t.machine == machine for slot in t.slots]
                assert len(slots) == len(set(slots)) and sum(1 << slot for slot in slots) == mask
            assert sum(a.cpus_milli for a in own) == attempt.cpus_milli


def check_quota(world: World) -> None:
    """Checks that the workloads that a scan ranks as within-quota use no more than their tenant's quota."""
    with world.session() as session:
        snapshot = queue_snapshot(session, world.settings.scheduler)
        ranks = gms.scan.scan(snapshot).placed_ranks
        used: dict[str, Counter[str]] = defaultdict(Counter)
        for placed in snapshot.placed:
            if ranks[placed.id] <= LOWEST_LEVEL:
                used[placed.tenant].update(placed.gpus)
        for tenant in session.scalars(select(Tenant)):
            for gpu_type, slots in used[tenant.name].items():
                assert slots <= tenant.quota_gpus.get(gpu_type, 0)


def check_events(world: World) -> None:
    """Checks each workload's events: legal phase changes, no duplicates, and the last phase is the current one."""
    with world.session() as session:
        lives: dict[str, list[tuple[int, Phase]]] = defaultdict(list)
        for event in session.scalars(select(Event).order_by(Event.id)):
            kind = event.kind.removeprefix("workload.")
            if event.workload is not None and kind in set(Phase):
                lives[event.workload].append((event.attempt or 0, Phase(kind)))
        for workload in session.scalars(select(Workload)):
            life = lives[workload.id]
            assert life[0] == (0, Phase.PENDING) and life[-1][1] == workload.phase
            assert len(life) == len(set(life))
            if workload.spec.get("array") is not None and workload.array_id is None:
                assert len(life) == 1 or (len(life) == 2 and life[1][1] in TERMINAL_PHASES)
                continue  # An array is pending until its elements have ended.
            for (before, phase), (after, next_phase) in itertools.pairwise(life):
                assert next_phase in NEXT_PHASES[phase]
                assert after == before + (next_phase is Phase.PLACING)


def check_mail(world: World) -> None:
    """Checks that each attempt got one `awarded`, and one `slots_ready` and one `evict` where it should."""
    with world.session() as session:
        mails = session.scalars(select(Outbox).where(Outbox.kind == "mail").order_by(Outbox.id)).all()
        said = Counter((m.workload, m.body["attempt"], m.body["kind"]) for m in mails)
        waited = {(m.workload, m.body["attempt"]) for m in mails if m.body["detail"].get("ready") is False}
        for attempt in session.scalars(select(Attempt)):
            own = (attempt.workload, attempt.attempt)
            assert said[(*own, "awarded")] == 1
            assert said[(*own, "slots_ready")] == int(own in waited and attempt.ready_at is not None)
            assert said[(*own, "evict")] == int(attempt.evictor is not None)


def check_history(world: World) -> None:
    """Checks that no slot was ever held by two allocations, or used by tasks of two allocations, at the same time."""
    with world.session() as session:
        started = {(a.workload, a.attempt): a.started_at for a in session.scalars(select(Attempt))}
        history: dict[str, list[Allocation]] = defaultdict(list)
        for row in session.scalars(select(Allocation).where(Allocation.held_at.is_not(None))):
            history[row.machine].append(row)
        for rows in history.values():
            rows.sort(key=lambda a: str(a.held_at))
            for i, one in enumerate(rows):
                for other in rows[i + 1 :]:
                    if one.slots & other.slots:
                        assert one.released_at is not None and other.held_at is not None
                        assert one.released_at <= other.held_at
                        starts_at = started[other.workload, other.attempt]
                        assert starts_at is None or (one.stopped_at is not None and one.stopped_at <= starts_at)


def _union(masks: Iterable[int]) -> int:
    return functools.reduce(operator.or_, masks, 0)
