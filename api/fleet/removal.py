"""Removing regions and machines that are not needed any more. What still depends on one is named, and it stays."""

from collections.abc import Sequence
from itertools import chain

from fastapi import Response
from sqlalchemy import Select, delete, select
from sqlalchemy.orm import Session

from api.auth import Operator
from api.fleet.machines import find_machine
from api.fleet.regions import find_region
from api.openapi import refusals
from api.problems import Kind, Problem
from api.routing import Router
from api.state import StateOf
from api.views import write_audit
from infra.db import events, outbox
from infra.db.buckets import forget_bucket
from infra.db.capacity import InstanceRow, PoolRow
from infra.db.models import Allocation, Attempt, Cluster, Datacenter, Machine, Workload
from infra.db.tables import Replica, Table

router = Router(prefix="/v1", tags=["fleet"])
_NAMED = 5


@router.delete(
    "/machines/{region}/{cluster}/{machine}",
    status_code=204,
    summary="Remove a machine",
    responses=refusals(404, 409),
)
def remove_machine(region: str, cluster: str, machine: str, state: StateOf, caller: Operator) -> Response:
    """Forgets a machine that is drained or lost and on which nothing is held. Its history of allocations stays.

    An agent that says hello under its name again makes it anew: neither cordoned nor drained, with a key of its own.
    """
    with state.transaction() as session:
        row = find_machine(session, region, cluster, machine, lock=True)
        held = select(Allocation.workload).where(Allocation.machine == row.id, Allocation.released_at.is_(None))
        blockers = list(_named(session, "workloads that hold slots there", held.order_by(Allocation.workload)))
        if not row.draining and row.state != "lost":
            blockers.append(f"it is {row.state} and not drained")
        launched = select(InstanceRow.id).where(InstanceRow.machine == row.id, InstanceRow.gone_at.is_(None))
        if (instance := session.scalar(launched)) is not None:
            blockers.append(f"it is instance {instance}, which `mizzen instances end` ends")
        _refuse(f"machine {row.id}", blockers, f"drain it first (`mizzen machines drain {row.id}`)")
        session.delete(row)
        events.record(session, "machine.removed", region=row.region, machine=row.id, detail={"by": caller.id})
        write_audit(session, caller, "machine.remove", row.id)
        outbox.wake_scheduler(session)
    return Response(status_code=204)


@router.delete("/regions/{name}", status_code=204, summary="Remove a region", responses=refusals(404, 409))
def remove_region(name: str, state: StateOf, caller: Operator) -> Response:
    """Forgets a region without machines, pools, data, checkpoints of live workloads and placed workloads.

    Its clusters and datacenters go with it. Its bucket and what is in it stay as they are.
    """
    with state.transaction() as session:
        row = find_region(session, name, lock=True)
        live = Workload.finished_at.is_(None)
        blockers = list(
            chain(
                _named(session, "machines", select(Machine.id).where(Machine.region == name).order_by(Machine.id)),
                _named(session, "pools", select(PoolRow.name).where(PoolRow.region == name)),
                _named(
                    session,
                    "instances that are not gone",
                    select(InstanceRow.id).where(InstanceRow.region == name, InstanceRow.gone_at.is_(None)),
                ),
                _named(session, "tables at home there", select(Table.name).where(Table.home_region == name)),
                _named(session, "replicas of tables", select(Replica.data_table).where(Replica.region == name)),
                _named(
                    session,
                    "placed workloads",
                    select(Attempt.workload).where(Attempt.region == name, Attempt.released_at.is_(None)),
                ),
                _named(
                    session,
                    "checkpoints of workloads",
                    select(Workload.id).where(Workload.checkpoint_region == name, live).order_by(Workload.id),
                ),
            )
        )
        _refuse(f"region {name}", blockers, "move or remove these first")
        for part in (Cluster, Datacenter):
            session.execute(delete(part).where(part.region == name))
        forget_bucket(session, name)
        session.delete(row)
        events.record(session, "region.removed", region=name, detail={"by": caller.id})
        write_audit(session, caller, "region.remove", name, bucket_url=row.bucket_url)
        outbox.wake_scheduler(session)
    return Response(status_code=204)


def _named(session: Session, what: str, wanted: Select[str]) -> Sequence[str]:
    """`what: a, b, c` of what depends on it, a few by name; nothing where there is none."""
    found = sorted(set(session.scalars(wanted)))
    if not found:
        return ()
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return (f"{what}: {', '.join(found[:_NAMED])}{more}",)


def _refuse(what: str, blockers: Sequence[str], advice: str) -> None:
    if blockers:
        raise Problem(Kind.CONFLICT, f"{what} cannot be removed: {'; '.join(blockers)}; {advice}")
