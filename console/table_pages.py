"""Tables with their replicas, and placement runs: the plan and what happened."""

from typing import Annotated

from fastapi import Query, Request, Response

from api.auth import Operator, Role, Viewer
from api.data.placement_runs import get_placement_run, list_moves, list_placement_runs
from api.data.tables import list_tables
from api.routing import Router
from api.state import StateOf
from console.pages import TOP, page

router = Router(prefix=TOP, include_in_schema=False)
_ROWS = 50


@router.get("/tables")
def show_tables(
    request: Request, state: StateOf, caller: Viewer, cursor: Annotated[str, Query(max_length=300)] = ""
) -> Response:
    """Shows tables with their replicas, and to operators the newest placement runs."""
    found = list_tables(state, caller, limit=_ROWS, cursor=cursor or None)
    shown = list_placement_runs(state, caller, 10) if caller.may(Role.OPERATOR) and not cursor else None
    return page(request, "tables.html", found=found, cursor=cursor, runs=shown)


@router.get("/placement-runs/{id}")
def show_placement_run(
    request: Request, id: str, state: StateOf, caller: Operator, after: Annotated[int, Query(ge=0, le=10**9)] = 0
) -> Response:
    """Shows a placement run: its plan by region, and its moves behind number `after`, each with what happened."""
    found = get_placement_run(id, state, caller)
    moves = list_moves(id, state, caller, None, _ROWS, after)
    return page(request, "placement_run.html", run=found, moves=moves, after=after)
