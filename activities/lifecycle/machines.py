"""Machines: registration, readiness and loss."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Engine, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.capacity import joining
from activities.lifecycle import handover
from activities.lifecycle.machine_keys import accept_proven, is_pinned, offer
from domain.protocol import Activity, Attend, Hello, MachineNotice, MailKind, Welcome
from domain.reasons import Reason, ReasonCode
from infra.config import Settings
from infra.db import events, outbox
from infra.db.models import MAX_SLOTS, Allocation, Cluster, Machine, Region, Workload
from infra.db.session import transaction


class MachineActivities:
    """Effects on machines."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    @activity.defn(name=Activity.REGISTER_MACHINE.value)
    def register(self, hello: Hello) -> Welcome:
        """Takes the machine into the fleet, or back; what still runs there and should not is to be stopped first.

        A machine that comes back after a boot has lost its tasks: their gangs are told. One that comes back after it
        was lost belongs to none of its gangs any more, also not to those that still hold slots on it: they were told
        that it is gone, and will not stop their tasks there. Whatever was given up while its agent could not be asked
        is refused there from now on, also where it does not run: a start that was sent may still be on its way. A
        machine that announces itself with another key than before is refused (`activities.lifecycle.machine_keys`), and
        so is one that says that it was launched, and was not (`activities.capacity.joining`). A
        machine that became smaller than what is held on it takes no work, and is asked again, until enough of that
        has ended.
        """
        if not 0 <= hello.gpus <= MAX_SLOTS:
            message = f"machine {hello.machine}: gpus: {hello.gpus} is not between 0 and {MAX_SLOTS}"
            raise ApplicationError(message, type="BadMachine", non_retryable=True)
        with transaction(self._engine) as session:
            if session.get(Region, hello.region) is None:
                raise ApplicationError(f"machine {hello.machine}: no region {hello.region}", type="UnknownRegion")
            if not joining.admits(session, self._settings, hello):
                return self._welcome([], refused=True)
            session.execute(insert(Cluster).values(region=hello.region, name=hello.cluster).on_conflict_do_nothing())
            row = session.get(Machine, hello.machine, with_for_update=True)
            if row is not None and not (is_pinned(row, hello) or accept_proven(session, self._settings, row, hello)):
                return self._refuse(session, row, hello)
            rebooted = row is not None and row.incarnation != hello.incarnation
            if row is None:
                row = Machine(
                    id=hello.machine, state="joining", held=0, promised=0, failed_gangs=0, gpus=0, cpus_milli=0,
                    free_cpus_milli=0, memory_bytes=0, free_memory_bytes=0, draining=False,
                )  # fmt: skip
                session.add(row)
            row.region, row.cluster, row.rack, row.gpu_type = hello.region, hello.cluster, hello.rack, hello.gpu_type
            row.incarnation, row.public_key, row.address = hello.incarnation, hello.public_key, hello.address
            # Kept until it is ready again, so that a registration that is carried out again finds the same.
            given_up = rebooted or row.lost_at is not None
            if given_up and row.lost_at is None:
                row.lost_at = func.now()
            if given_up and row.notice is not None:
                # It was taken, and is back. What another cordon was for may still hold.
                row.notice = None
                if row.cordon is not None and row.cordon.get("code") == ReasonCode.PLATFORM_NOTICE:
                    row.cordon = None
            fits = _resize(row, hello)
            if given_up or row.state != "ready" or not fits:
                row.state = "joining"
            session.flush()
            live = _live(session, hello.machine)
            keys = {f"{workload}.{attempt}" for workload, attempt in live}
            stop = set(handover.unconfirmed(session, hello.machine))
            stop |= keys | set(hello.runs) if given_up else set(hello.runs) - keys
            if rebooted:
                for workload, attempt in live:
                    outbox.mail(session, workload, MailKind.MACHINE_LOST, attempt, machine=hello.machine)
        if not fits:
            message = f"machine {hello.machine} has {hello.gpus} GPUs, {hello.cpus_milli} thousandths of a core and"
            message += f" {hello.memory_bytes} bytes of memory, and more is held there; it waits until that has ended"
            raise ApplicationError(message, type="MachineShrunk")
        return self._welcome(stop)

    def _welcome(self, stop: Iterable[str], **more: Any) -> Welcome:
        lifecycle = self._settings.lifecycle
        return Welcome(sorted(stop), lifecycle.heartbeat_timeout_s, lifecycle.node_lost_after_s, **more)

    def _refuse(self, session: Session, row: Machine, hello: Hello) -> Welcome:
        challenge, away = offer(session, self._settings, row, hello)
        if away:
            lose(session, row)
        return self._welcome([], refused=True, challenge=challenge)

    @activity.defn(name=Activity.MACHINE_READY.value)
    def ready(self, attend: Attend) -> None:
        """Nothing of `attend.stop` runs there: work may be placed on it, unless more was given up there meanwhile."""
        with transaction(self._engine) as session:
            row = session.get(Machine, attend.machine, with_for_update=True)
            if row is None or row.incarnation != attend.incarnation:
                return
            handover.confirm_stopped(session, row.id, attend.stop)
            if row.state == "ready" or handover.unconfirmed(session, row.id):
                return
            row.state, row.lost_at, row.registered_at = "ready", None, func.now()
            events.record(session, "machine.ready", region=row.region, machine=row.id)
            joining.look(session, row.id)
            outbox.wake_scheduler(session)

    @activity.defn(name=Activity.MACHINE_LOST.value)
    def lost(self, attend: Attend) -> None:
        """Its agent stopped answering: nothing is placed there, and the gangs that it ran are told."""
        with transaction(self._engine) as session:
            row = session.get(Machine, attend.machine, with_for_update=True)
            if row is None or row.incarnation != attend.incarnation or row.state == "lost":
                return
            lose(session, row)

    @activity.defn(name=Activity.MACHINE_NOTICED.value)
    def noticed(self, told: MachineNotice) -> None:
        """A platform takes the machine: nothing new is placed there, and what runs there goes back to the queue.

        The word of a task is about its own attempt only: it could say anything. Told again, nothing changes, and a
        cordon that an operator took away stays away.
        """
        reason = Reason(ReasonCode.PLATFORM_NOTICE, {"machine": told.machine, **told.notice.numbers()})
        with transaction(self._engine) as session:
            row = session.get(Machine, told.machine, with_for_update=True)
            if row is None or row.incarnation != told.incarnation or row.state == "lost":
                return
            live = _live(session, row.id)
            if told.run is not None:
                live = [(w, a) for w, a in live if f"{w}.{a}" == told.run]
            elif row.notice is None:
                row.notice = reason.to_json()
                row.cordon = row.cordon or row.notice
                events.record(session, "machine.notice", region=row.region, machine=row.id, reason=reason)
            for workload, attempt in live:
                if events.record(
                    session,
                    "workload.notice",
                    tenant=session.get_one(Workload, workload).tenant,
                    workload=workload,
                    attempt=attempt,
                    region=row.region,
                    machine=row.id,
                    reason=reason,
                    dedup=f"{attempt}:notice",
                ):
                    detail = {**reason.detail, "code": reason.code.value}
                    outbox.mail(session, workload, MailKind.PREEMPT, attempt, **detail)


