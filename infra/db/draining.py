"""Draining a machine: nothing new is placed on it, and what runs there saves and is placed elsewhere."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from domain.protocol import MailKind
from domain.reasons import Reason, ReasonCode
from infra.db import outbox
from infra.db.models import Allocation, Machine


def drain(session: Session, machine: Machine, reason: Reason, by: str) -> None:
    """Cordons a locked machine, with `reason` unless it is cordoned already, and has its workloads preempted by `by`.

    Its record in the event log is the caller's, and so is waking the scheduler.
    """
    machine.draining = True
    if machine.cordon is None:
        machine.cordon = reason.to_json()
    live = select(Allocation).where(Allocation.machine == machine.id, Allocation.released_at.is_(None))
    for allocation in session.scalars(live.order_by(Allocation.workload)):
        outbox.mail(
            session,
            allocation.workload,
            MailKind.PREEMPT,
            allocation.attempt,
            machine=machine.id,
            by=by,
            code=ReasonCode.MACHINE_DRAINED.value,
        )
