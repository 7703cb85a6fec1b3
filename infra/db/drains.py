"""Drains a machine: no new work is placed on it, and its workloads save and are placed elsewhere."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from domain.protocol.workload_messages import MessageKind
from domain.reasons import Reason, ReasonCode
from infra.db import outbox
from infra.db.models import Allocation, Machine


def drain(session: Session, machine: Machine, reason: Reason, by: str) -> None:
    """Cordons and drains a machine, and sends a preemption to its workloads with `by` as the originator.

    The caller must have locked the machine's row, and must write the event and wake the scheduler. `reason` becomes the
    cordon's reason, unless the machine is already cordoned.
    """
    machine.draining = True
    if machine.cordon is None:
        machine.cordon = reason.to_json()
    live = select(Allocation).where(Allocation.machine == machine.id, Allocation.released_at.is_(None))
    for allocation in session.scalars(live.order_by(Allocation.workload)):
        outbox.message(
            session,
            allocation.workload,
            MessageKind.PREEMPT,
            allocation.attempt,
            machine=machine.id,
            by=by,
            code=ReasonCode.MACHINE_DRAINED.value,
        )
