"""Endpoints for instances: machines that were requested from providers, including those that no longer exist."""

from datetime import UTC, datetime
from typing import Annotated

from fastapi import Query
from pydantic import Field
from sqlalchemy import select

from api.auth import Operator, Viewer
from api.bodies import JsonOnly, Line
from api.masking import mask
from api.openapi import refusals
from api.paging import MAX_ITEMS, Cursor, Limit, Page, page
from api.problems import HttpProblem, ProblemType, existing
from api.routing import Router
from api.state import StateOf
from api.views import ReasonView, View, reason_view, write_audit
from domain.capacity import CapacityKind
from domain.lifecycle.instances import InstancePhase
from domain.reasons import Reason, ReasonCode
from infra.db import outbox
from infra.db.capacity import InstanceRow

router = Router(prefix="/v1/instances", tags=["fleet"])
_HOUR_S = 3600.0


class InstanceView(View):
    """A machine that was requested from a provider."""

    id: str = Field(examples=["in-0jd5m2kq71r8w3aa"])
    region: str
    pool: str
    cluster: str
    provider: str
    zone: str
    kind: CapacityKind
    machine_type: str
    gpus: int
    gpu_type: str | None
    cpus: float
    memory_bytes: int
    usd_per_h: float = Field(description="Price at the time of the request, in US dollars an hour")
    usd: float = Field(description="Cost since its start in US dollars, at that price")
    phase: InstancePhase
    reason: ReasonView | None = Field(description="Why it is in this phase")
    ending: ReasonView | None = Field(description="Why the machine must be ended; null: it can stay")
    native_id: str | None = Field(description="Id at the provider")
    wanted_by: list[str] = Field(description="Workloads that wait for it, while it is being launched or is idle")
    machine: str | None = Field(description="Id of its machine, after its agent has registered")
    requested_at: datetime
    expected_at: datetime | None = Field(
        description="When its agent is expected to be ready, according to the offer or the provider"
    )
    launched_at: datetime | None = Field(description="When its provider accepted the launch")
    started_at: datetime | None = Field(description="When its provider started the machine; null: it waits there")
    ends_at: datetime | None = Field(description="When its provider will end the machine; null: unknown")
    ready_at: datetime | None = Field(description="When its machine first accepted work")
    gone_at: datetime | None


class InstanceList(Page[InstanceView]):
    """A page of instances, the newest first."""


@router.get("", summary="List instances")
def list_instances(
    state: StateOf,
    caller: Viewer,
    region: Annotated[Line | None, Query(description="Only instances in this region")] = None,
    pool: Annotated[Line | None, Query(description="Only instances of pools with this name")] = None,
    gone: Annotated[bool, Query(description="Include instances that no longer exist")] = False,
    limit: Limit = MAX_ITEMS,
    cursor: Cursor = None,
) -> InstanceList:
    """Lists instances, the newest first."""
    wanted = select(InstanceRow).order_by(InstanceRow.id.desc()).limit(limit + 1)
    if not gone:
        wanted = wanted.where(InstanceRow.gone_at.is_(None))
    if region is not None:
        wanted = wanted.where(InstanceRow.region == region)
    if pool is not None:
        wanted = wanted.where(InstanceRow.pool == pool)
    if cursor is not None:
        wanted = wanted.where(InstanceRow.id < cursor)
    with state.transaction() as session:
        rows, following = page(session.scalars(wanted).all(), limit, lambda row: row.id)
        return mask(session, caller, InstanceList(items=[_view(row) for row in rows], next_cursor=following))


@router.get("/{instance}", summary="Get an instance", responses=refusals(404))
def get_instance(instance: str, state: StateOf, caller: Viewer) -> InstanceView:
    """Returns one instance."""
    with state.transaction() as session:
        row = existing(session, InstanceRow, instance, "instance")
        return mask(session, caller, _view(row))


@router.post("/{instance}/end", summary="End an instance", dependencies=[JsonOnly], responses=refusals(404, 409))
def end_instance(instance: str, state: StateOf, caller: Operator) -> InstanceView:
    """Drains the instance's machine, then ends the instance. The pool launches a replacement unless it is too large."""
    with state.transaction() as session:
        row = existing(session, InstanceRow, instance, "instance", lock=True)
        if row.gone_at is not None:
            raise HttpProblem(
                ProblemType.CONFLICT, f"instance {instance} ended at {row.gone_at.isoformat(timespec='seconds')}"
            )
        if row.ending is None:
            row.ending = Reason(ReasonCode.ENDED_BY_OPERATOR, {"by": caller.id}).to_json()
            outbox.instance(session, row.id)
            write_audit(session, caller, "instance.end", row.id, machine=row.machine)
        session.flush()
        return _view(row)


def _view(row: InstanceRow) -> InstanceView:
    ended_at = row.gone_at or datetime.now(UTC)
    hours = 0.0 if row.started_at is None else (ended_at - row.started_at).total_seconds() / _HOUR_S
    return InstanceView.from_row(
        row,
        cpus=row.cpus_milli / 1000,
        usd=max(0.0, hours) * row.usd_per_h,
        reason=reason_view(row.reason),
        ending=reason_view(row.ending),
        wanted_by=sorted(row.wanted_by),
    )
