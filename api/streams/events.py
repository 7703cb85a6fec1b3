"""Streams the event log as server-sent events, in a gapless order. A client can resume after any event."""

import json
import time
from collections.abc import AsyncGenerator
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import Header, Query
from fastapi.responses import StreamingResponse
from pydantic import Field
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api.auth import Balancer, Caller, Role, Viewer
from api.masking import mask
from api.openapi import refusals
from api.problems import HttpProblem, ProblemType
from api.routing import Router
from api.state import ApiState, StateOf
from api.streams.stream import Stream
from api.views import ReasonView, View, reason_view
from api.workloads.workload_queries import find
from domain.phases import TERMINAL_PHASES, Phase
from infra.db import events
from infra.db.events import Cursor
from infra.db.logs import Event
from infra.db.models import Workload

MEDIA_TYPE = "text/event-stream"
HEARTBEAT_S = 15.0
_POLL_S = 5.0
"""A stream polls at this interval, in case a notification is lost."""
_PAGE = 500
_RETRY_S = 1.0
_PATIENCE = 30
"""Number of consecutive failed reads, for example while Postgres restarts, after which a stream is aborted."""
_FOR_BALANCERS = "service.endpoints"
"""The only kind of events that balancers get."""
router = Router(prefix="/v1", tags=["following"])


class EventView(View):
    """One entry of the event log: the `data` of a server-sent event."""

    id: str = Field(examples=["771-42"], description="Position of the event; pass it as `after` to read later events")
    at: datetime
    kind: str = Field(examples=["workload.running"])
    tenant: str | None
    workload: str | None
    attempt: int | None
    region: str | None
    machine: str | None
    reason: ReasonView | None
    detail: dict[str, Any]


SCHEMAS: dict[str, Any] = {
    "Event": EventView.model_json_schema(mode="serialization", ref_template="#/components/schemas/{model}"),
    "ServerSentEvent": {
        "type": "object",
        "description": "`id` is the event's position and `event` its kind",
        "properties": {
            "id": {"type": "string"},
            "event": {"type": "string"},
            "data": {
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": {"$ref": "#/components/schemas/Event"},
            },
        },
    },
}
"""OpenAPI components that the operations in this module refer to."""
SCHEMAS["Event"].pop("$defs")  # These are already components.

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": f"Server-sent events. A comment is sent every {HEARTBEAT_S:g} seconds, so that clients detect a "
        "lost connection.",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ServerSentEvent"}}},
    }
}
Follow = Annotated[bool, Query(description="Keep the stream open for new events; false: end after existing events")]
After = Annotated[
    str | None,
    Query(description="Start after this event, or with `now` at new events; Last-Event-ID takes precedence"),
]
LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", description="Resume after this event")]


@router.get("/events", response_class=StreamingResponse, summary="Stream all events", responses=_STREAM)
async def all_events(
    state: StateOf,
    caller: Balancer,
    follow: Follow = True,
    after: After = None,
    last_event_id: LastEventId = None,
) -> Stream:
    """Streams events of all workloads, machines and tables. A key with a tenant gets only events of that tenant.

    A balancer's key gets only the events `service.endpoints`.
    """
    cursor = await _start(state, last_event_id, after)
    return _opened(state, caller, cursor, None, follow)


@router.get(
    "/workloads/{id}/events",
    response_class=StreamingResponse,
    summary="Stream a workload's events",
    responses={**_STREAM, **refusals(404)},
)
async def workload_events(
    id: str,
    state: StateOf,
    caller: Viewer,
    follow: Follow = True,
    after: After = None,
    last_event_id: LastEventId = None,
) -> Stream:
    """Streams the events of one workload. When the workload has ended, the stream ends after the last event."""
    await run_in_threadpool(_require, state, caller, id)
    cursor = await _start(state, last_event_id, after)
    return _opened(state, caller, cursor, id, follow)


def _opened(state: ApiState, caller: Caller, cursor: Cursor, workload: str | None, follow: bool) -> Stream:
    release = state.hub.admit(caller, waits=follow)
    stream = _stream(state, caller, cursor, workload, follow)
    return Stream(stream, MEDIA_TYPE, release)


def _require(state: ApiState, caller: Caller, workload: str) -> None:
    with state.transaction() as session:
        find(session, caller, workload)


