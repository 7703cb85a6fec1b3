"""Arrays and their elements in requests: elements that have no row yet, and views of arrays."""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, func, or_, select, text
from sqlalchemy.orm import Session

from api.auth import Caller
from api.problems import HttpProblem, ProblemType, invalid
from api.workloads.views import ArrayView, ElementView
from domain.array_elements import parameters, position_of
from domain.ids import element_id
from domain.lifecycle.endings import FAILURES
from domain.phases import TERMINAL_PHASES, Phase
from domain.reasons import Reason, ReasonCode
from domain.spec import ArraySpec, WorkloadSpec
from infra.db.array_rows import ArrayCounts, WorkloadArray, begun, stop_waiting, take_element
from infra.db.dependencies import why_element_blocked
from infra.db.models import Attempt, Workload

_WAITS = text("select waiting @> cast(:position as int) from workload_array where id = :id")
_FAILED_BEFORE = exists().where(Attempt.workload == Workload.id)


class Stopped(StrEnum):
    """Which elements of an array are cancelled."""

    WAITING = "waiting"
    FAILED = "failed"


def waiting_element(session: Session, caller: Caller, array: str, index: int, *, lock: bool) -> Workload | None:
    """Returns the row of an array element that was never placed; None: no array that the caller may see has it.

    With `lock`, a waiting element gets a row of its own, which is locked. Otherwise the row is not in the database.

    Raises:
        Problem: 409, with `lock`: the array waits for its dependencies, which a separate row would lack.
    """
    head = session.get(Workload, array, with_for_update=lock or None)
    if head is None or not caller.sees(head.tenant) or head.spec.get("array") is None:
        return None
    spec = WorkloadSpec.model_validate(head.spec)
    assert spec.array is not None
    position = position_of(spec.array.ranges, index)
    if position is None:
        return None
    waits = bool(session.execute(_WAITS, {"id": array, "position": position}).scalar_one())
    blocker = why_element_blocked(session, array, index, position, kept=waits and spec.if_never == "keep")
    if lock:
        if waits and (head.blocked is not None or blocker is not None):
            message = "waits for its dependencies: act on the whole array, or when its elements can start"
            raise HttpProblem(ProblemType.WRONG_PHASE, f"array {array} {message}")
        if waits:
            take_element(session, array, position, index)
        return session.get(Workload, element_id(array, index), with_for_update=True)
    changed: dict[str, Any] = {"ranges": ((index, index, 1),), "throttle": None}
    if spec.array.entries or (spec.array.matrix and not spec.array.exclude):  # As `take_elements` of Postgres.
        changed |= {"entries": (parameters(spec.array, index),), "matrix": {}}
    own = spec.array.model_copy(update=changed)
    row = _unplaced(head, spec.model_copy(update={"array": own}), index, waits=waits)
    if blocker is not None and (waits or blocker.code is ReasonCode.DEPENDENCY_NEVER):
        row.reason = blocker.to_json()
        row.blocked = ("waiting" if blocker.code is ReasonCode.DEPENDENCY else "never") if waits else None
    return row


def _unplaced(head: Workload, spec: WorkloadSpec, index: int, *, waits: bool) -> Workload:
    """Builds the row that a waiting or cancelled element would have."""
    ended = Reason(ReasonCode.CANCELLED_BY_USER, {"by": "its array"}).to_json()
    if head.reason is not None and head.reason["code"] == ReasonCode.DEPENDENCY_NEVER:
        ended = head.reason
    return Workload(
        id=element_id(head.id, index), tenant=head.tenant, name=head.name, labels=head.labels,
        spec=spec.model_dump(mode="json"), phase=Phase.PENDING if waits else Phase.CANCELLED,
        reason=head.reason if waits else ended, attempt=0, level=head.level, held_by=head.held_by,
        held_at=head.held_at, unheld_at=head.unheld_at, paused_s=head.paused_s, submitted_at=head.submitted_at,
        finished_at=None if waits else head.finished_at, submitted_by=head.submitted_by,
        array_id=head.id, array_index=index,
    )  # fmt: skip


