"""Endpoints that submit, list and show workloads."""

import asyncio
import logging
import uuid
from datetime import timedelta
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Query, Request, Response
from sqlalchemy import select
from sqlalchemy.orm import defer, undefer
from starlette.concurrency import run_in_threadpool
from temporalio.client import WorkflowFailureError
from temporalio.service import RPCError

from api.auth import Submitter, Viewer
from api.documents.schema import DOCUMENT, EXAMPLE
from api.idempotency import IdempotencyKey, check_key
from api.masking import mask
from api.openapi import refusals
from api.paging import MAX_ITEMS, Limit, NumberCursor
from api.problems import HttpProblem, ProblemType
from api.routing import Router
from api.state import ApiState, StateOf
from api.views import reason_view
from api.workloads import workload_queries
from api.workloads.selection import Filters, newest
from api.workloads.submission import admit, parse, submit
from api.workloads.views import (
    AllocationList,
    AttemptList,
    CurveView,
    DryRunView,
    SubmittedView,
    WorkloadDetail,
    WorkloadPage,
)
from domain.ids import CONTROL_QUEUE
from domain.phases import Phase
from domain.protocol.scheduling import DryRunRequest, DryRunResult
from domain.spec import WorkloadSpec
from infra.db.models import Workload
from infra.errors import ConfigurationError

MAX_PAGE = 500
DRY_RUN_TIMEOUT = timedelta(seconds=30)
_CONNECT_S = 5.0
_log = logging.getLogger(__name__)
_ID = r"^wl-[0-9a-z]{16}(-[0-9]{1,9})?$"
AllocationCursor = Annotated[
    str | None, Query(pattern=r"^[0-9]{1,9}:[a-z0-9/-]{0,200}$", description="`next_cursor` of the previous page")
]
router = Router(prefix="/v1/workloads", tags=["workloads"])

_DOCUMENT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            media: {"schema": {"$ref": "#/components/schemas/WorkloadDocument"}, "example": EXAMPLE}
            for media in ("application/yaml", "application/json")
        },
    }
}
SCHEMAS = {"WorkloadDocument": DOCUMENT}
"""OpenAPI components that the operations in this module refer to."""


@router.post(
    "",
    status_code=202,
    response_model=SubmittedView,
    summary="Submit a workload",
    openapi_extra=_DOCUMENT_BODY,
    responses={
        200: {"description": "With `dry_run`: the expected result", "model": DryRunView},
        202: {"headers": {"Location": {"description": "The workload's URL", "schema": {"type": "string"}}}},
    },
)
async def submit_workload(
    request: Request,
    response: Response,
    state: StateOf,
    caller: Submitter,
    dry_run: Annotated[bool, Query(description="Change nothing; return the expected result")] = False,
    key: IdempotencyKey = None,
) -> Any:
    """Validates a workload document and adds the workload to the queue. An error response lists all errors.

    With `dry_run` nothing is changed. The response (200) says whether the workload would be placed now, on which
    machines and with which victims, or why not.
    """
    key = check_key(key)
    body = await request.body()
    if dry_run:
        spec, unheld = await state.documents.run(caller, body, partial(_admit, state, caller, request, body))
        response.status_code = 200
        planned = await _dry_run(state, caller, spec, unheld)
        planned = await run_in_threadpool(_masked, state, caller, planned)
        return Response(planned.model_dump_json(), media_type="application/json")
    content_type = request.headers.get("content-type", "")
    made = await state.documents.run(caller, body, partial(submit, state, caller, content_type, body, key))
    response.headers["Location"] = f"/v1/workloads/{made.id}"
    return made


def _admit(state: ApiState, caller: Submitter, request: Request, body: bytes) -> tuple[WorkloadSpec, str | None]:
    value = parse(request, body)
    with state.transaction() as session:
        return admit(session, caller, value, state.settings)


def _masked(state: ApiState, caller: Submitter, planned: DryRunView) -> DryRunView:
    """Returns the dry run as the caller may see it: victims of other tenants are counted, not named."""
    if caller.tenant is None:
        return planned
    with state.transaction() as session:
        own = select(Workload.id).where(Workload.id.in_(planned.victims), Workload.tenant == caller.tenant)
        seen = set(session.scalars(own)) if planned.victims else set()
        victims = [victim for victim in planned.victims if victim in seen]
        counted = {"victims": victims, "other_victims": len(planned.victims) - len(victims)}
        return mask(session, caller, planned.model_copy(update=counted))


