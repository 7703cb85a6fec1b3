"""Handing over slots, CPUs and memory. Only this and the award (`activities.scheduling.awards`) write allocations.

The allocation guard in the database keeps the machines' masks and refuses overlaps. All of this runs in the caller's
transaction, which is READ COMMITTED: what is decided by is read after its lock is held.

Locks are taken in one order everywhere, so that nobody waits in a circle: workloads by id, machines by id, allocations
(only ever written under the lock of their machine), attempts (of successors by id, then one's own). Whoever holds an
attempt's lock asks for no machine or workload any more. A workload's lock guards its phase, its attempt's number, and
which attempt is released or evicted; an attempt's lock guards what is reported of it and when it is ready.
"""

from collections.abc import Collection, Iterable

from sqlalchemy import Select, func, select, tuple_, update
from sqlalchemy.orm import Session

from domain.protocol import MailKind
from infra.db import outbox
from infra.db.models import Allocation, Attempt, Eviction, Machine


def lock_machines(session: Session, ids: Select[str]) -> dict[str, Machine]:
    """Those of the machines `ids`, by id, locked for this transaction in the order of their ids."""
    rows = session.scalars(select(Machine).where(Machine.id.in_(ids)).order_by(Machine.id).with_for_update())
    return {row.id: row for row in rows.all()}


def release(
    session: Session, workload: str, attempt: int, silent: Collection[str] = (), flushing_s: float = 0.0
) -> dict[str, Machine]:
    """Gives up all that an attempt holds: to its successors where there are some, else back to the pool.

    Tells each successor that now holds everything (`slots_ready`). Returns its machines by id, locked. On `silent` ones
    tasks of the attempt may still run: such a machine takes no work until its workflow has stopped them, within
    `flushing_s` seconds in which they may save, and whoever was to succeed there is told that it is lost.
    """
    held = Allocation.workload == workload, Allocation.attempt == attempt, Allocation.released_at.is_(None)
    machines = lock_machines(session, select(Allocation.machine).where(*held))
    own = session.scalars(select(Allocation).where(*held).order_by(Allocation.machine)).all()
    evictors = _evictors(session, workload, attempt)
    served: set[tuple[str, int]] = set()
    for row in own:
        row.released_at = func.clock_timestamp()
        if row.machine not in silent:
            row.stopped_at = func.clock_timestamp()
        doubtful = row.machine in silent and row.stopped_at is None
        session.flush()
        heirs = _successors(session, row.machine, evictors)
        if doubtful:
            _doubt(session, machines[row.machine], row, heirs, flushing_s)
        for successor in heirs:
            _hand_over(row, successor)
            session.flush()
            served.add((successor.workload, successor.attempt))
    for heir, heir_attempt in sorted(served):
        _tell_if_ready(session, heir, heir_attempt)
    return machines


def _doubt(
    session: Session, machine: Machine, given: Allocation, heirs: Iterable[Allocation], flushing_s: float
) -> None:
    """Keeps work from a locked machine on which `given`'s tasks may still run."""
    if machine.state == "lost":
        return  # It is asked when it comes back, and its heirs have been told.
    machine.state = "joining"
    outbox.unconfirmed(session, machine.id, f"{given.workload}.{given.attempt}", flushing_s)
    for heir in heirs:
        outbox.mail(session, heir.workload, MailKind.MACHINE_LOST, heir.attempt, machine=machine.id)


def unconfirmed(session: Session, machine: str) -> list[str]:
    """What was released on a machine while its agent could not be asked: `workload.attempt`, sorted."""
    rows = session.execute(
        select(Allocation.workload, Allocation.attempt).where(
            Allocation.machine == machine, Allocation.released_at.is_not(None), Allocation.stopped_at.is_(None)
        )
    )
    return sorted(f"{workload}.{attempt}" for workload, attempt in rows)


def confirm_stopped(session: Session, machine: str, runs: Iterable[str]) -> None:
    """Notes that nothing of `runs` (`workload.attempt`) runs on a locked machine, or ever will."""
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


def _evictors(session: Session, workload: str, attempt: int) -> list[tuple[str, int]]:
    """Who was promised something that an attempt holds: workload and attempt, in order. Under the workload's lock."""
    evictors = select(Eviction.evictor, Eviction.evictor_attempt).where(
        Eviction.victim == workload, Eviction.victim_attempt == attempt
    )
    return sorted((str(e), int(a)) for e, a in session.execute(evictors))


def _successors(session: Session, machine: str, evictors: Iterable[tuple[str, int]]) -> list[Allocation]:
    """What of a locked machine was promised to `evictors`, in their order."""
    rows = (session.get(Allocation, (*evictor, machine), with_for_update=True) for evictor in evictors)
    return [row for row in rows if row is not None and row.released_at is None]


def _hand_over(given: Allocation, successor: Allocation) -> None:
    slots = successor.awaited & given.slots
    cpus = min(successor.awaited_cpus_milli, given.cpus_milli - given.awaited_cpus_milli)
    memory = min(successor.awaited_memory_bytes, given.memory_bytes - given.awaited_memory_bytes)
    successor.slots |= slots
    successor.awaited &= ~slots
    successor.awaited_cpus_milli -= cpus
    successor.awaited_memory_bytes -= memory
    if not (successor.awaited or successor.awaited_cpus_milli or successor.awaited_memory_bytes):
        successor.held_at = func.clock_timestamp()


def _tell_if_ready(session: Session, workload: str, attempt: int) -> None:
    # The lock comes before the count: of two victims that give up at the same moment, the later one sees both.
    row = session.get(Attempt, (workload, attempt), with_for_update=True, populate_existing=True)
    waiting = session.scalar(
        select(func.count())
        .select_from(Allocation)
        .where(Allocation.workload == workload, Allocation.attempt == attempt, Allocation.held_at.is_(None))
    )
    if waiting == 0 and row is not None and row.ready_at is None and row.released_at is None:
        row.ready_at = func.clock_timestamp()
        outbox.mail(session, workload, MailKind.SLOTS_READY, attempt)
