"""The requests of a service by minute, as its balancers counted them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.auth import Viewer
from api.openapi import refusals
from api.routing import Router
from api.services.service_queries import find_service, weighted
from api.state import StateOf
from api.views import View
from infra.db.services import ServiceRequests

router = Router(prefix="/v1/services", tags=["services"])
_MINUTE_S = 60
_MOST_MINUTES = 1440
_LATE_S = 15
"""Balancers report a second within this time, so a minute is shown that much after its end."""


class TrafficMinute(View):
    """One minute of requests. A minute without a report of a balancer is left out."""

    at: datetime = Field(description="Begin of the minute")
    per_s: float
    failed_per_s: float = Field(description="Requests that got an error of the balancer, no answer, or a part of one")
    p50_s: float | None = Field(description="Median time to the last byte, averaged over the minute by requests")
    p99_s: float | None = Field(description="99th percentile of that time, averaged in the same way")


class TrafficList(View):
    """The requests of a service by minute, the earliest first."""

    items: list[TrafficMinute]


@router.get("/{id}/traffic", summary="List a service's requests by minute", responses=refusals(404, 409))
def list_traffic(
    id: str,
    state: StateOf,
    caller: Viewer,
    minutes: Annotated[int, Query(ge=1, le=_MOST_MINUTES, description="Number of the last minutes")] = 60,
) -> TrafficList:
    """Lists the last whole minutes. Counts are kept for a day."""
    with state.transaction() as session:
        row = find_service(session, caller, id)
        return TrafficList(items=_traffic(session, row.id, minutes))


def _traffic(session: Session, service: str, minutes: int) -> list[TrafficMinute]:
    now: datetime = session.execute(select(func.now())).scalar_one()
    end = (int(now.timestamp()) - _LATE_S) // _MINUTE_S
    minute = ServiceRequests.second // _MINUTE_S
    rows: Sequence[Any] = session.execute(
        select(
            minute,
            func.sum(ServiceRequests.requests),
            func.sum(ServiceRequests.failed + ServiceRequests.cut),
            weighted(ServiceRequests.p50_s),
            weighted(ServiceRequests.p99_s),
        )
        .where(
            ServiceRequests.service == service,
            ServiceRequests.second >= (end - minutes) * _MINUTE_S,
            ServiceRequests.second < end * _MINUTE_S,
        )
        .group_by(minute)
        .order_by(minute)
    ).all()
    return [
        TrafficMinute(
            at=datetime.fromtimestamp(number * _MINUTE_S, UTC),
            per_s=float(requests) / _MINUTE_S,
            failed_per_s=float(failed) / _MINUTE_S,
            p50_s=p50_s,
            p99_s=p99_s,
        )
        for number, requests, failed, p50_s, p99_s in rows
    ]
