"""Endpoints for the queue and for the state of one workload, from the last published scan and the regions' bids."""

from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

from fastapi import Query
from sqlalchemy import Select, bindparam, func, select
from sqlalchemy.orm import Session

from api.auth import Caller, Viewer
from api.masking import mask
from api.openapi import refusals
from api.routing import Router
from api.state import ApiState, StateOf
from api.views import ReasonView, reason_view
from api.workloads.elements import has_no_waiting
from api.workloads.expected_start import start_view
from api.workloads.reasons import QueueRow, Waits, Why, waits_of, why_all, why_unstored
from api.workloads.views import QueueEntry, QueueView, WhyView
from api.workloads.workload_queries import effective_level, find
from domain.phases import QUEUED_PHASES, Phase
from domain.reasons import ReasonCode
from infra.db import published_queue
from infra.db.models import Allocation, Attempt, Machine, Workload
from infra.db.tenants import Tenant

_MAX_QUEUE = 10_000
_LAST = 10**9
_PART = 100
"""Minimum number of queued workloads that are read in one query."""
_MODES = (
    select(Machine.isolation)
    .join(Allocation, Allocation.machine == Machine.id)
    .where(
        Allocation.workload == bindparam("workload"),
        Allocation.attempt == bindparam("attempt"),
        Allocation.released_at.is_(None),
    )
    .distinct()
)
"""The modes of isolation of the machines that a workload holds."""
router = Router(prefix="/v1", tags=["following"])


_COLUMNS = (*(getattr(Workload, name) for name in QueueRow._fields[:-1]), Tenant.level.label("tenant_level"))


@router.get("/queue", summary="List the queue")
def queue(
    state: StateOf,
    caller: Viewer,
    limit: Annotated[int, Query(ge=1, le=_MAX_QUEUE, description="Maximum number of entries")] = 1000,
    after: Annotated[int, Query(ge=0, le=_LAST, description="Only workloads behind this position")] = 0,
) -> QueueView:
    """Lists waiting workloads in the order of the last scan, each with its reasons. Unscanned workloads come last."""
    return read_queue(state, caller, limit, after)


def read_queue(state: ApiState, caller: Caller, limit: int, after: int = 0, most: int | None = None) -> QueueView:
    """Returns a part of the queue (`queue`). `most`: the total is counted only up to this number."""
    with state.transaction() as session:
        newest = state.queue.load(session)
        waiting = (
            select(*_COLUMNS)
            .join(Tenant, Tenant.name == Workload.tenant)
            .where(Workload.phase.in_(sorted(QUEUED_PHASES)), Workload.finished_at.is_(None), ~has_no_waiting())
        )
        if caller.tenant is not None:
            waiting = waiting.where(Workload.tenant == caller.tenant)
        total = session.scalar(
            select(func.count()).select_from(waiting.with_only_columns(Workload.id).limit(most).subquery())
        )
        rows = _in_order(session, newest, waiting, caller.tenant, limit, after)
        if len(rows) < limit:
            rows += _unscanned(session, newest, waiting, limit - len(rows))
        whys = why_all(session, state.queue, rows)
        waits = waits_of(session, rows)
        items = [_entry(whys[row.id], row, waits[row.id]) for row in rows]
        found = QueueView(scanned_at=_scanned_at(newest), total=total or 0, items=items)
        return mask(session, caller, found)


def _in_order(
    session: Session,
    newest: published_queue.PublishedQueue,
    waiting: Select[Any],
    tenant: str | None,
    limit: int,
    after: int,
) -> list[QueueRow]:
    """Returns the first `limit` workloads in the scan's order that are still queued and behind position `after`."""
    rows: list[QueueRow] = []
    ranked = iter(newest.of_tenant(tenant, after))
    while len(rows) < limit and (part := list(islice(ranked, max(limit, _PART)))):
        wanted = waiting.where(Workload.id.in_([id_ for _, id_ in part]))
        found = {row.id: row for row in map(QueueRow._make, session.execute(wanted))}
        rows += [found[id_] for _, id_ in part if id_ in found]
    return rows[:limit]


def _unscanned(
    session: Session, newest: published_queue.PublishedQueue, waiting: Select[Any], limit: int
) -> list[QueueRow]:
    """Returns the workloads that the scan has not ranked, oldest first, of the newest `_MAX_QUEUE` that wait."""
    recent = waiting.with_only_columns(Workload.id).order_by(Workload.submitted_at.desc(), Workload.id.desc())
    ids = list(session.scalars(recent.limit(_MAX_QUEUE)))
    ranked = newest.find_all(ids)
    unseen = [id_ for id_ in reversed(ids) if id_ not in ranked][:limit]
    rows = session.execute(waiting.where(Workload.id.in_(unseen)).order_by(Workload.submitted_at, Workload.id))
    return list(map(QueueRow._make, rows))


