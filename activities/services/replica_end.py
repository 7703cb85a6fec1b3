"""Ends replicas, and records the ends of replicas and of their machines."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from activities.capacity.ledger import tell_to_end
from activities.services.replica_rows import LiveReplica
from domain.phases import QUEUED_PHASES, TERMINAL_PHASES, Phase
from domain.protocol.mail import MailKind
from domain.reasons import Reason, ReasonCode
from infra.db import events, outbox
from infra.db.capacity import InstanceRow
from infra.db.models import Machine, Workload
from infra.db.queued_end import end_queued
from infra.db.services import ServiceReplica, ServiceRow


def end_replica(session: Session, row: ServiceRow, one: LiveReplica, cause: str) -> None:
    """Ends the workload of a replica: at once if it is queued, and otherwise by mail to its workflow.

    Repeating it changes nothing. The caller has locked the service's row; workloads are locked after it.
    """
    if one.row.ending_at is not None:
        return
    one.row.ending_at, one.row.cause = func.now(), cause
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
        outbox.mail(session, id_, MailKind.CANCEL, 0, by=by)


def close_replica(session: Session, row: ServiceRow, one: LiveReplica, cause: str) -> None:
    """Records that a replica has ended, and ends its machines. `cause` is kept if the service ended it.

    The caller calls `cordon_ending` at the end of the transaction.
    """
    own = one.row
    own.ended_at, own.ready = func.now(), False
    own.cause = own.cause or cause
    reason = Reason(ReasonCode.REPLICA_ENDED, {"service": row.name, "replica": own.number})
    for instance in one.live_instances:
        tell_to_end(session, instance, reason)
    events.record(
        session, "service.replica_ended", tenant=row.tenant, workload=own.workload,
        detail={
            "service": row.id, "name": row.name, "replica": own.number, "kind": own.kind, "zone": own.zone,
            "cause": own.cause,
        },
    )  # fmt: skip


def end_left_instances(session: Session, row: ServiceRow) -> None:
    """Ends the instances of replicas that have ended, if they were not told to end before.

    Whatever happened between the decisions, no machine stays without a replica.
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
        tell_to_end(session, instance, Reason(ReasonCode.REPLICA_ENDED, {"service": row.name, "replica": number}))


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
