"""Drains a machine: no new work is placed on it, and its workloads save and are placed elsewhere."""

from collections.abc import Collection

from sqlalchemy import select
from sqlalchemy.orm import Session

from domain.protocol.workload_messages import MessageKind
from domain.reasons import Reason, ReasonCode
from infra.db import outbox
from infra.db.models import Allocation, Machine, Workload


def drain(session: Session, machine: Machine, reason: Reason, by: str) -> None:
    """Cordons and drains a machine, and sends a preemption to its workloads with `by` as the originator.

    The caller must have locked the machine's row, and must write the event and wake the scheduler. `reason` becomes the
    cordon's reason, unless the machine is already cordoned.
    """
    machine.draining = True
    if machine.cordon is None:
        machine.cordon = reason.to_json()
    send_away(session, machine, by)


def send_away(session: Session, machine: Machine, by: str, but: Collection[str] = (), **more: str) -> None:
    """Sends a preemption to the workloads on a locked machine, except those of the tenants `but`.

    `more`: additional details of the reason `MACHINE_DRAINED`.
    """
    live = (
        select(Allocation.workload, Allocation.attempt)
        .join(Workload, (Workload.id == Allocation.workload) & (Workload.attempt == Allocation.attempt))
        .where(Allocation.machine == machine.id, Allocation.released_at.is_(None), Workload.tenant.not_in(but))
    )
    detail = {"machine": machine.id, "by": by, "code": ReasonCode.MACHINE_DRAINED.value, **more}
    for workload, attempt in session.execute(live.order_by(Allocation.workload)).all():
        outbox.message(session, workload, MessageKind.PREEMPT, attempt, **detail)
