"""Hands over slots, CPUs and memory. Only this module, the award (`activities.scheduling.awards`) and bookings
(`activities.scheduling.bookings`) write allocations.

The allocation guard in the database maintains the machines' masks of slots and refuses overlaps. All functions run in
the caller's transaction, which is READ COMMITTED: a value that a decision depends on is read after its row is locked.

To avoid deadlocks, locks are always taken in this order: workloads by id, machines by id, allocations (written only
under the lock of their machine), attempts (those of successors by id, then the own attempt). A transaction that holds
an attempt's lock takes no further lock of a machine or workload. A workload's lock guards its phase, its attempt
number, and which attempt is released or evicted. An attempt's lock guards its reports and when it is ready.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import BindParameter, bindparam, delete, func, or_, select, tuple_, update
from sqlalchemy.orm import Session

from domain.protocol.workload_messages import MessageKind
from domain.protocol.workloads import ReleaseRequest
from infra.db import outbox
from infra.db.models import Allocation, Attempt, Booking, Eviction, Machine

# Statements are built once: building one takes as long as its execution.
_RUNS: BindParameter[Any] = bindparam("runs", expanding=True)
_HELD = tuple_(Allocation.workload, Allocation.attempt).in_(_RUNS), Allocation.released_at.is_(None)
_LOCK_HELD = (
    select(Machine)
    .where(
        or_(
            Machine.id.in_(bindparam("others", expanding=True)),
            Machine.id.in_(
                select(Allocation.machine).where(
                    Allocation.workload.in_(bindparam("workloads", expanding=True)), Allocation.released_at.is_(None)
                )
            ),
        )
    )
    .order_by(Machine.id)
    .with_for_update()
)
_OWN = select(Allocation).where(*_HELD).order_by(Allocation.workload, Allocation.machine)
_BOOKED = select(Booking).where(Booking.workload.in_(bindparam("workloads", expanding=True))).order_by(Booking.workload)
_FREE_BOOKED = delete(Allocation).where(
    Allocation.workload == bindparam("workload"), Allocation.attempt == bindparam("attempt")
)
_NOW = select(func.clock_timestamp())
_EVICTORS = select(Eviction.victim, Eviction.evictor, Eviction.evictor_attempt).where(
    tuple_(Eviction.victim, Eviction.victim_attempt).in_(_RUNS)
)


def release(
    session: Session, requests: Sequence[ReleaseRequest], others: Collection[str] = ()
) -> tuple[datetime, dict[str, dict[str, Machine]]]:
    """Releases all that attempts of different workloads hold: to the evictors that wait for it, and otherwise as free
    resources.

    Sends `slots_ready` to each successor that now holds everything. Returns the time of the release and, for each
    workload, its attempt's machines by id, locked. The caller holds the locks of the workloads. `others` are machines
    that the caller awards afterwards; they are locked, too.

    On the silent machines of a request, tasks of the attempt may still run. Such a machine takes no work until its
    workflow has stopped them; the tasks have `flushing_s` to save. Successors on such a machine get a message that the
    machine is lost.
    """
    asked = {request.workload_id: request for request in requests}
    runs = {"runs": [(request.workload_id, request.attempt) for request in requests]}
    # Also the machines that are booked for the next attempts.
    locked = {row.id: row for row in session.scalars(_LOCK_HELD, {"workloads": list(asked), "others": sorted(others)})}
    evictors: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for victim, evictor, attempt in session.execute(_EVICTORS, runs):  # Stable, because the victims are locked.
        evictors[victim].append((evictor, attempt))
    machines: dict[str, dict[str, Machine]] = {workload: {} for workload in asked}
    served: set[tuple[str, int]] = set()
    now = session.execute(_NOW).scalar_one()
    for row in session.scalars(_OWN, runs).all():
        request, machine = asked[row.workload], locked[row.machine]
        machines[row.workload][row.machine] = machine
        row.released_at = now
        if row.machine not in request.silent_machines:
            row.stopped_at = now
        doubtful = row.machine in request.silent_machines and row.stopped_at is None
        if not (doubtful or evictors[row.workload]):
            continue  # Written later, together with others.
        session.flush()
        heirs = _successors(session, row.machine, sorted(evictors[row.workload]))
        if doubtful:
            _block(session, machine, row, heirs, request.flushing_s)
        for successor in heirs:
            _hand_over(row, successor, machine.withheld)
            session.flush()
            served.add((successor.workload, successor.attempt))
    session.flush()
    for heir, heir_attempt in sorted(served):
        _notify_if_ready(session, heir, heir_attempt)
    return now, machines


def end_bookings(session: Session, workloads: Collection[str]) -> list[Booking]:
    """Removes the bookings of workloads whose running attempts `release` has released, and returns them, by workload.

    What they held is free from then on. The caller may award it in the same transaction: `release` has locked the
    machines.
    """
    found = list(session.scalars(_BOOKED, {"workloads": list(workloads)}))
    for booking in found:
        session.execute(_FREE_BOOKED, {"workload": booking.workload, "attempt": booking.attempt + 1})
        session.delete(booking)
    session.flush()
    return found


def _block(
    session: Session, machine: Machine, given: Allocation, heirs: Iterable[Allocation], flushing_s: float
) -> None:
    """Blocks new work on a locked machine on which tasks of the allocation `given` may still run."""
    if machine.state == "lost":
        return  # The tasks are stopped when the machine returns, and the successors have their messages.
    machine.state = "joining"
    outbox.unconfirmed(session, machine.id, f"{given.workload}.{given.attempt}", flushing_s)
    for heir in heirs:
        outbox.message(session, heir.workload, MessageKind.MACHINE_LOST, heir.attempt, machine=machine.id)


def unconfirmed(session: Session, machine: str) -> list[str]:
    """Returns the attempts (`workload.attempt`, sorted) that were released while their tasks may still run there."""
    rows = session.execute(
        select(Allocation.workload, Allocation.attempt).where(
            Allocation.machine == machine, Allocation.released_at.is_not(None), Allocation.stopped_at.is_(None)
        )
    )
    return sorted(f"{workload}.{attempt}" for workload, attempt in rows)


def confirm_stopped(session: Session, machine: str, runs: Iterable[str]) -> None:
    """Records that no task of `runs` (`workload.attempt`) runs on a locked machine, or will ever run there."""
    parts = [run.rpartition(".") for run in runs]
    session.execute(
        update(Allocation)
        .where(
            Allocation.machine == machine,
            Allocation.stopped_at.is_(None),
            tuple_(Allocation.workload, Allocation.attempt).in_([(workload, int(n)) for workload, _, n in parts]),
        )
        .values(stopped_at=func.clock_timestamp())
    )


def _successors(session: Session, machine: str, evictors: Iterable[tuple[str, int]]) -> list[Allocation]:
    """Returns the live allocations of `evictors` on a locked machine, in the order of `evictors`."""
    rows = (session.get(Allocation, (*evictor, machine), with_for_update=True) for evictor in evictors)
    return [row for row in rows if row is not None and row.released_at is None]


def _hand_over(given: Allocation, successor: Allocation, withheld: int) -> None:
    """Gives a successor what it awaits of a released allocation.

    A successor that gets slots that the owner has taken back meanwhile (`withheld`) does not become ready: the agent
    would refuse its tasks. It has a message that ends it (`activities.lifecycle.machines`). Until then it keeps the
    slots, because a promised slot must have a holder.
    """
    slots = successor.awaited & given.slots
    cpus = min(successor.awaited_cpus_milli, given.cpus_milli - given.awaited_cpus_milli)
    memory = min(successor.awaited_memory_bytes, given.memory_bytes - given.awaited_memory_bytes)
    successor.slots |= slots
    successor.awaited &= ~slots
    successor.awaited_cpus_milli -= cpus
    successor.awaited_memory_bytes -= memory
    if successor.slots & withheld:
        return
    if not (successor.awaited or successor.awaited_cpus_milli or successor.awaited_memory_bytes):
        successor.held_at = func.clock_timestamp()


def _notify_if_ready(session: Session, workload: str, attempt: int) -> None:
    # Lock before counting: of two victims that are released concurrently, the later one sees both releases.
    row = session.get(Attempt, (workload, attempt), with_for_update=True, populate_existing=True)
    waiting = session.scalar(
        select(func.count())
        .select_from(Allocation)
        .where(Allocation.workload == workload, Allocation.attempt == attempt, Allocation.held_at.is_(None))
    )
    if waiting == 0 and row is not None and row.ready_at is None and row.released_at is None:
        row.ready_at = func.clock_timestamp()
        outbox.message(session, workload, MessageKind.SLOTS_READY, attempt)
