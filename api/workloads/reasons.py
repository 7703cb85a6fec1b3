"""Determines the reasons for the state of workloads. Lists, `show`, `why` and the queue all use this module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import ARRAY, Integer, Text, any_, bindparam, cast, func, select
from sqlalchemy.orm import Session, defer

from api.views import ReasonView, reason_view
from api.workloads.launches import machines_on_their_way, pools_that_cannot_grow
from domain.phases import QUEUED_PHASES, Phase
from domain.reasons import Reason, ReasonCode, running_since
from domain.slots import tasks_of_jobs
from infra.db import published_queue
from infra.db.array_rows import ArrayCounts, KeptOut, counts_of, kept_out
from infra.db.dependencies import DecidedDependency, dependencies_of, why_elements_blocked
from infra.db.logs import Event, Waiting
from infra.db.models import Attempt, Workload

OVERDUE_S = 15.0
"""Every change of the queue requests a scan. After this time without one, `why` reports that the scan is overdue."""

_MACHINES_SHOWN = 3
_IDS = bindparam("ids", type_=ARRAY(Text))
_NOW = select(func.clock_timestamp())
_CHANGED = select(Event.workload, func.max(Event.at)).where(Event.workload == any_(_IDS)).group_by(Event.workload)
_WAITING = select(Waiting.workload, Waiting.reasons).where(Waiting.workload == any_(_IDS))
_RELEASED = select(Attempt.workload, Attempt.attempt, Attempt.released_at).where(Attempt.workload == any_(_IDS))
_LIVE = select(Attempt.workload, Attempt.attempt, Attempt.started_at).where(
    Attempt.workload == any_(_IDS), Attempt.released_at.is_(None)
)
_MOST_TASKS = Workload.spec["jobs"][0]["most_tasks"].astext
_ELASTIC = (
    select(Workload.id, cast(_MOST_TASKS, Integer), Attempt.plan)
    .join(Attempt, (Attempt.workload == Workload.id) & (Attempt.attempt == Workload.attempt))
    .where(Workload.id == any_(_IDS), _MOST_TASKS.is_not(None))
)


class QueueRow(NamedTuple):
    """The columns of a workload that the queue needs. A whole row would include the document, which is much larger."""

    id: str
    name: str
    tenant: str
    phase: str
    attempt: int
    region: str | None
    level: int | None
    held_by: str | None
    blocked: str | None
    held_at: datetime | None
    unheld_at: datetime | None
    paused_s: float
    submitted_at: datetime
    finished_at: datetime | None
    reason: dict[str, Any] | None
    tenant_level: int


Row = Workload | QueueRow


@dataclass(frozen=True)
class Why:
    """The reasons for the state of one workload."""

    reasons: list[ReasonView]
    """All reasons; lists show only the first. A queued workload has at least one."""
    entry: published_queue.QueuePosition | None = None
    """The workload's position in the last scan, if it is queued."""
    array: ArrayCounts | None = None
    """The elements by state, if it is an array."""

    @property
    def first(self) -> ReasonView | None:
        """The reason that lists show."""
        return self.reasons[0] if self.reasons else None


def why_all(session: Session, queue: published_queue.Newest, rows: Sequence[Row]) -> dict[str, Why]:
    """Returns the reasons for the state of each workload, by id."""
    arrays = counts_of(session, [row.id for row in rows if not row.attempt])
    found = _why_all(session, queue, rows)
    found |= {id_: replace(found[id_], array=counts) for id_, counts in arrays.items()}
    queued = [row for row in rows if Phase(row.phase) in QUEUED_PHASES and row.held_by is None and row.blocked is None]
    elements = {row.id: row.array_id for row in queued if isinstance(row, Workload) and row.array_id is not None}
    throttled = kept_out(session, {row.id for row in queued if row.id in arrays} | set(elements.values()))
    blocked = [id_ for id_, counts in arrays.items() if 0 < counts.waiting == counts.blocked]
    depends = why_elements_blocked(session, blocked)
    runners = _like_their_runners(session, queue, throttled)
    for row in rows:
        if row.blocked is not None and isinstance(row, Workload) and row.array_id is not None:
            found[row.id] = Why([view for view in [reason_view(row.reason)] if view is not None])
    for row in queued:
        counts, kept = arrays.get(row.id), throttled.get(elements.get(row.id, row.id))
        if row.id in depends:
            found[row.id] = Why([*map(_view, depends[row.id])], None, counts)
        elif counts is not None and counts.waiting and row.id in runners:
            found[row.id] = replace(runners[row.id], entry=None, array=counts)
        elif counts is not None and (reason := _why_no_element(counts, kept)) is not None:
            found[row.id] = Why([_view(reason)], None, counts)
        elif kept is not None and row.id in kept.queued:
            found[row.id] = Why([_view(kept.reason())])
    return found


