"""Arrays: workloads with many elements. An element gets a row in `workload` when it is placed for the first time.

An array is a row in `workload`, the head, which stays in the phase `pending` until its end, and a row in
`workload_array` with the elements that wait. An award takes elements out of this set and inserts their rows. A
transaction that changes the set holds the lock of the head's row.
"""

import json
from collections.abc import Collection
from typing import Any, NamedTuple

from sqlalchemy import CheckConstraint, ColumnElement, ForeignKey, exists, func, text
from sqlalchemy.dialects.postgresql import INT4MULTIRANGE, JSONB
from sqlalchemy.orm import Mapped, Session, mapped_column

from domain.array_elements import size
from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from domain.spec import ArraySpec
from infra.db.base import Base
from infra.db.models import Workload
from infra.db.queued_end import end_queued


class WorkloadArray(Base):
    """The elements of an array."""

    __tablename__ = "workload_array"
    id: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"), primary_key=True)
    ranges: Mapped[list[Any]] = mapped_column(JSONB)
    """The indexes of the elements, as in `domain.spec.ArraySpec`."""
    elements: Mapped[int]
    """Number of elements."""
    waiting: Mapped[Any] = mapped_column(INT4MULTIRANGE)
    """The positions of the elements that have no row yet and are to be placed."""
    throttle: Mapped[int | None] = mapped_column(CheckConstraint("throttle > 0", name="array_throttle"))
    """The throttle: maximum number of elements, or of runners, with held or awarded slots; None: no limit."""
    runners: Mapped[int | None]
    """Number of runners created so far; None: elements are placed as separate workloads, without runners."""
    cancelled: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether the whole array was cancelled."""


def begun() -> ColumnElement[bool]:
    """Returns the SQL condition that a workload is an array of which an element was placed: it is shown as running."""
    placed = func.multirange_size(WorkloadArray.waiting) < WorkloadArray.elements
    return exists().where(WorkloadArray.id == Workload.id, placed)


class ArrayCounts(NamedTuple):
    """The elements of an array by state."""

    elements: int
    waiting: int
    """The elements that wait for their first placement."""
    blocked: int
    """Waiting elements that wait for elements of other arrays."""
    live: int
    """The elements with a row that have not ended: they run, or wait for another attempt."""
    succeeded: int
    failed: int
    throttle: int | None
    is_cancelled: bool

    @property
    def cancelled(self) -> int:
        """The elements that were cancelled, whether they were ever placed or not."""
        return self.elements - self.waiting - self.live - self.succeeded - self.failed

    @property
    def has_begun(self) -> bool:
        """Whether an element is not waiting any more."""
        return self.waiting < self.elements


_INSERT = text(
    "insert into workload_array (id, ranges, elements, waiting, throttle, runners) values"
    " (:id, cast(:ranges as jsonb), :elements, int4multirange(int4range(0, :elements)), :throttle, :runners)"
)
_COUNTS = text(
    "select a.id, a.elements, multirange_size(a.waiting), multirange_size(a.waiting * array_blocked(a.id)),"
    " array_live(a.id), ended.succeeded, ended.failed, a.throttle,"
    " a.cancelled from workload_array as a cross join lateral ("
    " select count(*) filter (where phase = 'succeeded') as succeeded,"
    " count(*) filter (where phase = 'failed') as failed"
    " from workload where array_id = a.id and array_index is not null and finished_at is not null) as ended"
    " where a.id = any(:ids)"
)
_THROTTLE = text(
    "update workload_array set throttle = cast(:throttle as int)"
    " where id = :id and throttle is distinct from cast(:throttle as int) returning id"
)
_WINDOWS = text(
    "select a.id, a.runners is not null, array_placed(a.id), a.throttle, array_window(a, 256)::jsonb"
    " from workload_array as a where a.id = any(:ids) and (a.throttle is not null or a.runners is not null)"
)
_LOCK = text("select id from workload where id = :id and finished_at is null for update")
_TAKE = text("select take_elements(:id, array[cast(:position as bigint)], array[cast(:index as bigint)])")
_IDLE = text(
    "select w.id from workload as w join workload_array as a on a.id = w.array_id where a.id = :id"
    " and a.runners is not null and isempty(a.waiting) and w.array_index is null and w.finished_at is null"
    " and w.phase in ('pending', 'preempted') and not exists ("
    " select from workload where array_id = a.id and finished_at is null and runner = '')"
    " order by w.id for update of w"
)
_IN_VAIN = text(
    "select w.id from dependency as d join workload_array as a on a.id = d.workload join workload as w on w.id = a.id"
    " where not isempty(d.never) and a.waiting && d.never and w.finished_at is null and w.spec ->> 'if_never' = 'end'"
    " order by w.id limit :most for update of w skip locked"
)
_DROP = text(
    "update workload_array as a set waiting = a.waiting - d.never from ("
    " select workload, range_agg(r) as never from dependency, unnest(never) as r where workload = any(:ids)"
    " group by workload) as d where a.id = d.workload"
)
_STOP = text(
    "update workload_array set waiting = '{}', cancelled = cancelled or :whole where id = any(:ids) and"
    " (waiting <> '{}' or :whole)"
)


def insert_array(session: Session, workload: str, array: ArraySpec) -> None:
    """Inserts the row of an array whose head was inserted in this transaction."""
    body = {"id": workload, "ranges": json.dumps(array.ranges), "throttle": array.throttle}
    body["runners"] = None if array.runners is None else 0
    session.execute(_INSERT, body | {"elements": size(array.ranges)})


def counts_of(session: Session, workloads: Collection[str]) -> dict[str, ArrayCounts]:
    """Returns the numbers of elements by state, for each id in `workloads` that is an array."""
    if not workloads:
        return {}
    return {id_: ArrayCounts(*counts) for id_, *counts in session.execute(_COUNTS, {"ids": list(workloads)})}


class KeptOut(NamedTuple):
    """The elements of an array that are not placed now, because of its throttle or because enough runners run."""

    has_runners: bool
    """Whether the throttle limits runners instead of elements. The other fields then count runners."""
    placed: int
    """Number of elements that hold slots, or were awarded some."""
    throttle: int | None
    free: int
    """How many more may be placed."""
    unplaced: bool
    """Whether elements without a row are kept out, if there are any."""
    queued: frozenset[str]
    """The ids of queued elements with a row that are kept out."""

    def reason(self) -> Reason:
        """Returns the reason of an element that is kept out."""
        if self.throttle is None or (not self.free and self.placed < self.throttle):
            return Reason(ReasonCode.RUNNERS_BUSY, {"placed": self.placed})
        code = ReasonCode.RUNNERS_THROTTLED if self.has_runners else ReasonCode.ARRAY_THROTTLED
        detail = {"placed": self.placed, "throttle": self.throttle}
        return Reason(code, detail | ({"older": True} if self.placed < self.throttle else {}))


def kept_out(session: Session, arrays: Collection[str]) -> dict[str, KeptOut]:
    """Returns the elements that are kept out, for each of `arrays` that has a throttle or runners."""
    if not arrays:
        return {}
    return {
        id_: KeptOut(
            has_runners, placed, throttle, window["free"], not window["positions"], frozenset(window["throttled"])
        )
        for id_, has_runners, placed, throttle, window in session.execute(_WINDOWS, {"ids": list(arrays)})
    }


def take_element(session: Session, array: str, position: int, index: int) -> None:
    """Gives a waiting element a row of its own. The caller must have locked the head's row."""
    session.execute(_TAKE, {"id": array, "position": position, "index": index})


