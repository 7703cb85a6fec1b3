"""Endpoints for actions on workloads. A queued workload is ended directly; a placed one by mail to its workflow."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.auth import Caller, Operator, Submitter
from api.bodies import MAX_TEXT, Body, JsonOnly, Name
from api.masking import mask
from api.openapi import refusals
from api.problems import HttpProblem, ProblemType, invalid
from api.routing import Router
from api.state import StateOf
from api.views import write_audit
from api.workloads.views import CancelledView, WorkloadView
from api.workloads.workload_queries import effective_level, find, view
from domain.phases import PLACED_PHASES, QUEUED_PHASES, TERMINAL_PHASES, Phase
from domain.priority import HIGHEST_LEVEL, LOWEST_LEVEL
from domain.protocol.mail import MailKind
from domain.reasons import Reason, ReasonCode
from infra.db import events, outbox
from infra.db.dependencies import waive
from infra.db.models import Workload
from infra.db.queued_end import end_queued

router = Router(prefix="/v1/workloads", tags=["workloads"], dependencies=[JsonOnly])
_CANCEL = "workload.cancel"
"""Name of the action in the audit log."""


class CancelByLabel(Body):
    """The workloads to cancel: all labels must match, and the tenant if one is given."""

    labels: dict[Annotated[str, Field(max_length=MAX_TEXT)], Annotated[str, Field(max_length=MAX_TEXT)]] = Field(
        min_length=1, examples=[{"team": "demo"}]
    )
    tenant: Name | None = None


class LevelChange(Body):
    """A new, lower priority of a workload."""

    level: int = Field(ge=HIGHEST_LEVEL, le=LOWEST_LEVEL, strict=True, examples=[6])


@router.post("/cancel", status_code=202, summary="Cancel workloads by label")
def cancel_by_label(body: CancelByLabel, state: StateOf, caller: Submitter) -> CancelledView:
    """Cancels all live workloads with these labels."""
    with state.transaction() as session:
        wanted = select(Workload).where(Workload.finished_at.is_(None), Workload.labels.contains(body.labels))
        for tenant in (body.tenant, caller.tenant):
            if tenant is not None:
                wanted = wanted.where(Workload.tenant == tenant)
        rows = session.scalars(wanted.order_by(Workload.id).with_for_update()).all()
        _cancel(session, caller, rows)
        return CancelledView(cancelled=[row.id for row in rows])


@router.post("/{id}/cancel", status_code=202, summary="Cancel a workload", responses=refusals(404, 409))
def cancel(id: str, state: StateOf, caller: Submitter) -> WorkloadView:
    """Cancels a workload in any phase. Cancelling a cancelled workload changes nothing."""
    with state.transaction() as session:
        row = find(session, caller, id, lock=True)
        if row.phase != Phase.CANCELLED:
            _require_live(row)
            _cancel(session, caller, [row])
        return mask(session, caller, view(session, state.queue, row))


@router.post("/{id}/hold", status_code=202, summary="Hold a workload in the queue", responses=refusals(404, 409))
def hold(id: str, state: StateOf, caller: Submitter) -> WorkloadView:
    """Keeps a queued workload in the queue until it is released."""
    with state.transaction() as session:
        row = find(session, caller, id, lock=True)
        _require_live(row)
        if Phase(row.phase) not in QUEUED_PHASES:
            raise HttpProblem(
                ProblemType.WRONG_PHASE, f"workload {row.id} is {row.phase}: only queued workloads can be held"
            )
        if row.held_by is None:
            row.held_by, row.held_at = caller.id, func.coalesce(Workload.held_at, func.now())
            reason = Reason(ReasonCode.HELD, {"by": caller.id})
            _record(session, caller, row, "workload.held", "workload.hold", reason)
        return mask(session, caller, view(session, state.queue, row))


@router.post("/{id}/release", status_code=202, summary="Release a held workload", responses=refusals(404, 409))
def release(id: str, state: StateOf, caller: Submitter) -> WorkloadView:
    """Ends the hold of a workload, and gives up its dependencies that can never hold. Else it changes nothing."""
    with state.transaction() as session:
        row = find(session, caller, id, lock=True)
        _require_live(row)
        kept = row.blocked == "never"
        if kept:
            waive(session, row.id)
            session.refresh(row)
        if row.held_by is not None or kept:
            _end_hold(row)
            _record(session, caller, row, "workload.released", "workload.release", None)
        return mask(session, caller, view(session, state.queue, row))


def _end_hold(row: Workload) -> None:
    """Ends the hold, if there is one. A pause goes on as long as the workload waits for dependencies."""
    if row.held_by is not None and row.blocked is None:
        held_s = func.greatest(func.coalesce(func.extract("epoch", func.now() - Workload.held_at), 0.0), 0.0)
        row.paused_s = Workload.paused_s + held_s
        row.held_at, row.unheld_at = None, func.now()
    row.held_by = None


@router.post("/{id}/preempt", status_code=202, summary="Preempt a workload", responses=refusals(404, 409))
def preempt(id: str, state: StateOf, caller: Operator) -> WorkloadView:
    """Preempts a placed workload: it saves a checkpoint and returns to the queue with its age."""
    with state.transaction() as session:
        row = find(session, caller, id, lock=True)
        _require_live(row)
        if Phase(row.phase) not in PLACED_PHASES:
            raise HttpProblem(
                ProblemType.WRONG_PHASE, f"workload {row.id} is {row.phase}: only placed workloads can be preempted"
            )
        # The mail names the attempt, so that late mail does not preempt the next one.
        outbox.mail(session, row.id, MailKind.PREEMPT, row.attempt, by=caller.id)
        write_audit(session, caller, "workload.preempt", row.id, tenant=row.tenant, attempt=row.attempt)
        return mask(session, caller, view(session, state.queue, row))


@router.patch("/{id}", summary="Lower a workload's priority", responses=refusals(404, 409))
def change(id: str, body: LevelChange, state: StateOf, caller: Submitter) -> WorkloadView:
    """Sets a level below (numerically above) the workload's current level. The same level changes nothing."""
    with state.transaction() as session:
        row = find(session, caller, id, lock=True)
        _require_live(row)
        level = effective_level(session, row)
        if body.level < level:
            raise invalid("level", f"must not raise the priority, which is now {level}", body.level)
        if body.level > level:
            row.level = body.level
            _record(session, caller, row, "workload.level", "workload.lower", None, level=body.level, before=level)
        return mask(session, caller, view(session, state.queue, row))


