"""Endpoints for placement runs: starting a placement run, its plan, the progress of its moves, and pausing the moves.

Only operators can use them, because placement runs contain job names of all tenants.
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
from api.paging import Page
from api.problems import HttpProblem, ProblemType, existing
from api.routing import Router
from api.state import StateOf
from api.views import View, write_audit
from domain import ids
from infra.db import events, outbox
from infra.db.placement_runs import (
    PlacementMove,
    PlacementPause,
    PlacementRun,
    begin_placement_run,
    moves_by_state,
    open_placement_run,
)

router = Router(prefix="/v1/tetris", tags=["data"], dependencies=[JsonOnly])
_MOVE_STATES = Literal["waiting", "copying", "done", "left"]


class PlacementRunBody(Body):
    """Options of a placement run that starts now."""

    dry_run: bool = Field(False, description="Only plan and report; move nothing")


class PauseBody(Body):
    """A note on why moves are paused."""

    note: Annotated[Line, StringConstraints(max_length=500)] = ""


class PlacementRunView(View):
    """The state and progress of a placement run."""

    id: str
    dry_run: bool
    state: str = Field(description="`planning`, `moving`, `ended`, or `failed`: see `problem`")
    started_at: datetime
    planned_at: datetime | None
    deadline_at: datetime = Field(description="No move starts after this time")
    ended_at: datetime | None
    moves: dict[str, int] = Field(description="Number of moves by state: `waiting`, `copying`, `done`, `left`")
    moved_bytes: int = Field(description="Planned bytes of the completed moves")
    artifact_url: str | None = Field(description="Folder with the placement run's instance, plan, replicas and moves")
    problem: str | None


class PlacementRunReport(PlacementRunView):
    """A placement run with its report."""

    report: dict[str, Any] | None = Field(
        description="`summary` contains the terms of the objective and each region's storage, supply and demand,"
        " before and after; `unplaced` lists the jobs that no region can run, with the reason"
    )


class PauseView(View):
    """The pause of nightly moves."""

    since: datetime
    by: str
    note: str


class PlacementRunList(View):
    """Placement runs, the newest first."""

    items: list[PlacementRunView]
    paused: PauseView | None = Field(description="Null: moves are not paused")


class MoveView(View):
    """A move of a placement run."""

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


class MoveList(Page[MoveView]):
    """Moves in the order in which they start."""


@router.get("/placement-runs", summary="List placement runs")
def list_placement_runs(
    state: StateOf, _: Operator, limit: Annotated[int, Query(ge=1, le=500)] = 30
) -> PlacementRunList:
    """Lists the newest placement runs, and whether moves are paused."""
    with state.transaction() as session:
        rows = session.scalars(
            select(PlacementRun).order_by(PlacementRun.started_at.desc(), PlacementRun.id).limit(limit)
        ).all()
        pause = session.get(PlacementPause, True)
        return PlacementRunList(
            items=_views(session, rows),
            paused=None if pause is None else PauseView(since=pause.since, by=pause.by, note=pause.note),
        )


@router.post("/placement-runs", status_code=202, summary="Start a placement run", responses=refusals(409))
def create_placement_run(
    body: PlacementRunBody, response: Response, state: StateOf, caller: Operator
) -> PlacementRunView:
    """Starts a placement run now: builds the instance, solves it and, unless it is a dry run, moves tables."""
    with state.transaction() as session:
        name = f"{ids.PLACEMENT_RUN_WORKFLOW_ID}-{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        deadline_s = state.settings.tetris.nightly.deadline_s
        row = begin_placement_run(session, name, deadline_s, dry_run=body.dry_run)
        if row is None:
            found = open_placement_run(session)
            said = "another placement run has just started" if found is None else f"{found.id} is {found.state}"
            raise HttpProblem(ProblemType.CONFLICT, f"only one placement run can run at a time: {said}")
        outbox.placement_run(session, row.id)
        write_audit(session, caller, "placement_run.create", row.id, dry_run=body.dry_run)
        response.headers["Location"] = f"/v1/tetris/placement-runs/{row.id}"
        return _view(session, row)


@router.get("/placement-runs/{placement_run}", summary="Get a placement run", responses=refusals(404))
def get_placement_run(placement_run: str, state: StateOf, _: Operator) -> PlacementRunReport:
    """Returns a placement run with its report."""
    with state.transaction() as session:
        row = existing(session, PlacementRun, placement_run, "placement run")
        return PlacementRunReport(**_view(session, row).model_dump(), report=row.report)


@router.get("/placement-runs/{placement_run}/moves", summary="List a placement run's moves", responses=refusals(404))
def list_moves(
    placement_run: str,
    state: StateOf,
    _: Operator,
    state_: Annotated[_MOVE_STATES | None, Query(alias="state", description="Only moves in this state")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    cursor: Annotated[int, Query(ge=0, description="Return moves after this number")] = 0,
) -> MoveList:
    """Lists the moves of a placement run in the order in which they start."""
    statement = select(PlacementMove).where(PlacementMove.placement_run == placement_run, PlacementMove.number > cursor)
    if state_ is not None:
        statement = statement.where(PlacementMove.state == state_)
    with state.transaction() as session:
        existing(session, PlacementRun, placement_run, "placement run")
        rows = session.scalars(statement.order_by(PlacementMove.number).limit(limit + 1)).all()
        return MoveList(
            items=[MoveView.from_row(row, table=row.data_table) for row in rows[:limit]],
            next_cursor=str(rows[limit - 1].number) if len(rows) > limit else None,
        )


@router.put("/pause", summary="Pause nightly moves")
def pause(body: PauseBody, state: StateOf, caller: Operator) -> PauseView:
    """Pauses nightly moves when the current part of each copy is complete. Copied data is kept."""
    with state.transaction() as session:
        row = session.get(PlacementPause, True)
        if row is None:
            row = PlacementPause(by=caller.id, note=body.note)
            session.add(row)
            session.flush()
            _notify(session, "placement_run.paused", note=body.note)
            write_audit(session, caller, "placement_run.pause", "tetris", note=body.note)
        return PauseView(since=row.since, by=row.by, note=row.note)


@router.delete("/pause", status_code=204, summary="Resume nightly moves")
def resume(state: StateOf, caller: Operator) -> None:
    """Resumes nightly moves where they stopped, unless the placement run's deadline has passed."""
    with state.transaction() as session:
        row = session.get(PlacementPause, True)
        if row is not None:
            session.delete(row)
            _notify(session, "placement_run.resumed")
            write_audit(session, caller, "placement_run.resume", "tetris")


def _notify(session: Session, kind: str, **detail: object) -> None:
    placement_run = open_placement_run(session)
    events.record(
        session, kind, detail={**detail, "placement_run": None if placement_run is None else placement_run.id}
    )
    if placement_run is not None:
        outbox.placement_run(session, placement_run.id)


def _view(session: Session, row: PlacementRun) -> PlacementRunView:
    return _views(session, [row])[0]


def _views(session: Session, rows: Sequence[PlacementRun]) -> list[PlacementRunView]:
    moves = moves_by_state(session, [row.id for row in rows])
    return [
        PlacementRunView(
            id=row.id, dry_run=row.dry_run, state=row.state, started_at=row.started_at, planned_at=row.planned_at,
            deadline_at=row.deadline_at, ended_at=row.ended_at, moves={s: n for s, (n, _) in moves[row.id].items()},
            moved_bytes=moves[row.id].get("done", (0, 0))[1], artifact_url=row.artifact_url, problem=row.problem,
        )
        for row in rows
    ]  # fmt: skip