def _why_no_element(counts: ArrayCounts, kept: KeptOut | None) -> Reason | None:
    """Returns why no element of a live array waits for placement; None: some elements wait."""
    if not counts.waiting:
        return Reason(ReasonCode.ARRAY_STARTED, {"live": counts.live, "elements": counts.elements})
    return kept.reason() if kept is not None and kept.unplaced else None


def _why_all(session: Session, queue: published_queue.Newest, rows: Sequence[Row]) -> dict[str, Why]:
    queued = [row for row in rows if Phase(row.phase) in QUEUED_PHASES]
    newest = queue.load(session) if queued else published_queue.NOTHING
    entries = newest.find_all([row.id for row in queued])
    waiting = _waiting(session, queued)
    blockers = dependencies_of(session, [row.id for row in queued if row.blocked is not None])
    coming = machines_on_their_way(session, [row.id for row in queued])
    # Pools grow for none of the others (`activities.capacity.pools.read_shortages`).
    wanted = [r for r in queued if r.held_by is None and r.id in waiting and not _is_over_quota(entries.get(r.id))]
    pools = pools_that_cannot_grow(session, {r.id: (r.tenant, waiting[r.id]["reasons"]) for r in wanted})
    out = {
        row.id: Why(
            [
                *coming.get(row.id, ()),
                *_why_queued(row, entries.get(row.id), waiting.get(row.id), blockers.get(row.id, ())),
                *pools.get(row.id, ()),
            ],
            entries.get(row.id),
        )
        for row in queued
    }
    out |= _like_their_arrays(session, queue, [row for row in queued if not out[row.id].reasons])
    unexplained = [row for row in queued if not out[row.id].reasons]
    out |= {id_: Why([view], entries.get(id_)) for id_, view in _unscanned(session, unexplained).items()}
    running = [row for row in rows if row.phase == Phase.RUNNING]
    started = _started(session, running)
    fewer = _fewer_tasks(session, [row.id for row in running])
    preparing = _preparing(session, [row.id for row in rows if row.phase == Phase.PROVISIONING])
    for row in rows:
        if row.id not in out:
            since = started.get(row.id) if row.phase == Phase.RUNNING else None
            found = reason_view(row.reason) if since is None else _view(running_since(row.attempt, row.region, since))
            also = *preparing.get(row.id, ()), *fewer.get(row.id, ())
            out[row.id] = Why([*([found] if found is not None else []), *also])
    return out


def _is_over_quota(entry: published_queue.QueuePosition | None) -> bool:
    return entry is not None and entry.over_quota


def _like_their_arrays(session: Session, queue: published_queue.Newest, rows: Sequence[Row]) -> dict[str, Why]:
    """Returns the reasons of elements that no scan has ranked: those of the next waiting element of the array."""
    arrays = {row.id: row.array_id for row in rows if isinstance(row, Workload) and row.array_id is not None}
    if not arrays:
        return {}
    wanted = select(Workload).where(Workload.id.in_(set(arrays.values()))).options(defer(Workload.spec))
    heads = session.scalars(wanted).all()
    found = why_all(session, queue, heads)
    return {id_: Why(found[array].reasons) for id_, array in arrays.items() if array in found}


def _like_their_runners(
    session: Session, queue: published_queue.Newest, arrays: Mapping[str, KeptOut]
) -> dict[str, Why]:
    """For arrays that wait only for queued runners, returns the reasons of the first such runner, by array."""
    waits = [id_ for id_, kept in arrays.items() if kept.has_runners and kept.unplaced and kept.free]
    if not waits:
        return {}
    rows = session.scalars(
        select(Workload)
        .where(Workload.array_id.in_(waits), Workload.array_index.is_(None), Workload.phase.in_(sorted(QUEUED_PHASES)))
        .order_by(Workload.submitted_at.desc())
        .options(defer(Workload.spec))
    ).all()
    first = {row.array_id: row for row in rows if row.id not in arrays[row.array_id or ""].queued}
    found = _why_all(session, queue, list(first.values()))
    return {array: found[row.id] for array, row in first.items() if array is not None}


def why_unstored(session: Session, row: Workload) -> list[ReasonView]:
    """Returns why outputs of the newest attempt, which has ended, were not stored; empty: all were stored."""
    attempt = session.get(Attempt, (row.id, row.attempt))
    if attempt is None or not attempt.unstored:
        return []
    first = attempt.unstored[0]
    detail = {"name": first["name"], "task": f"{first['job']}/{first['task']}", "why": first["why"]}
    return [_view(Reason(ReasonCode.OUTPUTS_NOT_STORED, {**detail, "more": len(attempt.unstored) - 1}))]


def why_new(row: Row) -> Why:
    """Returns the reasons of a workload that was created in this transaction, without the queries of `why_all`."""
    return Why([view for view in [reason_view(row.reason)] if view is not None])