def require_array(row: Workload, field: str) -> None:
    """Checks that a workload is an array.

    Raises:
        Problem: 422, the workload is not an array; `field` is the field of the request that needs one.
    """
    if not is_array(row):
        raise invalid(field, f"can only be used with an array, and workload {row.id} is not an array")


def is_array(row: Workload) -> bool:
    """Returns whether a workload is an array, and not an element of one."""
    return row.array_id is None and row.spec.get("array") is not None


def live_elements(session: Session, row: Workload, *conditions: ColumnElement[bool]) -> list[Workload]:
    """Locks and returns the live elements that have rows; empty if the workload is not an array."""
    if not is_array(row):
        return []
    own = select(Workload).where(Workload.array_id == row.id, Workload.finished_at.is_(None), *conditions)
    return list(session.scalars(own.order_by(Workload.id).with_for_update()).all())


def stop_elements(session: Session, row: Workload, only: Stopped | None) -> list[Workload]:
    """Cancels an array's waiting elements. Returns its elements with rows, locked, for the caller to cancel.

    `only`: `waiting` selects the elements that were never placed, `failed` the elements that have failed and will be
    retried. None: all elements.
    """
    if only is not Stopped.FAILED:
        stop_waiting(session, [row.id], whole=only is None)
    if only is Stopped.WAITING:
        return []
    code = Attempt.outcome["code"].astext.in_(sorted(FAILURES))
    return live_elements(session, row, *([_FAILED_BEFORE.where(code)] if only is Stopped.FAILED else []))


def array_view(counts: ArrayCounts | None) -> ArrayView | None:
    """Returns the view of an array's elements."""
    if counts is None:
        return None
    return ArrayView(
        elements=counts.elements, waiting=counts.waiting, live=counts.live, succeeded=counts.succeeded,
        failed=counts.failed, cancelled=counts.cancelled, throttle=counts.throttle,
    )  # fmt: skip


def element_view(row: Workload, spec: Mapping[str, Any]) -> ElementView | None:
    """Returns the array and the index of a workload that is an array element; None: it is not one."""
    if row.array_id is None or row.array_index is None:
        return None
    own = parameters(ArraySpec.model_validate(spec["array"]), row.array_index)
    return ElementView(array=row.array_id, index=row.array_index, parameters=own)


def elements_of(array: str) -> ColumnElement[bool]:
    """Returns the SQL condition that a workload is an element of an array, written so that an index is used."""
    own = and_(Workload.array_id == array, Workload.array_index.is_not(None))
    return or_(and_(own, Workload.finished_at.is_(None)), and_(own, Workload.finished_at.is_not(None)))


def has_no_waiting() -> ColumnElement[bool]:
    """Returns the SQL condition that a workload is an array all of whose elements have started."""
    return exists().where(WorkloadArray.id == Workload.id, func.isempty(WorkloadArray.waiting))


def shown_in(phases: Collection[str]) -> ColumnElement[bool]:
    """Returns the SQL condition that one of these phases is shown for a workload: an array that has begun runs."""
    found = [Workload.finished_at.is_not(None) & (Workload.phase == one) for one in phases if one in TERMINAL_PHASES]
    placed = sorted(one for one in phases if one not in TERMINAL_PHASES and one != Phase.PENDING)
    if placed:
        found.append(is_placed() & Workload.phase.in_(placed))
    if Phase.PENDING in phases:
        found.append(Workload.finished_at.is_(None) & (Workload.phase == Phase.PENDING) & ~begun())
    if Phase.RUNNING in phases:
        found.append(is_begun_array())
    return or_(*found)


def is_placed() -> ColumnElement[bool]:
    """Returns the SQL condition of the index `workload_placed`: live workloads that were placed."""
    return and_(Workload.finished_at.is_(None), Workload.phase != Phase.PENDING)


def is_begun_array() -> ColumnElement[bool]:
    """Returns the SQL condition that a workload is a live array of which an element was placed."""
    known = select(WorkloadArray.id).where(func.multirange_size(WorkloadArray.waiting) < WorkloadArray.elements)
    return and_(Workload.finished_at.is_(None), Workload.phase == Phase.PENDING, Workload.id.in_(known))
