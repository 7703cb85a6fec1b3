"""Endpoints that remove regions and machines. A removal is refused, with the reasons, while something depends on it."""

from collections.abc import Sequence
from itertools import chain

from sqlalchemy import Select, delete, select
from sqlalchemy.orm import Session

from api.auth import Operator
from api.fleet.machines import find_machine
from api.openapi import refusals
from api.problems import HttpProblem, ProblemType, existing
from api.routing import Router
from api.state import StateOf
from api.views import write_audit
from infra.db import events, outbox
from infra.db.buckets import forget_bucket
from infra.db.capacity import InstanceRow, PoolRow
from infra.db.models import Allocation, Attempt, Cluster, Datacenter, Machine, Region, Workload
from infra.db.rounds import forget_loop, verification_of
from infra.db.tables import Replica, Table

router = Router(prefix="/v1", tags=["fleet"])
_NAMED = 5


@router.delete(
    "/machines/{region}/{cluster}/{machine}",
    status_code=204,
    summary="Remove a machine",
    responses=refusals(404, 409),
)
def remove_machine(region: str, cluster: str, machine: str, state: StateOf, caller: Operator) -> None:
    """Removes a machine that is drained or lost and on which no workload holds resources. Past allocations are kept.

    If an agent registers under the same name later, the machine is created again: not cordoned, not drained, and with
    the agent's key.
    """
    with state.transaction() as session:
        row = find_machine(session, region, cluster, machine, lock=True)
        held = select(Allocation.workload).where(Allocation.machine == row.id, Allocation.released_at.is_(None))
        blockers = list(_named(session, "workloads that hold slots there", held.order_by(Allocation.workload)))
        if not row.draining and row.state != "lost":
            blockers.append(f"it is {row.state} and not drained")
        launched = select(InstanceRow.id).where(InstanceRow.machine == row.id, InstanceRow.gone_at.is_(None))
        if (instance := session.scalar(launched)) is not None:
            blockers.append(f"it belongs to instance {instance}, which `mizzen instances end` ends")
        _refuse(f"machine {row.id}", blockers, f"drain it first (`mizzen machines drain {row.id}`)")
        session.delete(row)
        events.record(session, "machine.removed", region=row.region, machine=row.id, detail={"by": caller.id})
        write_audit(session, caller, "machine.remove", row.id)
        outbox.wake_scheduler(session)


@router.delete("/regions/{name}", status_code=204, summary="Remove a region", responses=refusals(404, 409))
def remove_region(name: str, state: StateOf, caller: Operator) -> None:
    """Removes a region that has no machines, pools, data, placed workloads or checkpoints of live workloads.

    Its clusters and datacenters are removed too. Its bucket and the objects in it are not changed.
    """
    with state.transaction() as session:
        row = existing(session, Region, name, "region", lock=True)
        live = Workload.finished_at.is_(None)
        blockers = list(
            chain(
                _named(session, "machines", select(Machine.id).where(Machine.region == name).order_by(Machine.id)),
                _named(session, "pools", select(PoolRow.name).where(PoolRow.region == name)),
                _named(
                    session,
                    "instances that have not ended",
                    select(InstanceRow.id).where(InstanceRow.region == name, InstanceRow.gone_at.is_(None)),
                ),
                _named(session, "tables with their home there", select(Table.name).where(Table.home_region == name)),
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
        forget_loop(session, verification_of(name))
        session.delete(row)
        events.record(session, "region.removed", region=name, detail={"by": caller.id})
        write_audit(session, caller, "region.remove", name, bucket_url=row.bucket_url)
        outbox.wake_scheduler(session)


def _named(session: Session, what: str, wanted: Select[str]) -> Sequence[str]:
    """Returns `what: a, b, c` with the first few names that the query finds; an empty text if it finds none."""
    found = sorted(set(session.scalars(wanted)))
    if not found:
        return ()
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return (f"{what}: {', '.join(found[:_NAMED])}{more}",)


def _refuse(what: str, blockers: Sequence[str], advice: str) -> None:
    if blockers:
        raise HttpProblem(ProblemType.CONFLICT, f"{what} cannot be removed: {'; '.join(blockers)}; {advice}")