async def _start(state: ApiState, last_event_id: str | None, after: str | None) -> Cursor:
    given, name = (last_event_id, "Last-Event-ID") if last_event_id is not None else (after, "after")
    if given is None:
        return Cursor()
    if given == "now" and name == "after":
        return await run_in_threadpool(_position, state)
    try:
        cursor = Cursor.parse(given)
    except ValueError as error:
        raise HttpProblem(ProblemType.MALFORMED_REQUEST, f"{name}: {error}") from None
    return await run_in_threadpool(_position, state, cursor)


def _position(state: ApiState, given: Cursor | None = None) -> Cursor:
    with state.transaction() as session:
        return events.position(session) if given is None else events.resumed(session, given)


async def _stream(
    state: ApiState, caller: Caller, cursor: Cursor, workload: str | None, follow: bool
) -> AsyncGenerator[bytes, None]:
    tenant = caller.tenant
    with state.hub.register(caller, workload, tenant, waits=follow) as follower:
        yield b"retry: 1000\n\n"
        spoke_s, failures = time.monotonic(), 0
        while True:
            try:
                found, seen = await state.threads.streams.run(partial(_page, state, caller, cursor, workload))
                is_over = not found and await state.threads.streams.run(partial(_is_over, state, cursor, workload))
            except SQLAlchemyError:
                failures += 1
                if not follow or failures > _PATIENCE:
                    raise  # Abort instead of a regular end: the client reconnects with its last event id.
                if not await follower.wait(_RETRY_S):
                    return
                continue
            failures = 0
            for event_cursor, frame in found:
                cursor = event_cursor
                yield frame
                spoke_s = time.monotonic()
            if not found:
                cursor = max(cursor, seen)
            if is_over or (not found and not follow):
                return
            if len(found) == _PAGE or not follow or (found and workload is not None):
                continue  # There are more events, or this may be the workload's last event.
            if not await follower.wait(min(_POLL_S, HEARTBEAT_S)):
                return
            if time.monotonic() - spoke_s >= HEARTBEAT_S:
                yield b": still here\n\n"
                spoke_s = time.monotonic()


def _page(
    state: ApiState, caller: Caller, cursor: Cursor, workload: str | None
) -> tuple[list[tuple[Cursor, bytes]], Cursor]:
    """Returns the next events that the caller may see, each with its frame, and where to continue if there is none."""
    with state.transaction() as session:
        kind = _FOR_BALANCERS if caller.role is Role.BALANCER else None
        # Most events are of other kinds; the next read must not look at them again.
        seen = events.position(session) if kind is not None else cursor
        found = events.read_after(session, cursor, workload=workload, tenant=caller.tenant, kind=kind, limit=_PAGE)
        return [(Cursor(event.txid, event.id), _frame(session, caller, event)) for event in found], seen


def newest_events(session: Session, caller: Caller, workload: str, limit: int) -> list[EventView]:
    """Returns the last `limit` events of a workload, newest first, as the caller may see them."""
    order = (Event.txid.desc(), Event.id.desc())
    found = session.scalars(select(Event).where(Event.workload == workload).order_by(*order).limit(limit))
    return [_view(session, caller, event) for event in found.all()]


def _view(session: Session, caller: Caller, event: Event) -> EventView:
    view = EventView(
        id=str(Cursor(event.txid, event.id)), at=event.at, kind=event.kind, tenant=event.tenant,
        workload=event.workload, attempt=event.attempt, region=event.region, machine=event.machine,
        reason=reason_view(event.reason), detail=event.detail,
    )  # fmt: skip
    return mask(session, caller, view)


def _frame(session: Session, caller: Caller, event: Event) -> bytes:
    view = _view(session, caller, event)
    kind = json.dumps(event.kind)[1:-1]
    return f"id: {view.id}\nevent: {kind}\ndata: {view.model_dump_json()}\n\n".encode()


def _is_over(state: ApiState, cursor: Cursor, workload: str | None) -> bool:
    """Returns whether the workload has ended and `cursor` has reached its last event.

    While an older transaction is in progress, the last event can be committed but not readable yet.
    """
    if workload is None:
        return False
    with state.transaction() as session:
        row = session.get(Workload, workload)
        if row is None:
            return True
        if Phase(row.phase) not in TERMINAL_PHASES:
            return False
        order = (Event.txid.desc(), Event.id.desc())
        last = session.execute(
            select(Event.txid, Event.id).where(Event.workload == workload).order_by(*order).limit(1)
        ).first()
        return last is None or Cursor(last.txid, last.id) <= cursor
