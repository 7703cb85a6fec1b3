"""Endpoints for nights: starting a night, its plan, the progress of its moves, and pausing the moves.

Only operators can use them, because nights contain job names of all tenants.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import Query, Response
from pydantic import Field, StringConstraints
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.auth import Operator
from api.bodies import Body, JsonOnly, Line
from api.openapi import refusals
from api.problems import Kind, Problem, not_found
from api.routing import Router
from api.state import StateOf
from api.views import View, write_audit
from domain import ids
from infra.db import events, outbox
from infra.db.nights import Night, NightMove, NightPause, begin_night, moves_by_state, open_night

router = Router(prefix="/v1/tetris", tags=["data"], dependencies=[JsonOnly])
_MOVE_STATES = Literal["waiting", "copying", "done", "left"]


class NightBody(Body):
    """Options of a night that starts now."""

    dry_run: bool = Field(False, description="Only plan and report; move nothing")


class PauseBody(Body):
    """A note on why moves are paused."""

    note: Annotated[Line, StringConstraints(max_length=500)] = ""


class NightView(View):
    """The state and progress of a night."""

    id: str
    dry_run: bool
    state: str = Field(description="`planning`, `moving`, `ended`, or `failed`: see `problem`")
    started_at: datetime
    planned_at: datetime | None
    deadline_at: datetime = Field(description="No move starts after this time")
    ended_at: datetime | None
    moves: dict[str, int] = Field(description="Number of moves by state: `waiting`, `copying`, `done`, `left`")
    moved_bytes: int = Field(description="Planned bytes of the completed moves")
    artifact_url: str | None = Field(description="Folder with the night's instance, plan, replicas and moves")
    problem: str | None


class NightReport(NightView):
    """A night with its report."""

    report: dict[str, Any] | None = Field(
        description="`summary` contains the terms of the objective and each region's storage, supply and demand,"
        " before and after; `unplaced` lists the jobs that no region can run, with the reason"
    )


class PauseView(View):
    """The pause of nightly moves."""

    since: datetime
    by: str
    note: str


class NightList(View):
    """Nights, the newest first."""

    items: list[NightView]
    paused: PauseView | None = Field(description="Null: moves are not paused")


class MoveView(View):
    """A move of a night."""

    number: int = Field(description="Moves start in this order")
    kind: str = Field(
        description="`home`, `replica`, `drop` (of a replica) or `refresh` (copies what a stale replica lacks)"
    )
    table: str
    source_region: str
    target_region: str
    size_bytes: int
    state: str = Field(description="`waiting`, `copying`, `done`, or `left` (not made): see `left_because`")
    left_because: str | None
    begun_at: datetime | None
    ended_at: datetime | None
    why: dict[str, Any] = Field(description="For a home, the changed terms and the affected jobs; else the reason")


class MoveList(View):
    """Moves in the order in which they start."""

    items: list[MoveView]
    next_cursor: str | None = Field(description="The `cursor` of the next page; null on the last one")


@router.get("/nights", summary="List nights")
def list_nights(state: StateOf, _: Operator, limit: Annotated[int, Query(ge=1, le=500)] = 30) -> NightList:
    """Lists the newest nights, and whether moves are paused."""
    with state.transaction() as session:
        rows = session.scalars(select(Night).order_by(Night.started_at.desc(), Night.id).limit(limit)).all()
        pause = session.get(NightPause, True)
        return NightList(
            items=_views(session, rows),
            paused=None if pause is None else PauseView(since=pause.since, by=pause.by, note=pause.note),
        )


@router.post("/nights", status_code=202, summary="Start a night", responses=refusals(409))
def create_night(body: NightBody, response: Response, state: StateOf, caller: Operator) -> NightView:
    """Starts a night now: builds the instance, solves it and, unless it is a dry run, moves tables."""
    with state.transaction() as session:
        name = f"{ids.NIGHT_WORKFLOW_ID}-{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        deadline_s = state.settings.tetris.nightly.deadline_s
        row = begin_night(session, name, deadline_s, dry_run=body.dry_run)
        if row is None:
            found = open_night(session)
            said = "another one has just started" if found is None else f"{found.id} is {found.state}"
            raise Problem(Kind.CONFLICT, f"only one night can run at a time: {said}")
        outbox.night(session, row.id)
        write_audit(session, caller, "night.create", row.id, dry_run=body.dry_run)
        response.headers["Location"] = f"/v1/tetris/nights/{row.id}"
        return _view(session, row)


@router.get("/nights/{night}", summary="Get a night", responses=refusals(404))
def get_night(night: str, state: StateOf, _: Operator) -> NightReport:
    """Returns a night with its report."""
    with state.transaction() as session:
        row = _find(session, night)
        return NightReport(**_view(session, row).model_dump(), report=row.report)


@router.get("/nights/{night}/moves", summary="List a night's moves", responses=refusals(404))
def list_moves(
    night: str,
    state: StateOf,
    _: Operator,
    state_: Annotated[_MOVE_STATES | None, Query(alias="state", description="Only moves in this state")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[int, Query(ge=0, description="Return moves after this number")] = 0,
) -> MoveList:
    """Lists the moves of a night in the order in which they start."""
    statement = select(NightMove).where(NightMove.night == night, NightMove.number > cursor)
    if state_ is not None:
        statement = statement.where(NightMove.state == state_)
    with state.transaction() as session:
        _find(session, night)
        rows = session.scalars(statement.order_by(NightMove.number).limit(limit + 1)).all()
        return MoveList(
            items=[
                MoveView(
                    number=row.number, kind=row.kind, table=row.data_table, source_region=row.source_region,
                    target_region=row.target_region, size_bytes=row.size_bytes, state=row.state,
                    left_because=row.left_because, begun_at=row.begun_at, ended_at=row.ended_at, why=row.why,
                )
                for row in rows[:limit]
            ],
            next_cursor=str(rows[limit - 1].number) if len(rows) > limit else None,
        )  # fmt: skip


@router.put("/pause", summary="Pause nightly moves")
def pause(body: PauseBody, state: StateOf, caller: Operator) -> PauseView:
    """Pauses nightly moves when the current part of each copy is complete. Copied data is kept."""
    with state.transaction() as session:
        row = session.get(NightPause, True)
        if row is None:
            row = NightPause(by=caller.id, note=body.note)
            session.add(row)
            session.flush()
            _tell(session, "night.paused", note=body.note)
            write_audit(session, caller, "night.pause", "tetris", note=body.note)
        return PauseView(since=row.since, by=row.by, note=row.note)


@router.delete("/pause", status_code=204, summary="Resume nightly moves")
def resume(state: StateOf, caller: Operator) -> Response:
    """Resumes nightly moves where they stopped, unless the night's deadline has passed."""
    with state.transaction() as session:
        row = session.get(NightPause, True)
        if row is not None:
            session.delete(row)
            _tell(session, "night.resumed")
            write_audit(session, caller, "night.resume", "tetris")
    return Response(status_code=204)


def _tell(session: Session, kind: str, **detail: object) -> None:
    night = open_night(session)
    events.record(session, kind, detail={**detail, "night": None if night is None else night.id})
    if night is not None:
        outbox.night(session, night.id)


def _find(session: Session, night: str) -> Night:
    row = session.get(Night, night)
    if row is None:
        raise not_found("night", night)
    return row


def _view(session: Session, row: Night) -> NightView:
    return _views(session, [row])[0]


def _views(session: Session, rows: Sequence[Night]) -> list[NightView]:
    moves = moves_by_state(session, [row.id for row in rows])
    return [
        NightView(
            id=row.id, dry_run=row.dry_run, state=row.state, started_at=row.started_at, planned_at=row.planned_at,
            deadline_at=row.deadline_at, ended_at=row.ended_at, moves={s: n for s, (n, _) in moves[row.id].items()},
            moved_bytes=moves[row.id].get("done", (0, 0))[1], artifact_url=row.artifact_url, problem=row.problem,
        )
        for row in rows
    ]  # fmt: skip
