"""The queue, and why a workload is where it is: from what the last scan published and what regions answered."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.auth import Viewer
from api.openapi import refusals
from api.state import StateOf
from api.views import ReasonView, reason_view
from api.workloads.reading import effective_level, find
from api.workloads.views import QueueEntry, QueueView, WhyView
from domain.phases import QUEUED_PHASES, Phase
from domain.reasons import Reason, ReasonCode
from infra.db.models import Attempt, Publication, Tenant, Waiting, Workload

PUBLICATION = "queue"
_MAX_QUEUE = 10_000
router = APIRouter(prefix="/v1", tags=["following"])


@dataclass(frozen=True)
class Published:
    """What the last scan published."""

    scanned_at: datetime | None
    items: Mapping[str, Mapping[str, Any]]
    """Workload to its entry, in queue order."""

    @classmethod
    def load(cls, session: Session) -> "Published":
        """The newest publication; empty before the first."""
        row = session.get(Publication, PUBLICATION)
        if row is None:
            return cls(None, {})
        scanned_s = row.body.get("scanned_at_s")
        scanned_at = row.at if scanned_s is None else datetime.fromtimestamp(float(scanned_s), UTC)
        items = sorted(row.body.get("items", []), key=lambda item: (item["position"], item["id"]))
        return cls(scanned_at, {item["id"]: item for item in items})


@router.get("/queue", summary="The queue")
def queue(
    state: StateOf,
    caller: Viewer,
    limit: Annotated[int, Query(ge=1, le=_MAX_QUEUE, description="Entries at most")] = 1000,
) -> QueueView:
    """Waiting workloads in the order of the last scan, each with its reasons. Those that it has not seen come last."""
    with state.transaction() as session:
        published = Published.load(session)
        waiting = (
            select(Workload, Waiting.reasons, Tenant.level)
            .join(Tenant, Tenant.name == Workload.tenant)
            .outerjoin(Waiting, Waiting.workload == Workload.id)
            .where(Workload.phase.in_(sorted(QUEUED_PHASES)), Workload.finished_at.is_(None))
        )
        if caller.tenant is not None:
            waiting = waiting.where(Workload.tenant == caller.tenant)
        rows = session.execute(waiting).all()
        last = len(published.items) + 1

        def order(found: tuple[Workload, Any, int]) -> tuple[object, ...]:
            item = published.items.get(found[0].id)
            return (item["position"] if item else last, found[0].submitted_at, found[0].id)

        entries = [_entry(published, row, reasons, level) for row, reasons, level in sorted(rows, key=order)[:limit]]
        return QueueView(scanned_at=published.scanned_at, total=len(rows), items=entries)


def _entry(published: Published, row: Workload, reasons: Mapping[str, Any] | None, tenant_level: int) -> QueueEntry:
    item = published.items.get(row.id, {})
    return QueueEntry(
        id=row.id, name=row.name, tenant=row.tenant, position=item.get("position"), rank=item.get("rank"),
        level=max(tenant_level, row.level or 0), over_quota=item.get("over_quota"), credit=item.get("credit"),
        submitted_at=row.submitted_at, reasons=_reasons(row, item, reasons),
    )  # fmt: skip


@router.get("/workloads/{id}/why", summary="Why a workload is where it is", responses=refusals(404))
def why(id: str, state: StateOf, caller: Viewer) -> WhyView:
    """Why it waits, or what it waits for, or how it ended: in one sentence, and as codes with their numbers."""
    with state.transaction() as session:
        row = find(session, caller, id)
        is_queued = Phase(row.phase) in QUEUED_PHASES
        published = Published.load(session) if is_queued else Published(None, {})
        item = published.items.get(row.id, {}) if is_queued else {}
        waiting = session.get(Waiting, row.id) if is_queued else None
        stored = reason_view(row.reason)
        if is_queued:
            reasons = _reasons(row, item, waiting.reasons if waiting else None)
            summary = _why_queued(row, item, reasons, len(published.items))
        else:
            reasons = [stored] if stored else []
            summary = _why_not_queued(session, row, stored)
        return WhyView(
            workload=row.id, phase=Phase(row.phase), summary=summary, reasons=reasons, rank=item.get("rank"),
            level=effective_level(session, row), over_quota=item.get("over_quota"), credit=item.get("credit"),
            position=item.get("position"), of=len(published.items) if item else None,
        )  # fmt: skip


def _reasons(row: Workload, item: Mapping[str, Any], waiting: Mapping[str, Any] | None) -> list[ReasonView]:
    """Why a queued workload is not placed: it is held, over quota, what each region said, or not scanned yet."""
    found = [item.get("reason"), *((waiting or {}).get("reasons", []))]
    if row.held_by is not None:
        found = [Reason(ReasonCode.HELD, {"by": row.held_by}).to_json(), item.get("reason")]
    views: list[ReasonView] = []
    for body in found:
        view = reason_view(body)
        if view is not None and view not in views:
            views.append(view)
    return views or [_scan_pending()]


def _scan_pending() -> ReasonView:
    return ReasonView(**Reason(ReasonCode.SCAN_PENDING).to_json())


def _why_queued(row: Workload, item: Mapping[str, Any], reasons: list[ReasonView], length: int) -> str:
    stored = reason_view(row.reason)
    parts = []
    if row.attempt and stored is not None and stored.code != ReasonCode.SCAN_PENDING:
        parts.append(f"attempt {row.attempt} ended: {stored.sentence}")
    if row.held_by is not None:
        parts.append(reasons[0].sentence)
    elif not item:
        parts.append(_scan_pending().sentence)
    else:
        place = f"waits at position {item['position']} of {length}"
        place += ", over quota" if item.get("over_quota") else ""
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
