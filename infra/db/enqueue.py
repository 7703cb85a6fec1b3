"""Puts a new workload into the queue, with its dependencies, its event and the wake of the scheduler."""

from sqlalchemy.orm import Session

from domain.ids import new_workload_id
from domain.reasons import Reason, ReasonCode
from domain.spec import WorkloadSpec
from infra.db import events, outbox
from infra.db.array_rows import insert_array
from infra.db.dependencies import add_dependencies
from infra.db.models import Workload


def enqueue(session: Session, spec: WorkloadSpec, by: str) -> Workload:
    """Inserts a pending workload with this specification, in the session's transaction.

    Args:
        session: the session.
        spec: a specification that was checked against the installation.
        by: who submitted it: the id of an API key, or `mizzen`.
    """
    reason = Reason(ReasonCode.SCAN_PENDING)
    row = Workload(
        id=new_workload_id(),
        tenant=spec.tenant,
        name=spec.name,
        labels=dict(spec.labels),
        spec=spec.model_dump(mode="json"),
        reason=reason.to_json(),
        level=spec.level,
        submitted_by=by,
    )
    session.add(row)
    session.flush()
    if spec.array is not None:
        insert_array(session, row.id, spec.array)
    blocker = add_dependencies(session, row.id, spec) if spec.has_dependencies else None
    if blocker is not None:
        session.refresh(row)
        reason, row.reason = blocker, blocker.to_json()
    events.record(
        session, "workload.pending", tenant=row.tenant, workload=row.id, attempt=0, reason=reason, dedup="submitted",
        detail={"name": row.name},
    )  # fmt: skip
    if blocker is None:
        outbox.wake_scheduler(session)
    return row
