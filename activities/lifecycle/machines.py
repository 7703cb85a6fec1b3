"""Machines: registration, readiness, loss and platform notices."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Engine, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session
from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.capacity import join_admission
from activities.lifecycle import handover
from activities.lifecycle.machine_keys import accept_proven, is_pinned, offer
from domain.protocol.activities import Activity
from domain.protocol.machines import Attend, Hello, MachineNotice, Welcome
from domain.protocol.workload_messages import MessageKind
from domain.reasons import Reason, ReasonCode
from domain.registration import wrong_hello
from domain.task_reports import OWNER, NoticeReport
from infra.config.settings import Settings
from infra.db import events, outbox
from infra.db.lent_machines import lent_of
from infra.db.logs import Event
from infra.db.models import Allocation, Attempt, Cluster, Machine, Region, Workload
from infra.db.session import transaction

_WORKLOAD_NOTICE = "workload.notice"
_SHOWN = 200
"""Longer texts of agents are cut."""
_MAY_END = (ReasonCode.PLATFORM_NOTICE, ReasonCode.ENDS_SOON, ReasonCode.KEEPS_FAILING_GANGS, ReasonCode.MOVES_POOL)
_MOST_NOTICES = 8
"""Maximum number of notices about which one attempt gets messages."""


class MachineActivities:
    """The activities on machines."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings

    @activity.defn(name=Activity.REGISTER_MACHINE.value)
    def register(self, hello: Hello) -> Welcome:
        """Registers a machine at its hello; returns the attempts that its agent must stop before it takes work.

        - After a reboot the tasks of the machine are gone, and their gangs get the message that the machine is lost.
        - A machine that returns after it was lost belongs to none of its gangs any more, even if they still hold slots
          on it: they have the message that the machine is lost, and will not stop their tasks there.
        - Attempts that were released while the agent did not answer must be stopped, even if they do not run there: a
          start request may still be in flight, and the agent refuses it after the stop.
        - A machine with a key other than the pinned one is refused (`activities.lifecycle.machine_keys`). So is a
          machine whose instance or join token is not valid (`activities.capacity.join_admission`).
        - If the machine's record of what its owner has taken is older than Postgres's, because the machine was set up
          again or its disk was restored, the stricter of both applies until the owner's next command.
        - A new fault of a GPU cordons the machine.
        - A machine with less capacity than attempts hold on it takes no work. The registration is retried until enough
          of them have ended.

        Raises:
            ApplicationError: `BadMachine` (not retried), `UnknownRegion` or `MachineShrunk`.
        """
        if (wrong := wrong_hello(hello)) is not None:
            raise ApplicationError(f"machine {hello.machine}: {wrong}", type="BadMachine", non_retryable=True)
        with transaction(self._engine) as session:
            if session.get(Region, hello.region) is None:
                raise ApplicationError(
                    f"machine {hello.machine}: region {hello.region} does not exist", type="UnknownRegion"
                )
            if not join_admission.admits(session, self._settings, hello):
                return self._welcome([], refused=True, unknown=session.get(Machine, hello.machine) is None)
            session.execute(insert(Cluster).values(region=hello.region, name=hello.cluster).on_conflict_do_nothing())
            row = session.get(Machine, hello.machine, with_for_update=True)
            if row is not None and not (is_pinned(row, hello) or accept_proven(session, self._settings, row, hello)):
                return self._refuse(session, row, hello)
            rebooted = row is not None and row.incarnation != hello.incarnation
            if row is None:
                row = Machine(
                    id=hello.machine, state="joining", held=0, promised=0, failed_gangs=0, gpus=0, cpus_milli=0,
                    free_cpus_milli=0, memory_bytes=0, free_memory_bytes=0, draining=False, withheld=0,
                    unfreed=0, word_at_s=0.0, taken=False, gpu_fault_at_s=0.0,
                    pool=join_admission.pool_of(session, hello.machine),
                )  # fmt: skip
                session.add(row)
            row.region, row.cluster, row.rack, row.gpu_type = hello.region, hello.cluster, hello.rack, hello.gpu_type
            row.incarnation, row.public_key, row.address = hello.incarnation, hello.public_key, hello.address
            engine = hello.engine or None
            if row.isolation not in (None, hello.isolation) or (row.isolation is not None and row.engine != engine):
                outbox.wake_scheduler(session)
            row.isolation, row.engine = hello.isolation, engine
            row.isolation_why = hello.isolation_why.replace("\0", "")[:_SHOWN] or None
            # `lost_at` stays until the machine is ready, so that a retried registration has the same result.
            given_up = rebooted or row.lost_at is not None
            if given_up and row.lost_at is None:
                row.lost_at = func.now()
            if given_up and row.notice is not None:
                # The platform reclaimed the machine, and it has returned. A cordon with another reason stays.
                row.notice = None
                if row.cordon is not None and row.cordon.get("code") == ReasonCode.PLATFORM_NOTICE:
                    row.cordon = None
            withheld, owners, claimed = row.withheld, row.withheld & ~row.unfreed, row.gpus
            fits = _resize(row, hello, _hear_owner(row, hello))
            lends = bool(withheld & ~row.withheld)
            if row.taken and not hello.taken and row.notice is None:
                row.notice = _taken(row).to_json()
                row.cordon = row.cordon or row.notice
            if not row.taken and row.notice is not None and row.notice.get("detail", {}).get("platform") == OWNER:
                row.notice, lends = None, True  # The owner lends the machine again.
                if row.cordon is not None and row.cordon.get("detail", {}).get("platform") == OWNER:
                    row.cordon = None
            if given_up or row.state != "ready" or not fits:
                row.state = "joining"
            elif lends:
                outbox.wake_scheduler(session)  # Otherwise this is done when it is ready.
            session.flush()
            if taken := row.withheld & ~row.unfreed & ~owners:
                _give_up(session, row, taken)
            # A claim is judged only once, so its cordon replaces any that may end without an operator.
            row.cordon = (
                self._claims(session, row, claimed) or row.cordon or join_admission.ending(session, hello.machine)
            )
            _judge_fault(session, row, hello)
            live = _live(session, hello.machine)
            keys = {f"{workload}.{attempt}" for workload, attempt in live}
            stop = set(handover.unconfirmed(session, hello.machine))
            stop |= keys | set(hello.runs) if given_up else set(hello.runs) - keys
            if rebooted:
                for workload, attempt in live:
                    outbox.message(session, workload, MessageKind.MACHINE_LOST, attempt, machine=hello.machine)
        if not fits:
            message = f"machine {hello.machine} has {hello.gpus} GPUs, {hello.cpus_milli} thousandths of a core and"
            message += f" {hello.memory_bytes} bytes of memory, less than is held on it; it waits until work has ended"
            raise ApplicationError(message, type="MachineShrunk")
        return self._welcome(stop)

    def _claims(self, session: Session, row: Machine, before: int) -> dict[str, Any] | None:
        """Returns the cordon of a lent machine that reports more GPUs than allowed, and more than `before`.

        If an operator has removed such a cordon, the number reported then is accepted.
        """
        limit = self._settings.lifecycle.lent_gpus
        if row.gpus <= max(limit, before) or row.id not in lent_of(session, {row.id: row}):
            return None
        return Reason(ReasonCode.CLAIMS_TOO_MUCH, {"gpus": row.gpus, "limit": limit}).to_json()

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
        """Records that no task of `attend.stop` runs on the machine, and marks the machine as ready.

        It stays not ready if other attempts were released there meanwhile without confirmation.
        """
        with transaction(self._engine) as session:
            row = session.get(Machine, attend.machine, with_for_update=True)
            if row is None or row.incarnation != attend.incarnation:
                return
            handover.confirm_stopped(session, row.id, attend.stop)
            if row.state == "ready" or handover.unconfirmed(session, row.id):
                return
            row.state, row.lost_at, row.registered_at = "ready", None, func.now()
            events.record(session, "machine.ready", region=row.region, machine=row.id)
            join_admission.notify_instance(session, row.id)
            outbox.wake_scheduler(session)

    @activity.defn(name=Activity.MACHINE_LOST.value)
    def lost(self, attend: Attend) -> None:
        """Marks a machine as lost because its agent stopped answering, and sends messages to the gangs on it."""
        with transaction(self._engine) as session:
            row = session.get(Machine, attend.machine, with_for_update=True)
            if row is None or row.incarnation != attend.incarnation or row.state == "lost":
                return
            lose(session, row)

    @activity.defn(name=Activity.MACHINE_NOTICED.value)
    def noticed(self, told: MachineNotice) -> None:
        """Handles a platform notice: cordons the machine and returns its workloads to the queue.

        A notice that a task reports concerns only the task's own attempt, because tasks are not trusted. A repeated
        notice changes nothing. In particular, it does not restore a cordon that an operator has removed. An earlier end
        replaces a later one, and the workloads get messages again. A later end changes nothing: to postpone the end,
        the owner first lends the machine again, which ends the first notice (`register`).
        """
        reason = Reason(ReasonCode.PLATFORM_NOTICE, {"machine": told.machine, **told.notice.numbers()})
        with transaction(self._engine) as session:
            row = session.get(Machine, told.machine, with_for_update=True)
            if row is None or row.incarnation != told.incarnation or row.state == "lost":
                return
            if told.run is None:
                if row.notice is None and told.notice.platform == OWNER and told.notice.at_s > row.word_at_s:
                    row.word_at_s, row.taken = min(told.notice.at_s, time.time()), True
                give_notice(session, row, reason)
                return
            for workload, attempt in _live(session, row.id):
                if f"{workload}.{attempt}" == told.run:
                    _notify(session, row, workload, attempt, reason)


