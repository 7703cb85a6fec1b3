"""Ends replicas: cancels their workloads, ends the drains of replicas that leave, and ends their own machines."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from activities.capacity.ledger import request_end
from activities.services.replica_rows import LiveReplica
from domain.phases import QUEUED_PHASES, TERMINAL_PHASES, Phase
from domain.protocol.workload_messages import MessageKind
from domain.reasons import Reason, ReasonCode
from infra.db import events, outbox
from infra.db.capacity import InstanceRow
from infra.db.models import Machine, Workload
from infra.db.queued_end import end_queued
from infra.db.services import ServiceReplica, ServiceRow


def end_replica(session: Session, row: ServiceRow, one: LiveReplica, cause: str) -> None:
    """Ends the workload of a replica: at once if it is queued, and otherwise by a message to its workflow.

    Repeating it changes nothing. The caller has locked the service's row; workloads are locked after it.
    """
    if one.row.ending_at is not None:
        return
    one.row.ending_at = func.now()
    if one.row.draining_at is None:  # Otherwise the cause of the drain stays.
        one.row.cause = cause
    end_workload(session, one.row.workload, f"service {row.name} ({cause})")


def end_workload(session: Session, id_: str, by: str) -> None:
    """Cancels a workload in any phase. A workload that has ended is left alone."""
    workload = session.get(Workload, id_, with_for_update=True)
    if workload is None or Phase(workload.phase) in TERMINAL_PHASES:
        return
    if Phase(workload.phase) in QUEUED_PHASES:
        reason = Reason(ReasonCode.CANCELLED_BY_USER, {"by": by})
        end_queued(session, Phase.CANCELLED, {id_: (reason, {"by": by})})
    else:
        outbox.message(session, id_, MessageKind.CANCEL, 0, by=by)


def release(session: Session, row: ServiceReplica) -> None:
    """Tells the workflow of a replica that leaves, once, that it has no requests in progress, so its drain may end."""
    if row.idle_at is None:
        row.idle_at = func.now()
        outbox.message(session, row.workload, MessageKind.IDLE, 0)


def close_replica(session: Session, row: ServiceRow, one: LiveReplica, cause: str) -> None:
    """Records that a replica has ended, and ends its machines. `cause` is kept if the service ended it.

    The caller calls `cordon_ending` at the end of the transaction.
    """
    own = one.row
    own.ended_at, own.ready = func.now(), False
    own.cause = own.cause or cause
    reason = Reason(ReasonCode.REPLICA_ENDED, {"service": row.name, "replica": own.number})
    for instance in one.live_instances:
        request_end(session, instance, reason)
    events.record(
        session, "service.replica_ended", tenant=row.tenant, workload=own.workload,
        detail={
            "service": row.id, "name": row.name, "replica": own.number, "kind": own.kind, "zone": own.zone,
            "cause": own.cause,
        },
    )  # fmt: skip


def end_left_instances(session: Session, row: ServiceRow) -> None:
    """Ends the machines (instances) that were launched for a replica of the service that has ended.

    The decision that ends a replica normally also ends its machine. This finds the machines for which that was missed,
    for example because a worker was killed, so that none is paid for without a replica.
    """
    left = session.execute(
        select(InstanceRow.id, ServiceReplica.number)
        .join(ServiceReplica, ServiceReplica.workload == InstanceRow.workload)
        .where(
            InstanceRow.pool == row.id, InstanceRow.gone_at.is_(None), InstanceRow.ending.is_(None),
            ServiceReplica.ended_at.is_not(None),
        )
        .order_by(InstanceRow.id)
    ).all()  # fmt: skip
    for instance, number in left:
        request_end(session, instance, Reason(ReasonCode.REPLICA_ENDED, {"service": row.name, "replica": number}))


def cordon_ending(session: Session, service: str) -> None:
    """Cordons the machines of a service whose instances are to end, so that no other replica is placed on them.

    The instances' workflows drain them, but later. Machines are locked after workloads, so call this last.
    """
    ending = (
        select(InstanceRow.machine, InstanceRow.ending)
        .join(Machine, Machine.id == InstanceRow.machine)
        .where(
            InstanceRow.pool == service, InstanceRow.workload.is_not(None), InstanceRow.gone_at.is_(None),
            InstanceRow.ending.is_not(None), Machine.cordon.is_(None),
        )
        .order_by(InstanceRow.machine)
    )  # fmt: skip
    for machine, reason in session.execute(ending).all():
        row = session.get(Machine, machine, with_for_update=True)
        if row is not None and row.cordon is None:
            row.cordon = reason
