"""Endpoints for actions on workloads. Queued workloads are ended directly, placed ones through their workflows."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Query
from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.auth import Caller, Operator, Submitter
from api.bodies import MAX_TEXT, Body, JsonOnly, Name
from api.documents.array import MOST_ELEMENTS
from api.masking import mask
from api.openapi import refusals
from api.problems import HttpProblem, ProblemType, invalid
from api.routing import Router
from api.state import StateOf
from api.views import write_audit
from api.workloads.elements import Stopped, is_array, live_elements, require_array, stop_elements
from api.workloads.views import CancelledView, WorkloadView
from api.workloads.workload_queries import effective_level, find, view
from domain.phases import PLACED_PHASES, QUEUED_PHASES, TERMINAL_PHASES, Phase
from domain.priority import HIGHEST_LEVEL, LOWEST_LEVEL
from domain.protocol.workload_messages import MessageKind
from domain.reasons import Reason, ReasonCode
from infra.db import events, outbox
from infra.db.array_rows import end_array, set_throttle
from infra.db.dependencies import waive
from infra.db.models import Workload
from infra.db.phases import enter_phase
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


class WorkloadChange(Body):
    """A new, lower priority of a workload, or a new throttle of an array."""

    level: int | None = Field(None, ge=HIGHEST_LEVEL, le=LOWEST_LEVEL, strict=True, examples=[6])
    throttle: int | None = Field(
        None, ge=0, le=MOST_ELEMENTS, strict=True, description="How many elements run at a time; 0: no limit"
    )


@router.post("/cancel", status_code=202, summary="Cancel workloads by label")
def cancel_by_label(body: CancelByLabel, state: StateOf, caller: Submitter) -> CancelledView:
    """Cancels all live workloads with these labels."""
    with state.transaction() as session:
        wanted = select(Workload).where(
            Workload.finished_at.is_(None), Workload.array_id.is_(None), Workload.labels.contains(body.labels)
        )
        for tenant in (body.tenant, caller.tenant):
            if tenant is not None:
                wanted = wanted.where(Workload.tenant == tenant)
        rows = session.scalars(wanted.order_by(Workload.id).with_for_update()).all()
        _cancel(session, caller, rows)
        return CancelledView(cancelled=[row.id for row in rows])


@router.post("/{id}/cancel", status_code=202, summary="Cancel a workload", responses=refusals(404, 409))
def cancel(
    id: str,
    state: StateOf,
    caller: Submitter,
    only: Annotated[
        Stopped | None,
        Query(description="For an array: only elements that were never placed, or that failed and will be retried"),
    ] = None,
) -> WorkloadView:
    """Cancels a workload in any phase. Cancelling a cancelled workload changes nothing."""
    with state.transaction() as session:
        row = find(session, caller, id, lock=True)
        if only is not None:
            require_array(row, "query.only")
        if row.phase != Phase.CANCELLED:
            _require_live(row)
            _cancel(session, caller, [row], only)
        return mask(session, caller, view(session, state.queue, row))


@router.post("/{id}/hold", status_code=202, summary="Hold a workload in the queue", responses=refusals(404, 409))
def hold(id: str, state: StateOf, caller: Submitter) -> WorkloadView:
    """Keeps a queued workload in the queue until it is released; of an array also its queued elements."""
    with state.transaction() as session:
        row = find(session, caller, id, lock=True)
        _require_live(row)
        if Phase(row.phase) not in QUEUED_PHASES:
            raise HttpProblem(
                ProblemType.WRONG_PHASE, f"workload {row.id} is {row.phase}: only queued workloads can be held"
            )
        for one in (row, *live_elements(session, row, Workload.phase.in_(sorted(QUEUED_PHASES)))):
            if one.held_by is None:
                one.held_by, one.held_at = caller.id, func.coalesce(Workload.held_at, func.now())
                reason = Reason(ReasonCode.HELD, {"by": caller.id})
                _record(session, caller, one, "workload.held", "workload.hold", reason)
        return mask(session, caller, view(session, state.queue, row))


@router.post("/{id}/release", status_code=202, summary="Release a held workload", responses=refusals(404, 409))
def release(id: str, state: StateOf, caller: Submitter) -> WorkloadView:
    """Ends the hold of a workload, and drops dependencies that can never be fulfilled. Otherwise nothing changes."""
    with state.transaction() as session:
        row = find(session, caller, id, lock=True)
        _require_live(row)
        kept = (row.blocked == "never" or row.spec.get("if_never") == "keep") and waive(session, row.id)
        if kept:
            session.refresh(row)
        for one in (row, *live_elements(session, row)):
            if one.held_by is not None or (kept and one is row):
                _end_hold(one)
                _record(session, caller, one, "workload.released", "workload.release", None)
        return mask(session, caller, view(session, state.queue, row))


def _end_hold(row: Workload) -> None:
    """Ends the hold, if there is one. A pause continues as long as the workload waits for dependencies."""
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
        if row.runner:
            message = f"workload {row.id} is run by {row.runner}: preempt the runner, or cancel the element"
            raise HttpProblem(ProblemType.WRONG_PHASE, message)
        # The message names the attempt, so that a late message does not preempt the next one.
        outbox.message(session, row.id, MessageKind.PREEMPT, row.attempt, by=caller.id)
        write_audit(session, caller, "workload.preempt", row.id, tenant=row.tenant, attempt=row.attempt)
        return mask(session, caller, view(session, state.queue, row))


@router.patch("/{id}", summary="Lower a workload's priority, or throttle an array", responses=refusals(404, 409))
def change(id: str, body: WorkloadChange, state: StateOf, caller: Submitter) -> WorkloadView:
    """Sets a level below (numerically above) the workload's current level, or the throttle of an array.

    The same value changes nothing. A throttle below the number of elements that run stops none of them.
    """
    if body.level is None and body.throttle is None:
        raise invalid("level", "give a level, or the throttle of an array")
    with state.transaction() as session:
        row = find(session, caller, id, lock=True)
        _require_live(row)
        if body.throttle is not None:
            require_array(row, "throttle")
            if set_throttle(session, row.id, body.throttle or None):
                _record(session, caller, row, "workload.throttle", "workload.throttle", None, throttle=body.throttle)
        if body.level is not None:
            _lower(session, caller, row, body.level)
        return mask(session, caller, view(session, state.queue, row))


def _lower(session: Session, caller: Caller, row: Workload, wanted: int) -> None:
    """Lowers the priority of a workload, and of the elements of an array that have a higher one."""
    level = effective_level(session, row)
    if wanted < level:
        raise invalid("level", f"must not raise the priority, which is now {level}", wanted)
    for one in (row, *live_elements(session, row)):
        before = effective_level(session, one)
        if wanted > before:
            one.level = wanted
            _record(session, caller, one, "workload.level", "workload.lower", None, level=wanted, before=before)


def _require_live(row: Workload) -> None:
    if Phase(row.phase) in TERMINAL_PHASES:
        raise HttpProblem(ProblemType.WRONG_PHASE, f"workload {row.id} has already ended with phase {row.phase}")


def _cancel(session: Session, caller: Caller, found: Sequence[Workload], only: Stopped | None = None) -> None:
    """Cancels locked workloads: ends queued ones directly, and sends messages to the workflows of the others.

    An array ends with the last of its elements. `only` selects which of its elements are cancelled.
    """
    arrays = [row for row in found if is_array(row)]
    rows = [row for row in found if not is_array(row)]
    for array in arrays:
        rows += stop_elements(session, array, only)
        detail_of = {} if only is None else {"only": only.value}
        write_audit(session, caller, _CANCEL, array.id, tenant=array.tenant, **detail_of)
    detail = {"by": caller.id}
    reason = Reason(ReasonCode.CANCELLED_BY_USER, detail)
    # The runners of an array that is cancelled as a whole are cancelled, too, and end its leased elements.
    whole = {array.id for array in arrays if only is None}
    for row in rows:
        if row.runner and row.array_id not in whole:
            _cancel_leased(session, caller, row, reason)
    rows = [row for row in rows if not row.runner]
    queued = {row.id: (reason, detail) for row in rows if Phase(row.phase) in QUEUED_PHASES}
    for row in rows:
        if row.id not in queued:
            outbox.message(session, row.id, MessageKind.CANCEL, 0, by=caller.id)
            write_audit(session, caller, _CANCEL, row.id, tenant=row.tenant)
    end_queued(session, Phase.CANCELLED, queued, actor=caller.id, action=_CANCEL)
    for array in arrays:
        end_array(session, array.id)
        outbox.wake_scheduler(session)  # Other workloads may take the places of the cancelled elements.


def _cancel_leased(session: Session, caller: Caller, row: Workload, reason: Reason) -> None:
    """Cancels a locked array element that a runner has leased; it ends as cancelled whatever the runner reports."""
    assert row.runner
    if enter_phase(session, row.id, Phase.CHECKPOINTING, reason.to_json()):
        outbox.message(session, row.runner, MessageKind.CANCEL_ELEMENT, row.runner_attempt or 0, index=row.array_index)
        write_audit(session, caller, _CANCEL, row.id, tenant=row.tenant)
        session.refresh(row)


def _record(
    session: Session, caller: Caller, row: Workload, kind: str, action: str, reason: Reason | None, **detail: object
) -> None:
    events.record(
        session, kind, tenant=row.tenant, workload=row.id, attempt=row.attempt, reason=reason,
        detail={"by": caller.id, **detail},
    )  # fmt: skip
    write_audit(session, caller, action, row.id, tenant=row.tenant, **detail)
    outbox.wake_scheduler(session)