def give_notice(session: Session, row: Machine, reason: Reason) -> None:
    """Records that a locked machine will end, cordons it, and sends messages to its workloads.

    `reason` is a `PLATFORM_NOTICE`. An earlier end replaces a later one.
    """
    if row.notice is None:
        row.notice = reason.to_json()
        if row.cordon is None or row.cordon.get("code") == ReasonCode.ENDS_SOON:
            row.cordon = row.notice
        events.record(session, "machine.notice", region=row.region, machine=row.id, reason=reason)
    elif _ends_at_s(reason.detail) < _ends_at_s(row.notice["detail"]):
        row.notice = reason.to_json()
        if row.cordon is not None and row.cordon.get("code") == ReasonCode.PLATFORM_NOTICE:
            row.cordon = row.notice
    for workload, attempt in _live(session, row.id):
        _notify(session, row, workload, attempt, reason)


def _notify(session: Session, row: Machine, workload: str, attempt: int, reason: Reason) -> None:
    """Sends an attempt a message about a notice, unless an earlier one announced an end that is at least as early.

    A task can report any number of notices, so the messages about them are limited.
    """
    said = select(Event.reason).where(
        Event.workload == workload, Event.attempt == attempt, Event.kind == _WORKLOAD_NOTICE
    )
    earlier = [found["detail"] for found in session.scalars(said) if found is not None]
    if len(earlier) == _MOST_NOTICES or any(_ends_at_s(one) <= _ends_at_s(reason.detail) for one in earlier):
        return
    if events.record(
        session,
        _WORKLOAD_NOTICE,
        tenant=session.get_one(Workload, workload).tenant,
        workload=workload,
        attempt=attempt,
        region=row.region,
        machine=row.id,
        reason=reason,
        dedup=f"{attempt}:notice" if not earlier else f"{attempt}:notice:{len(earlier)}",
    ):
        detail = {**reason.detail, "code": reason.code.value}
        outbox.message(session, workload, MessageKind.PREEMPT, attempt, **detail)


