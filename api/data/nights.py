"""Nights of the placement of tables: starting one, what it decided, how far its moves are, and pausing them.

They name the jobs of all tenants, so only operators see them.
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
    """A night that begins now."""

    dry_run: bool = Field(False, description="Plan and report; nothing moves")


class PauseBody(Body):
    """Why moves are paused."""

    note: Annotated[Line, StringConstraints(max_length=500)] = ""


class NightView(View):
    """A night."""

    id: str
    dry_run: bool
    state: str = Field(description="planning, moving, ended, or failed: see `problem`")
    started_at: datetime
    planned_at: datetime | None
    deadline_at: datetime = Field(description="No move begins later")
    ended_at: datetime | None
    moves: dict[str, int] = Field(description="Number of moves by state: waiting, copying, done, left")
    moved_bytes: int = Field(description="Planned bytes of the moves that are done")
    artifact_url: str | None = Field(description="Folder of its instance, plan, replicas and moves")
    problem: str | None


class NightReport(NightView):
    """A night with what it decided."""

    report: dict[str, Any] | None = Field(
        description="`summary` has the objective's terms and each region's storage, supply and demand, before and"
        " after; `unplaced` the jobs that no region can run, with the reason"
    )


class PauseView(View):
    """Moves are paused."""

    since: datetime
    by: str
    note: str


class NightList(View):
    """Nights, the newest first."""

    items: list[NightView]
    paused: PauseView | None = Field(description="Null: moves are not paused")


class MoveView(View):
    """A move of a night."""

    number: int = Field(description="Moves begin in this order")
    kind: str = Field(description="home, replica, refresh (what a stale replica lacks), or drop (a replica)")
    table: str
    source_region: str
    target_region: str
    size_bytes: int
    state: str
    left_because: str | None
    begun_at: datetime | None
    ended_at: datetime | None
    why: dict[str, Any] = Field(description="Of a home, what it changes in each term and which jobs; of others, why")


class MoveList(View):
    """Moves in their order."""

    items: list[MoveView]
    next_cursor: str | None = Field(description="The `cursor` of the next page; null on the last one")


@router.get("/nights", summary="List nights")
def list_nights(state: StateOf, _: Operator, limit: Annotated[int, Query(ge=1, le=500)] = 30) -> NightList:
    """The newest nights, and whether moves are paused."""
    with state.transaction() as session:
        rows = session.scalars(select(Night).order_by(Night.started_at.desc(), Night.id).limit(limit)).all()
        pause = session.get(NightPause, True)
        return NightList(
            items=_views(session, rows),
            paused=None if pause is None else PauseView(since=pause.since, by=pause.by, note=pause.note),
        )


@router.post("/nights", status_code=202, summary="Begin a night", responses=refusals(409))
def create_night(body: NightBody, response: Response, state: StateOf, caller: Operator) -> NightView:
    """Begins a night now: gather, solve, and move unless it is a dry run."""
    with state.transaction() as session:
        name = f"{ids.NIGHT_WORKFLOW_ID}-{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        deadline_s = state.settings.tetris.nightly.deadline_s
        row = begin_night(session, name, deadline_s, dry_run=body.dry_run)
        if row is None:
            found = open_night(session)
            said = "one has just begun" if found is None else f"{found.id} is {found.state}"
            raise Problem(Kind.CONFLICT, f"one night at a time: {said}")
        outbox.night(session, row.id)
        write_audit(session, caller, "night.create", row.id, dry_run=body.dry_run)
        response.headers["Location"] = f"/v1/tetris/nights/{row.id}"
        return _view(session, row)


@router.get("/nights/{night}", summary="A night", responses=refusals(404))
def get_night(night: str, state: StateOf, _: Operator) -> NightReport:
    """A night with what it decided."""
    with state.transaction() as session:
        row = _find(session, night)
        return NightReport(**_view(session, row).model_dump(), report=row.report)


@router.get("/nights/{night}/moves", summary="A night's moves", responses=refusals(404))
def list_moves(
    night: str,
    state: StateOf,
    _: Operator,
    state_: Annotated[_MOVE_STATES | None, Query(alias="state", description="Only those in this state")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[int, Query(ge=0, description="After the move of this number")] = 0,
) -> MoveList:
    """Moves in the order in which they begin, a page at a time."""
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
    """Stops nightly moves at the end of a part until they are resumed; what is copied stays."""
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
    """Moves go on where they stopped, those of which the night's deadline is not over."""
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
