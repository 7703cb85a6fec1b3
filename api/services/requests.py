"""The endpoint to which balancers report the numbers of requests of a service."""

import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints
from sqlalchemy import func
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from api.auth import Balancer
from api.bodies import Body, JsonOnly
from api.openapi import refusals
from api.problems import invalid
from api.routing import Router
from api.services.service_queries import find_service
from api.state import StateOf
from infra.db import outbox
from infra.db.services import BalancerReport, ServiceRequests, ServiceRow

router = Router(prefix="/v1/services", tags=["services"])
_MOST_SECONDS = 3600
_FUTURE_S = 60.0
_Count = Annotated[int, Field(ge=0, le=1_000_000_000, strict=True)]
_Seconds = Annotated[float, Field(ge=0, le=1e9)]


class CanaryBody(Body):
    """Counts of one second of answers, by which a canary version is judged."""

    version: Annotated[int, Field(ge=0, le=1 << 40, strict=True)] = Field(description="The version")
    answered: _Count = Field(0, description="Complete answers of the canary's replicas with a status below 500")
    failed: _Count = Field(0, description="Requests to the canary's replicas without such an answer; each retry counts")
    slow: _Count = Field(0, description="Answers of the canary's replicas that took longer than the canary's `slow_s`")
    others_answered: _Count = Field(0, description="`answered` of the other replicas")
    others_failed: _Count = Field(0, description="`failed` of the other replicas")


class SecondBody(Body):
    """Counts of one second: requests that began, failed or were cut off in it."""

    second: Annotated[int, Field(ge=0, le=1 << 40, strict=True)] = Field(description="Seconds since the epoch")
    requests: _Count = Field(description="Requests that began in this second")
    failed: _Count = Field(0, description="Requests that got an error of the balancer or no answer")
    cut: _Count = Field(0, description="Answers that ended early")
    p50_s: _Seconds | None = Field(None, description="Median time until the last byte of the answer")
    p99_s: _Seconds | None = Field(None, description="99th percentile of the time until the last byte of the answer")
    canary: CanaryBody | None = Field(None, description="null: no version is judged, or nothing was counted")


class BalancedReplica(Body):
    """The state of one replica in a balancer."""

    replica: Annotated[int, Field(ge=0, le=1 << 40, strict=True)] = Field(description="Number of the replica")
    ongoing: _Count = Field(0, description="Its requests in progress")
    drained: bool = Field(False, description="Whether the balancer sends it no new requests, because it will be ended")
    ejected_s: _Seconds | None = Field(
        None, description="Seconds since the balancer ejected it; null: it is not ejected"
    )
    why: Annotated[str, StringConstraints(max_length=500)] | None = Field(None, description="Why it was ejected")


class NowBody(Body):
    """The current state of a balancer."""

    waiting: _Count = Field(0, description="Requests that wait because no replica is ready")
    replicas: Annotated[list[BalancedReplica], Field(max_length=1000)] = Field(default_factory=list)


class RequestsBody(Body):
    """Counts of one balancer, for seconds that are over."""

    balancer: Annotated[str, StringConstraints(min_length=1, max_length=100)] = Field(
        description="A name of the balancer that is unique and does not change"
    )
    seconds: Annotated[list[SecondBody], Field(max_length=_MOST_SECONDS)]
    now: NowBody | None = Field(None, description="null: the balancer does not say")


@router.post(
    "/{id}/requests", status_code=204, summary="Report counted requests", dependencies=[JsonOnly],
    responses=refusals(404, 409),
)  # fmt: skip
def report_requests(id: str, body: RequestsBody, state: StateOf, caller: Balancer) -> None:
    """Stores the counts of a balancer. A second that was reported before is not changed, so reports can be repeated.

    A balancer also reports seconds without requests, at least one in ten seconds: its silence means that the number of
    requests is unknown. A viewer's key gets 403.
    """
    caller.require_counter()
    now_s = time.time()
    for at, one in enumerate(body.seconds):
        if one.second > now_s + _FUTURE_S:
            raise invalid(f"seconds[{at}].second", f"{one.second} is in the future; the clock here is {int(now_s)}")
    with state.transaction() as session:
        row = find_service(session, caller, id)
        rows = [{"service": row.id, "balancer": body.balancer, **one.model_dump()} for one in body.seconds]
        if rows:
            session.execute(insert(ServiceRequests).values(rows).on_conflict_do_nothing())
        if body.now is not None:
            _store_now(session, row, body.balancer, body.now)


def _store_now(session: Session, row: ServiceRow, balancer: str, now: NowBody) -> None:
    """Stores the current state that a balancer reports.

    The service decides at once if the set of ejected or drained replicas has changed, if a drained replica is idle, or
    if requests wait for a service without replicas.
    """
    service = row.id
    before = session.get(BalancerReport, (service, balancer))
    told = [] if before is None else before.replicas
    replicas = [one.model_dump() for one in now.replicas]
    values = {"waiting": now.waiting, "replicas": replicas, "reported_at": func.now()}
    session.execute(
        insert(BalancerReport)
        .values(service=service, balancer=balancer, **values)
        .on_conflict_do_update(index_elements=["service", "balancer"], set_=values)
    )
    if _out(told) != _out(replicas) or (now.waiting and not row.target):
        outbox.service(session, service)


def _out(replicas: Iterable[Mapping[str, Any]]) -> set[tuple[int, bool, bool]]:
    """Returns the replicas without new requests: whether each is drained, and whether requests are in progress."""
    return {
        (one["replica"], one["drained"], one["drained"] and one["ongoing"] > 0)
        for one in replicas
        if one["drained"] or one["ejected_s"] is not None
    }