def _scanned_at(newest: published_queue.PublishedQueue) -> datetime | None:
    return datetime.fromtimestamp(newest.scanned_at_s, UTC) if newest.scan else None


def _entry(why_: Why, row: QueueRow, waits: Waits) -> QueueEntry:
    item = why_.entry
    return QueueEntry(
        id=row.id, name=row.name, tenant=row.tenant, position=item.position if item else None,
        rank=item.rank if item else None, level=max(row.tenant_level, row.level or 0),
        over_quota=item.over_quota if item else None, credit=item.credit if item else None,
        submitted_at=row.submitted_at, waited_s=waits.waited_s, eligible_s=waits.eligible_s, reasons=why_.reasons,
        expected_start=start_view(row, item),
    )  # fmt: skip


@router.get("/workloads/{id}/why", summary="Explain a workload's state", responses=refusals(404))
def why(id: str, state: StateOf, caller: Viewer) -> WhyView:
    """Explains why a workload waits, or how it ended: in one sentence, and as reason codes with details."""
    with state.transaction() as session:
        row = find(session, caller, id)
        is_queued = Phase(row.phase) in QUEUED_PHASES
        newest = state.queue.load(session) if is_queued else published_queue.NOTHING
        found = why_all(session, state.queue, [row])[row.id]
        item, reasons = found.entry, found.reasons
        if is_queued:
            summary = _why_queued(row, item, reasons, len(newest))
        else:
            summary = _why_not_queued(session, row, found.first)
            reasons = [*reasons, *why_unstored(session, row)]
        told = WhyView(
            workload=row.id, phase=Phase(row.phase), summary=summary, reasons=reasons, rank=item.rank if item else None,
            level=effective_level(session, row), over_quota=item.over_quota if item else None,
            credit=item.credit if item else None, preference=item.preference if item else None,
            position=item.position if item else None, of=len(newest) if item else None,
            expected_start=start_view(row, item), **waits_of(session, [row])[row.id]._asdict(),
        )  # fmt: skip
        return mask(session, caller, told)


def _why_queued(
    row: Workload, item: published_queue.QueuePosition | None, reasons: list[ReasonView], length: int
) -> str:
    stored = reason_view(row.reason)
    parts = []
    if row.attempt and stored is not None and stored.code != ReasonCode.SCAN_PENDING:
        parts.append(f"attempt {row.attempt} ended: {stored.sentence}")
    if row.held_by is not None and row.blocked is None:
        parts.append(reasons[0].sentence)
    elif item is None or row.blocked is not None:
        parts.append("; ".join(reason.sentence for reason in reasons))
    else:
        place = f"waits at position {item.position} of {length}"
        place += ", over quota" if item.over_quota else ""
        if round(item.preference, 1):
            place += f", with {item.preference:+.1f} credit among its tenant's workloads of this level"
        parts.append(f"{place}: {'; '.join(r.sentence for r in reasons)}")
    return f"{row.phase}: {'; '.join(parts)}"


def _why_not_queued(session: Session, row: Workload, stored: ReasonView | None) -> str:
    text = stored.sentence if stored else None
    region = f" in {row.region}" if row.region else ""
    match Phase(row.phase):
        case Phase.PLACING:
            text = text or f"waits for slots{region}"
        case Phase.MIGRATING:
            text = text or f"its checkpoint is being copied{region and ' to ' + str(row.region)}"
        case Phase.PROVISIONING:
            text = text or f"its tasks are being started{region}"
        case Phase.RUNNING:
            since = text if text and stored and stored.code == ReasonCode.RUNNING else None
            modes = session.scalars(_MODES, {"workload": row.id, "attempt": row.attempt}).all()
            isolation = f" (isolation {', '.join(sorted(modes))})" if modes else ""
            text = f"{since or f'attempt {row.attempt} runs{region}'}{isolation}"
        case Phase.CHECKPOINTING:
            text = f"saves a checkpoint{region} and stops" + (f": {text}" if text else "")
        case _:
            attempts = session.scalar(select(func.count()).where(Attempt.workload == row.id))
            ended = text or "no reason was recorded"
            text = ended + (f" (after {attempts} attempt{'' if attempts == 1 else 's'})" if attempts else "")
    return f"{row.phase}: {text}"