def _why_queued(
    row: Row,
    entry: published_queue.QueuePosition | None,
    waiting: Mapping[str, Any] | None,
    depends: Sequence[DecidedDependency],
) -> list[ReasonView]:
    """Returns the reasons of a queued workload: hold, dependencies, quota, refusals of regions.

    The list is empty if it was never scanned.
    """
    quota = entry.reason.to_json() if entry is not None and entry.reason is not None else None
    found = [quota, *((waiting or {}).get("reasons", []))]
    if row.held_by is not None:
        found = [Reason(ReasonCode.HELD, {"by": row.held_by}).to_json(), quota]
    if blockers := [reason for one in depends if (reason := one.reason(kept=True)) is not None]:
        found = [*(found[:1] if row.held_by is not None else ()), *(reason.to_json() for reason in blockers)]
    views: list[ReasonView] = []
    for body in found:
        view = reason_view(body)
        if view is not None and view not in views:
            views.append(view)
    return views


def _unscanned(session: Session, rows: Sequence[Row]) -> dict[str, ReasonView]:
    """Returns the reason of queued workloads without a scan: they wait for the next scan, or the scan is overdue."""
    if not rows:
        return {}
    now: datetime = session.execute(_NOW).scalar_one()
    old = [row.id for row in rows if (now - row.submitted_at).total_seconds() > OVERDUE_S]
    changed = dict(session.execute(_CHANGED, {"ids": old}).all()) if old else {}
    out = {}
    for row in rows:
        since = changed.get(row.id) or row.submitted_at
        overdue = (now - since).total_seconds() > OVERDUE_S
        detail = {"since": since.astimezone(UTC).isoformat(timespec="seconds")} if overdue else {}
        out[row.id] = _view(Reason(ReasonCode.SCAN_OVERDUE if overdue else ReasonCode.SCAN_PENDING, detail))
    return out


def _waiting(session: Session, rows: Sequence[Row]) -> dict[str, Mapping[str, Any]]:
    if not rows:
        return {}
    return dict(session.execute(_WAITING, {"ids": [row.id for row in rows]}).all())


def _started(session: Session, rows: Sequence[Row]) -> dict[str, datetime | None]:
    """Returns the start times of the current attempts of running workloads."""
    if not rows:
        return {}
    newest = {(row.id, row.attempt) for row in rows}
    found = session.execute(_LIVE, {"ids": [row.id for row in rows]})
    return {w: at for w, number, at in found if (w, number) in newest}


def _fewer_tasks(session: Session, ids: Sequence[str]) -> dict[str, list[ReasonView]]:
    """Returns the reasons of each elastic workload that has fewer tasks than it may have."""
    if not ids:
        return {}
    found = {}
    for id_, most, plan in session.execute(_ELASTIC, {"ids": list(ids)}):
        tasks = sum(tasks_of_jobs(plan["jobs"]).values())
        if tasks < most:
            reasons = [Reason(ReasonCode.SHRUNK, plan["shrunk"])] if "shrunk" in plan else []
            reasons.append(Reason(ReasonCode.FEWER_TASKS, {"tasks": tasks, "most": most}))
            found[id_] = [*map(_view, reasons)]
    return found


def _preparing(session: Session, ids: Sequence[str]) -> dict[str, list[ReasonView]]:
    """Returns for each workload that is being started a text about what its first machines, by name, still wait for."""
    if not ids:
        return {}
    found = select(Attempt.workload, Attempt.preparing).where(
        Attempt.workload.in_(ids), Attempt.released_at.is_(None), Attempt.preparing.is_not(None)
    )
    return {
        workload: [
            _view(Reason(ReasonCode.PREPARING, {"machine": machine, "waits_for": text}))
            for machine, text in sorted((told or {}).items())[:_MACHINES_SHOWN]
        ]
        for workload, told in session.execute(found)
    }


def _view(reason: Reason) -> ReasonView:
    return ReasonView(**reason.to_json())


class Waits(NamedTuple):
    """How long a workload has waited, in seconds."""

    waited_s: float
    """Time since the submission, or until the end, without pauses. It counts for credit and reservations."""
    eligible_s: float | None
    """Since it could last be placed: since its submission, its last attempt or its last pause, whichever ended last.
    None: it is not queued, or is on hold or blocked."""


def waits_of(session: Session, rows: Sequence[Row]) -> dict[str, Waits]:
    """Returns how long each workload has waited, by id."""
    eligible = [row for row in rows if Phase(row.phase) in QUEUED_PHASES and (row.held_by or row.blocked) is None]
    again = [row.id for row in eligible if row.attempt]
    found = session.execute(_RELEASED, {"ids": again}).all() if again else []
    released = {(workload, attempt): at for workload, attempt, at in found}
    since = {row.id: (row.submitted_at, row.unheld_at, released.get((row.id, row.attempt))) for row in eligible}
    now = datetime.now(UTC)
    out = {}
    for row in rows:
        ends = [at for at in (row.finished_at, row.held_at) if at is not None]
        waited_s = (min(ends, default=now) - row.submitted_at).total_seconds() - row.paused_s
        eligible_s = None
        if row.id in since:
            eligible_s = max(0.0, (now - max(at for at in since[row.id] if at is not None)).total_seconds())
        out[row.id] = Waits(max(0.0, waited_s), eligible_s)
    return out
