"""The instance of the placement of data as a document: what `mizzen tetris solve` takes."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from api.auth import Operator
from api.openapi import refusals
from api.problems import Kind, Problem
from api.state import StateOf
from domain.instance import instance_document
from infra.db.gathering import gather
from infra.db.nights import quota_left_bytes
from infra.db.session import transaction
from infra.errors import CatalogueError

router = APIRouter(prefix="/v1/tetris", tags=["data"])
_LONGEST_DAYS = 366.0
_SCHEMA = {
    "type": "object",
    "required": ["version", "regions", "tables", "jobs", "weights", "home_threshold", "move_quota_bytes"],
    "properties": {
        "version": {"const": 1},
        **{name: {"type": "array", "items": {"type": "object"}} for name in ("regions", "tables", "jobs")},
    },
}
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"description": "The instance", "content": {"application/json": {"schema": _SCHEMA}}}
}


@router.get("/instance", summary="Export the instance", response_class=Response, responses={**_ANSWER, **refusals(409)})
def get_instance(
    state: StateOf,
    _: Operator,
    window_days: Annotated[
        float | None,
        Query(gt=0, le=_LONGEST_DAYS, description="How far back runs count that make up the jobs; null: the setting"),
    ] = None,
) -> Response:
    """Regions, tables and recurring jobs at one moment, as an instance document; all hours are a day's."""
    try:
        with transaction(state.engine, isolation="REPEATABLE READ") as session:
            quota = quota_left_bytes(session, state.settings.tetris.nightly)
            instance = gather(session, state.settings.tetris, window_days=window_days, move_quota_bytes=quota)
    except CatalogueError as error:
        raise Problem(Kind.CONFLICT, str(error)) from None
    return Response(json.dumps(instance_document(instance)), media_type="application/json")