def stop_waiting(session: Session, workloads: Collection[str], *, whole: bool) -> None:
    """Cancels the waiting elements of all arrays among the workloads. The caller must have locked their rows.

    `whole`: the arrays are cancelled.
    """
    session.execute(_STOP, {"ids": list(workloads), "whole": whole})


def end_elements_in_vain(session: Session, most: int) -> bool:
    """Cancels waiting elements with a dependency that can never be fulfilled, of at most `most` arrays.

    Only arrays whose document asks for this are included. Returns whether there were such arrays.
    """
    arrays = sorted(set(session.scalars(_IN_VAIN, {"most": most})))
    session.execute(_DROP, {"ids": arrays})
    for array in arrays:
        end_array(session, array)
    return bool(arrays)


def set_throttle(session: Session, array: str, throttle: int | None) -> bool:
    """Sets the maximum number of elements that hold slots at a time; None: no limit. The head's row must be locked.

    Returns whether the value has changed.
    """
    return session.execute(_THROTTLE, {"id": array, "throttle": throttle}).first() is not None


def end_array(session: Session, array: str) -> None:
    """Ends an array if no element waits and all elements with rows have ended.

    Runners that wait in the queue end when no element waits.
    """
    if session.execute(_LOCK, {"id": array}).first() is None:
        return
    needless = Reason(ReasonCode.CANCELLED_BY_USER, {"by": "its array"})
    idle = session.scalars(_IDLE, {"id": array}).all()
    end_queued(session, Phase.CANCELLED, dict.fromkeys(idle, (needless, {"by": "its array"})))
    counts = counts_of(session, [array])[array]
    if counts.waiting or counts.live:
        return
    detail = {
        "elements": counts.elements, "succeeded": counts.succeeded, "failed": counts.failed,
        "cancelled": counts.cancelled,
    }  # fmt: skip
    end_queued(session, _end_phase(counts), {array: (Reason(ReasonCode.ARRAY_ENDED, detail), {})})


def _end_phase(counts: ArrayCounts) -> Phase:
    if counts.is_cancelled:
        return Phase.CANCELLED
    if counts.failed:
        return Phase.FAILED
    return Phase.CANCELLED if counts.cancelled else Phase.SUCCEEDED