async def _dry_run(state: ApiState, caller: Submitter, spec: WorkloadSpec, unheld: str | None) -> DryRunView:
    try:
        async with asyncio.timeout(_CONNECT_S):
            client = await state.temporal()
        async with asyncio.timeout(DRY_RUN_TIMEOUT.total_seconds() + _CONNECT_S):
            result = await client.execute_workflow(
                "DryRunWorkflow",
                DryRunRequest(spec.model_dump(mode="json"), caller.submitter),
                id=f"dry-run/{uuid.uuid4()}",
                task_queue=CONTROL_QUEUE,
                execution_timeout=DRY_RUN_TIMEOUT,
                result_type=DryRunResult,
            )
    except (ConfigurationError, RuntimeError, TimeoutError, RPCError, WorkflowFailureError) as error:
        _log.warning("dry run: %r, because of %r", error, error.__cause__)
        raise HttpProblem(
            ProblemType.SCHEDULER_UNAVAILABLE, "no scheduler responds; submitted workloads wait until one does"
        ) from None
    reasons = [view for view in (reason_view(body) for body in result.reasons) if view is not None]
    return DryRunView(
        admitted=result.admitted, rank=result.rank, over_quota=result.over_quota, region=result.region,
        machines=result.machines, victims=result.victims, other_victims=0, reasons=reasons, never=unheld,
    )  # fmt: skip


@router.get("", summary="List workloads")
def list_workloads(
    state: StateOf,
    caller: Viewer,
    *,
    tenant: Annotated[str | None, Query(description="Only workloads of this tenant")] = None,
    phase: Annotated[
        list[Phase | Literal["held", "blocked", "live"]] | None,
        Query(
            max_length=20,
            description="Only these phases; `held`: queued and held; `blocked`: waits for others; `live`: not ended",
        ),
    ] = None,
    label: Annotated[list[str] | None, Query(max_length=20, description="Only with these labels, key=value")] = None,
    name: Annotated[str | None, Query(description="Only with this name")] = None,
    array: Annotated[str | None, Query(description="Elements of this array that have been placed")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    cursor: Annotated[str | None, Query(pattern=_ID, description="`next_cursor` of the previous page")] = None,
) -> WorkloadPage:
    """Lists workloads that match all filters, newest first. New submissions do not shift the following pages.

    An array is one workload. Its elements are listed only with `array`.
    """
    wanted = newest(caller, Filters(tenant, phase, label, name, array), before=cursor, most=limit + 1)
    with state.transaction() as session:
        found_rows = [
            row
            for one in wanted
            for row in session.scalars(one.options(defer(Workload.spec), undefer(Workload.listed)))
        ]
        rows = sorted(found_rows, key=lambda row: row.id, reverse=True)[: limit + 1]
        more = rows[limit - 1].id if len(rows) > limit else None
        found = WorkloadPage(items=workload_queries.views(session, state.queue, rows[:limit]), next_cursor=more)
        return mask(session, caller, found)


@router.get("/{id}", summary="Get a workload", responses=refusals(404))
def get_workload(id: str, state: StateOf, caller: Viewer) -> WorkloadDetail:
    """Returns one workload with its specification and the placement of its tasks."""
    with state.transaction() as session:
        return mask(
            session, caller, workload_queries.detail(session, state.queue, workload_queries.find(session, caller, id))
        )


@router.get("/{id}/attempts", summary="List a workload's attempts", responses=refusals(404))
def list_attempts(
    id: str, state: StateOf, caller: Viewer, limit: Limit = MAX_ITEMS, cursor: NumberCursor = None
) -> AttemptList:
    """Lists the attempts of a workload, oldest first, each with the reason why it ended."""
    with state.transaction() as session:
        found = workload_queries.attempts(session, workload_queries.find(session, caller, id), limit, int(cursor or 0))
        return mask(session, caller, found)


@router.get("/{id}/progress", summary="Get a workload's steps and metrics over time", responses=refusals(404))
def get_progress(id: str, state: StateOf, caller: Viewer) -> CurveView:
    """Returns the steps of the newest 20 attempts over time, with the metrics that their tasks have reported."""
    with state.transaction() as session:
        return workload_queries.curve(session, workload_queries.find(session, caller, id))


@router.get("/{id}/allocations", summary="List a workload's allocations", responses=refusals(404))
def list_allocations(
    id: str, state: StateOf, caller: Viewer, limit: Limit = MAX_ITEMS, cursor: AllocationCursor = None
) -> AllocationList:
    """Lists current, past and promised allocations of a workload, oldest first."""
    with state.transaction() as session:
        number, _, machine = (cursor or "0:").partition(":")
        return workload_queries.allocations(
            session, workload_queries.find(session, caller, id), limit, (int(number), machine)
        )