def lose(session: Session, row: Machine) -> None:
    """Marks a machine as lost: nothing is placed there, and its gangs get mail. The caller holds the row lock."""
    row.state, row.lost_at = "lost", func.now()
    events.record(session, "machine.lost", region=row.region, machine=row.id)
    for workload, attempt in _live(session, row.id):
        outbox.mail(session, workload, MailKind.MACHINE_LOST, attempt, machine=row.id)


def _live(session: Session, machine: str) -> list[tuple[str, int]]:
    """The attempts that hold something on a machine, or were promised it."""
    rows = session.execute(
        select(Allocation.workload, Allocation.attempt)
        .where(Allocation.machine == machine, Allocation.released_at.is_(None))
        .order_by(Allocation.workload)
    )
    return list(rows)


def _resize(row: Machine, hello: Hello) -> bool:
    """Gives a locked machine the capacity that it says it has; False, and nothing, where more than that is held."""
    free_cpus_milli = row.free_cpus_milli + hello.cpus_milli - row.cpus_milli
    free_memory_bytes = row.free_memory_bytes + hello.memory_bytes - row.memory_bytes
    if row.held >> hello.gpus or free_cpus_milli < 0 or free_memory_bytes < 0:
        return False
    row.free_cpus_milli, row.free_memory_bytes = free_cpus_milli, free_memory_bytes
    row.cpus_milli, row.memory_bytes, row.gpus = hello.cpus_milli, hello.memory_bytes, hello.gpus
    return True
