"""The first page: health, waiting workloads with reasons, the work lost to preemption today, and the cost."""

from datetime import UTC, datetime, time
from functools import partial

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from api.auth import Caller, Viewer
from api.fleet.costs import list_costs
from api.fleet.slots import slots_by_region
from api.health import readyz
from api.problems import HttpProblem
from api.routing import Router
from api.state import ApiState, StateOf
from api.workloads.queue import read_queue
from console.pages import TOP, page
from console.queue_page import MOST_COUNTED
from infra.db.lost_work import preempted_since

router = Router(prefix=TOP, include_in_schema=False)
_WAITING = 8
_LOST = 5


@router.get("")
async def show_overview(request: Request, state: StateOf, caller: Viewer) -> Response:
    """Shows the first page."""
    wrong = []
    try:
        ready = await readyz(state)
        if ready.temporal == "unreachable":
            wrong.append("Temporal does not answer: workloads run on, but nothing starts, moves or ends.")
        if ready.loops != "ok":
            wrong.append(f"Periodic loops: {ready.loops}.")
    except HttpProblem as problem:
        wrong.append(problem.detail)
    return await run_in_threadpool(partial(_overview, request, state, caller, wrong))


def _overview(request: Request, state: ApiState, caller: Caller, wrong: list[str]) -> Response:
    today = datetime.combine(datetime.now(UTC).date(), time(), UTC)
    costs = list_costs(state, caller, today.date(), today.date()).items
    with state.transaction() as session:
        regions = slots_by_region(session)
        lost = preempted_since(session, today, caller.tenant, _LOST)
    wrong += [
        f"Region {one.region}: {one.ready} of {one.machines} machines are ready."
        for one in regions
        if one.ready < one.machines
    ]
    return page(
        request, "overview.html", wrong=wrong, regions=regions, lost=lost,
        waiting=read_queue(state, caller, _WAITING, 0, MOST_COUNTED + 1),
        usd=sum(cost.usd for cost in costs), unpriced_h=sum(cost.unpriced_h for cost in costs),
        hours=_gpu_hours([(cost.resource, cost.hours) for cost in costs]),
    )  # fmt: skip


def _gpu_hours(used: list[tuple[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for resource, hours in used:
        out[resource] = out.get(resource, 0.0) + hours
    return dict(sorted(out.items()))
