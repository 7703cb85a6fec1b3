"""The queue, and why a workload is where it is: from what the last scan published and what regions answered."""

from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from api.auth import Viewer
from api.openapi import refusals
from api.state import StateOf
from api.views import ReasonView, reason_view
from api.workloads.reading import effective_level, find
from api.workloads.views import QueueEntry, QueueView, WhyView
from domain.phases import QUEUED_PHASES, Phase
from domain.reasons import Reason, ReasonCode
from infra.db import published
from infra.db.logs import Waiting
from infra.db.models import Attempt, Tenant, Workload

_MAX_QUEUE = 10_000
_PART = 100
"""So many of the queue are looked up at once, at least."""
router = APIRouter(prefix="/v1", tags=["following"])


@router.get("/queue", summary="The queue")
def queue(
    state: StateOf,
    caller: Viewer,
    limit: Annotated[int, Query(ge=1, le=_MAX_QUEUE, description="Entries at most")] = 1000,
) -> QueueView:
    """Waiting workloads in the order of the last scan, each with its reasons. Those that it has not seen come last."""
    with state.transaction() as session:
        newest = state.queue.load(session)
        waiting = (
            select(Workload, Waiting.reasons, Tenant.level)
            .join(Tenant, Tenant.name == Workload.tenant)
            .outerjoin(Waiting, Waiting.workload == Workload.id)
            .where(Workload.phase.in_(sorted(QUEUED_PHASES)), Workload.finished_at.is_(None))
        )
        if caller.tenant is not None:
            waiting = waiting.where(Workload.tenant == caller.tenant)
        total = session.scalar(select(func.count()).select_from(waiting.with_only_columns(Workload.id).subquery()))
        entries = _in_order(session, newest, waiting, caller.tenant, limit)
        if len(entries) < limit:
            unseen = waiting.where(Workload.id.not_in([e.id for e in entries]))
            rows = session.execute(unseen.order_by(Workload.submitted_at, Workload.id).limit(limit - len(entries)))
            entries += [_entry(None, row, reasons, level) for row, reasons, level in rows]
        return QueueView(scanned_at=_scanned_at(newest), total=total or 0, items=entries)


def _in_order(
    session: Session,
    newest: published.Queue,
    waiting: Select[Workload, dict[str, Any], int],
    tenant: str | None,
    limit: int,
) -> list[QueueEntry]:
    """The first of those that the scan ranked and that still wait."""
    entries: list[QueueEntry] = []
    ranked = iter(newest.of_tenant(tenant))
    while len(entries) < limit and (part := list(islice(ranked, max(limit, _PART)))):
        found = {
            row.id: (row, reasons, level)
            for row, reasons, level in session.execute(waiting.where(Workload.id.in_([id_ for _, id_ in part])))
        }
        entries += [_entry(newest.entry(place), *found[id_]) for place, id_ in part if id_ in found]
    return entries[:limit]


def _scanned_at(newest: published.Queue) -> datetime | None:
    return datetime.fromtimestamp(newest.scanned_at_s, UTC) if newest.scan else None


def _entry(
    item: published.Entry | None, row: Workload, reasons: Mapping[str, Any] | None, tenant_level: int
) -> QueueEntry:
    return QueueEntry(
        id=row.id, name=row.name, tenant=row.tenant, position=item.position if item else None,
        rank=item.rank if item else None, level=max(tenant_level, row.level or 0),
        over_quota=item.over_quota if item else None, credit=item.credit if item else None,
        submitted_at=row.submitted_at, reasons=_reasons(row, item, reasons),
    )  # fmt: skip


@router.get("/workloads/{id}/why", summary="Why a workload is where it is", responses=refusals(404))
def why(id: str, state: StateOf, caller: Viewer) -> WhyView:
    """Why it waits, or what it waits for, or how it ended: in one sentence, and as codes with their numbers."""
    with state.transaction() as session:
        row = find(session, caller, id)
        is_queued = Phase(row.phase) in QUEUED_PHASES
        newest = state.queue.load(session) if is_queued else published.NOTHING
        item = newest.find(row.id)
        waiting = session.get(Waiting, row.id) if is_queued else None
        stored = reason_view(row.reason)
        if is_queued:
            reasons = _reasons(row, item, waiting.reasons if waiting else None)
            summary = _why_queued(row, item, reasons, len(newest))
        else:
            reasons = [stored] if stored else []
            summary = _why_not_queued(session, row, stored)
        return WhyView(
            workload=row.id, phase=Phase(row.phase), summary=summary, reasons=reasons, rank=item.rank if item else None,
            level=effective_level(session, row), over_quota=item.over_quota if item else None,
            credit=item.credit if item else None, position=item.position if item else None,
            of=len(newest) if item else None,
        )  # fmt: skip


def _reasons(row: Workload, item: published.Entry | None, waiting: Mapping[str, Any] | None) -> list[ReasonView]:
    """Why a queued workload is not placed: it is held, over quota, what each region said, or not scanned yet."""
    quota = item.reason.to_json() if item is not None and item.reason is not None else None
    found = [quota, *((waiting or {}).get("reasons", []))]
    if row.held_by is not None:
        found = [Reason(ReasonCode.HELD, {"by": row.held_by}).to_json(), quota]
    views: list[ReasonView] = []
    for body in found:
        view = reason_view(body)
        if view is not None and view not in views:
            views.append(view)
    return views or [_scan_pending()]


def _scan_pending() -> ReasonView:
    return ReasonView(**Reason(ReasonCode.SCAN_PENDING).to_json())


def _why_queued(row: Workload, item: published.Entry | None, reasons: list[ReasonView], length: int) -> str:
    stored = reason_view(row.reason)
    parts = []
    if row.attempt and stored is not None and stored.code != ReasonCode.SCAN_PENDING:
        parts.append(f"attempt {row.attempt} ended: {stored.sentence}")
    if row.held_by is not None:
        parts.append(reasons[0].sentence)
    elif item is None:
        parts.append(_scan_pending().sentence)
    else:
        place = f"waits at position {item.position} of {length}"
        place += ", over quota" if item.over_quota else ""
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
            started_at = session.scalar(
                select(Attempt.started_at).where(Attempt.workload == row.id, Attempt.attempt == row.attempt)
            )
            since = f" since {started_at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if started_at else ""
            text = f"attempt {row.attempt} runs{region}{since}"
        case Phase.CHECKPOINTING:
            text = f"saves a checkpoint{region} and stops" + (f": {text}" if text else "")
        case _:
            attempts = session.scalar(select(func.count()).where(Attempt.workload == row.id))
            ended = text or "no reason was recorded"
            text = f"{ended} (after {attempts} attempt{'' if attempts == 1 else 's'})"
    return f"{row.phase}: {text}"