def _give_up(session: Session, row: Machine, slots: int) -> None:
    """Tells attempts that have not started and hold or await `slots` of a locked machine: the owner has taken them.

    The agent would refuse their tasks. Tasks that have started get the owner's notice from the agent, and report it.
    """
    waiting = session.execute(
        select(Allocation.workload, Allocation.attempt)
        .join(Attempt, (Attempt.workload == Allocation.workload) & (Attempt.attempt == Allocation.attempt))
        .where(
            Allocation.machine == row.id,
            Allocation.released_at.is_(None),
            (Allocation.slots.bitwise_or(Allocation.awaited)).bitwise_and(slots) != 0,
            Attempt.started_at.is_(None),
        )
        .order_by(Allocation.workload)
    )
    for workload, attempt in waiting.all():
        notice = NoticeReport(OWNER, "preempt", True, time.time(), None, "the owner takes GPUs back")
        reason = Reason(ReasonCode.PLATFORM_NOTICE, {"machine": row.id, **notice.numbers()})
        _notify(session, row, workload, attempt, reason)


def _ends_at_s(detail: Mapping[str, Any]) -> float:
    """Returns when a notice ends, in seconds since the epoch. An unknown end is later than any other."""
    ends_at_s = detail.get("ends_at_s")
    return math.inf if ends_at_s is None else float(ends_at_s)