def _require_live(row: Workload) -> None:
    if Phase(row.phase) in TERMINAL_PHASES:
        raise HttpProblem(ProblemType.WRONG_PHASE, f"workload {row.id} has already ended with phase {row.phase}")


def _cancel(session: Session, caller: Caller, rows: Sequence[Workload]) -> None:
    """Cancels locked workloads: ends queued ones directly, and sends mail to the workflows of the others."""
    detail = {"by": caller.id}
    reason = Reason(ReasonCode.CANCELLED_BY_USER, detail)
    queued = {row.id: (reason, detail) for row in rows if Phase(row.phase) in QUEUED_PHASES}
    for row in rows:
        if row.id not in queued:
            outbox.mail(session, row.id, MailKind.CANCEL, 0, by=caller.id)
            write_audit(session, caller, _CANCEL, row.id, tenant=row.tenant)
    end_queued(session, Phase.CANCELLED, queued, actor=caller.id, action=_CANCEL)


def _record(
    session: Session, caller: Caller, row: Workload, kind: str, action: str, reason: Reason | None, **detail: object
) -> None:
    events.record(
        session, kind, tenant=row.tenant, workload=row.id, attempt=row.attempt, reason=reason,
        detail={"by": caller.id, **detail},
    )  # fmt: skip
    write_audit(session, caller, action, row.id, tenant=row.tenant, **detail)
    outbox.wake_scheduler(session)
