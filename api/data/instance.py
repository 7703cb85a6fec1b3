"""Endpoints that export the data placement instance, the input of `mizzen tetris solve`, and that apply its result."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import Query, Response
from pydantic import Field, StringConstraints
from sqlalchemy.orm import Session

from api.auth import Operator
from api.bodies import Body, JsonOnly, Name
from api.openapi import refusals
from api.problems import FieldError, HttpProblem, ProblemType, existing
from api.routing import Router
from api.state import ApiState, StateOf
from api.views import View, write_audit
from domain.ids import DATACENTER_PATTERN, PARTITION_READ_PATTERN
from domain.instance import instance_document, reads_document
from infra.db.datacenters import AssignmentError, assign_partitions, gather_datacenters
from infra.db.models import Region
from infra.db.placement_instance import gather, transaction_time
from infra.db.placement_runs import quota_left_bytes
from infra.db.reads import partial_reads
from infra.db.session import transaction
from infra.errors import CatalogueError

router = Router(prefix="/v1/tetris", tags=["data"])
_LONGEST_DAYS = 366.0
_NAMED = 8


def _answer(what: str, *lists: str, **more: Any) -> dict[int | str, dict[str, Any]]:
    schema = {
        "type": "object",
        "required": ["version", *lists, *more],
        "properties": {
            "version": {"const": 1},
            **{name: {"type": "array", "items": {"type": "object"}} for name in lists},
            **more,
        },
    }
    return {200: {"description": what, "content": {"application/json": {"schema": schema}}}}


_INSTANCE = _answer(
    "The instance", "regions", "tables", "jobs", weights={"type": "object"}, home_threshold={"type": "number"},
    move_quota_bytes={"type": ["number", "null"]},
)  # fmt: skip
_READS = _answer("The reads", "reads", partitions={"type": "object"})
_Window: TypeAlias = Annotated[
    float | None,
    Query(gt=0, le=_LONGEST_DAYS, description="Only runs of the last so many days count; null: the configured window"),
]
_Partition = Annotated[str, StringConstraints(pattern=PARTITION_READ_PATTERN, max_length=328)]
_Datacenter = Annotated[str, StringConstraints(pattern=DATACENTER_PATTERN, max_length=127)]


class AssignmentBody(Body):
    """A plan for a region's instance, including the partitions that do not move."""

    most_members = 100_000
    version: Literal[1]
    homes: dict[_Partition, _Datacenter] = Field(
        description="`table/partition` to `region/datacenter`", examples=[{"ads.clicks/ds=2026-11-21": "north/dc1"}]
    )


class AssignedView(View):
    """The number of partitions that were assigned."""

    assigned: int
    unchanged: int = Field(description="Partitions that were already in their datacenter")


@router.get(
    "/instance", summary="Export the instance", response_class=Response, responses={**_INSTANCE, **refusals(404, 409)}
)
def get_instance(
    state: StateOf,
    _: Operator,
    window_days: _Window = None,
    region: Annotated[
        Name | None, Query(description="Export the datacenters and partitions of this region instead")
    ] = None,
) -> Response:
    """Returns a snapshot of regions, tables and recurring jobs as an instance document. All hours are per day.

    With `region`, the document contains the region's datacenters as regions, its partitions as tables, and the jobs
    that run in the region.
    """

    def document(session: Session) -> dict[str, Any]:
        if region is None:
            quota = quota_left_bytes(session, tetris.nightly)
            return instance_document(gather(session, tetris, window_days=window_days, move_quota_bytes=quota))
        existing(session, Region, region, "region")
        return instance_document(gather_datacenters(session, region, tetris, window_days=window_days))

    tetris = state.settings.tetris
    return _gathered(state, document)


@router.get("/reads", summary="Export the partitions that jobs read", response_class=Response, responses=_READS)
def get_reads(state: StateOf, _: Operator, window_days: _Window = None) -> Response:
    """Returns, for each job of the instance, the partitions that it reads of tables that it reads only partly."""
    days = state.settings.tetris.window_days if window_days is None else window_days
    return _gathered(state, lambda s: reads_document(partial_reads(s, transaction_time(s), days)))


@router.put("/datacenters", summary="Assign partitions to datacenters", dependencies=[JsonOnly])
def assign(body: AssignmentBody, state: StateOf, caller: Operator) -> AssignedView:
    """Assigns partitions to datacenters, all or none. Idempotent."""
    try:
        with state.transaction() as session:
            assigned = assign_partitions(session, body.homes)
            if assigned:
                regions = sorted({where.partition("/")[0] for where in body.homes.values()})
                write_audit(session, caller, "datacenters.assign", ", ".join(regions[:_NAMED]), partitions=assigned)
    except AssignmentError as error:
        wrong = [FieldError(f"homes.{name}", told, body.homes[name]) for name, told in error.wrong.items()]
        detail = "; ".join(f"{e.path}: {e.message}" for e in wrong[:_NAMED])
        raise HttpProblem(ProblemType.INVALID_REQUEST, detail, errors=wrong) from None
    return AssignedView(assigned=assigned, unchanged=len(body.homes) - assigned)


def _gathered(state: ApiState, document: Callable[[Session], dict[str, Any]]) -> Response:
    """Builds a document from a consistent snapshot of the database and returns it as JSON."""
    try:
        with transaction(state.engine, isolation="REPEATABLE READ") as session:
            body = document(session)
    except CatalogueError as error:
        raise HttpProblem(ProblemType.CONFLICT, str(error)) from None
    return Response(json.dumps(body), media_type="application/json")