def lose(session: Session, row: Machine, words: str | None = None) -> None:
    """Marks a machine as lost, which stops new placements, and informs its gangs. The caller holds the row lock.

    `words`: why it is lost, in the words of its provider.
    """
    row.state, row.lost_at = "lost", func.now()
    detail = {"machine": row.id} if words is None else {"machine": row.id, "words": words}
    reason = Reason(ReasonCode.MACHINE_LOST, detail)
    events.record(session, "machine.lost", region=row.region, machine=row.id, reason=reason)
    for workload, attempt in _live(session, row.id):
        outbox.message(session, workload, MessageKind.MACHINE_LOST, attempt, **detail)


def _live(session: Session, machine: str) -> list[tuple[str, int]]:
    """Returns the attempts that hold or await resources of a machine, without the bookings of later attempts."""
    rows = session.execute(
        select(Allocation.workload, Allocation.attempt)
        .join(Attempt, (Attempt.workload == Allocation.workload) & (Attempt.attempt == Allocation.attempt))
        .where(Allocation.machine == machine, Allocation.released_at.is_(None))
        .order_by(Allocation.workload)
    )
    return list(rows)


def _hear_owner(row: Machine, hello: Hello) -> int:
    """Records whether the owner of a locked machine has taken it; returns the mask of the slots that are taken.

    A state of the owner's record that is older than the known one can add slots to the known ones, but free none.
    """
    word_at_s = min(hello.word_at_s, time.time())
    if word_at_s >= row.word_at_s:
        row.taken, row.word_at_s = hello.taken, word_at_s
        return hello.withheld
    row.taken = row.taken or hello.taken
    return hello.withheld | (row.withheld & ~row.unfreed)


def _judge_fault(session: Session, row: Machine, hello: Hello) -> None:
    """Cordons a locked machine for a new fault of a GPU. A known one does not restore a cordon that was removed.

    Replaces cordons that may end without an operator.
    """
    fault = hello.gpu_fault
    if fault is None or fault.at_s == row.gpu_fault_at_s:
        return
    row.gpu_fault_at_s = fault.at_s
    if row.cordon is None or row.cordon.get("code") in _MAY_END:
        reason = Reason(ReasonCode.GPU_FAULT, {"slot": fault.slot, "gpu": fault.gpu, "error": fault.error})
        row.cordon = reason.to_json()
        events.record(session, "machine.cordoned", region=row.region, machine=row.id, reason=reason)


def _taken(row: Machine) -> Reason:
    """Returns the notice of a machine that its owner has taken, although its agent says that it is lent."""
    words = "the owner has taken the machine back, which its agent does not know any more; `mizzen lend` lends it again"
    notice = NoticeReport(OWNER, "preempt", True, row.word_at_s, row.word_at_s, words)
    return Reason(ReasonCode.PLATFORM_NOTICE, {"machine": row.id, **notice.numbers()})


def _resize(row: Machine, hello: Hello, withheld: int) -> bool:
    """Sets the capacity of a locked machine from its hello, and the mask of the slots that its owner has taken.

    Returns False, without a change, if more is held on it.
    """
    free_cpus_milli = row.free_cpus_milli + hello.cpus_milli - row.cpus_milli
    free_memory_bytes = row.free_memory_bytes + hello.memory_bytes - row.memory_bytes
    if row.held >> hello.gpus or free_cpus_milli < 0 or free_memory_bytes < 0:
        return False
    row.free_cpus_milli, row.free_memory_bytes = free_cpus_milli, free_memory_bytes
    all_slots = (1 << hello.gpus) - 1
    row.withheld = (withheld | hello.unfreed) & all_slots
    row.unfreed = hello.unfreed & ~withheld & all_slots
    row.cpus_milli, row.memory_bytes, row.gpus = hello.cpus_milli, hello.memory_bytes, hello.gpus
    return True
