"""Which instance belongs to which replica, after the auction has placed the replicas.

The machines of a service in one zone, of one kind and type, are one cluster, and the auction may place a replica on any
of them. So a replica may run on a machine that was launched for another one, which then gets the machine that was
launched for the first, even if that one was refused. The machines are alike.
"""

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from infra.db.capacity import InstanceRow
from infra.db.models import Allocation
from infra.db.services import ServiceReplica


def pair_instances(session: Session, service: str) -> None:
    """Exchanges instances between replicas of a service, so that each placed replica has those on which it runs."""
    held = _held(session, service)
    for workload, instances in held.items():
        for one in instances:
            owner = one.workload
            if owner is None or owner == workload or one.ending is not None:
                continue  # An instance that is to end stays with its replica: the other one would not be ended.
            own = session.scalars(
                select(InstanceRow)
                .where(InstanceRow.workload == workload)
                .order_by(InstanceRow.gone_at.is_not(None), InstanceRow.id)
            ).all()
            spare = next((other for other in own if other not in instances), None)
            if spare is None:
                continue
            one.workload, spare.workload = workload, owner
            session.flush()


def _held(session: Session, service: str) -> dict[str, list[InstanceRow]]:
    """Returns the instances on which each live replica runs, by workload, if one of them belongs to another replica."""
    replica = aliased(ServiceReplica)
    rows = session.execute(
        select(Allocation.workload, InstanceRow)
        .join(replica, replica.workload == Allocation.workload)
        .join(InstanceRow, (InstanceRow.machine == Allocation.machine) & InstanceRow.gone_at.is_(None))
        .where(replica.service == service, replica.ended_at.is_(None), Allocation.released_at.is_(None))
        .order_by(Allocation.workload, InstanceRow.id)
    ).all()
    out: dict[str, list[InstanceRow]] = {}
    for workload, instance in rows:
        out.setdefault(workload, []).append(instance)
    return {w: found for w, found in out.items() if any(one.workload != w for one in found)}
