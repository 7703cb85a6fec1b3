"""The first page: health, waiting workloads with reasons, the work lost to preemption today, and the cost."""

from collections.abc import Sequence
from datetime import UTC, datetime, time
from functools import partial

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from api.auth import Caller, Role, Viewer
from api.fleet.slots import slots_by_region
from api.health import readyz
from api.people.tenants import list_tenants
from api.problems import HttpProblem
from api.routing import Router
from api.state import ApiState, StateOf
from api.workloads.queue import read_queue
from api.workloads.routes import list_workloads
from console.pages import TOP, page
from domain.units import format_duration
from infra.db import outbox
from infra.db.buckets import failing_buckets
from infra.db.lost_work import preempted_since
from infra.db.silent_regions import silence_reason, silent_regions

router = Router(prefix=TOP, include_in_schema=False)
_WAITING = 8
_LOST = 5
_MAIL_S = 120.0
"""Age of the oldest undelivered message that the page reports."""


@router.get("")
async def show_overview(request: Request, state: StateOf, caller: Viewer) -> Response:
    """Shows the first page."""
    wrong = []
    try:
        ready = await readyz(state)
        if ready.temporal == "unreachable":
            wrong.append("Temporal does not answer: workloads run on, but nothing starts, moves or ends.")
        if ready.held:
            wrong.append("The database was restored from a backup: nothing runs until `mizzen adopt`.")
        if ready.loops != "ok":
            wrong.append(f"Periodic loops: {ready.loops}.")
    except HttpProblem as problem:
        wrong.append(problem.detail)
    return await run_in_threadpool(partial(_overview, request, state, caller, wrong))


def _overview(request: Request, state: ApiState, caller: Caller, wrong: list[str]) -> Response:
    today = datetime.combine(datetime.now(UTC).date(), time(), UTC)
    cost = state.recent_costs.find(today.date(), today.date(), caller.tenant)
    costs = [] if cost is None else cost.items
    waiting = read_queue(state, caller, _WAITING, 0, _WAITING + 1)
    with state.transaction() as session:
        regions = slots_by_region(session)
        lost = preempted_since(session, today, caller.tenant, _LOST)
    wrong += _stopped(state, [one.region for one in regions])
    wrong += [
        f"Region {one.region}: {one.ready} of {one.machines} machines are ready."
        for one in regions
        if one.ready < one.machines
    ]
    return page(
        request, "overview.html", wrong=wrong, regions=regions, lost=lost,
        waiting=waiting, steps=[] if waiting.items else _first_steps(state, caller),
        usd=sum(one.usd for one in costs), unpriced_h=sum(one.unpriced_h for one in costs),
        hours=_gpu_hours([(one.resource, one.hours) for one in costs]), cost_at=None if cost is None else cost.at,
    )  # fmt: skip


def _first_steps(state: ApiState, caller: Caller) -> list[str]:
    """Returns what is left to do until the first workload: `tenant`, `submit`; empty once there is one."""
    if not caller.may(Role.SUBMITTER) or list_workloads(state, caller, limit=1).items:
        return []
    has_tenant = bool(list_tenants(state, caller, 1).items)
    return ["submit"] if has_tenant or not caller.may(Role.OPERATOR) else ["tenant", "submit"]


def _stopped(state: ApiState, regions: Sequence[str]) -> list[str]:
    """Returns what keeps work from being placed or started: regions, buckets, and messages that wait."""
    with state.transaction() as session:
        silent = [silence_reason(name, one.since_s) for name, one in silent_regions(session).items() if not one.slow]
        out = [reason.sentence for reason in (*silent, *failing_buckets(session, regions).values())]
        mail = outbox.backlog(session)
    if mail.oldest_s > _MAIL_S:
        age = format_duration(mail.oldest_s)
        out.append(f"Messages to workflows have waited for {age}: no control worker runs, or Temporal does not answer.")
    return out


def _gpu_hours(used: list[tuple[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for resource, hours in used:
        out[resource] = out.get(resource, 0.0) + hours
    return dict(sorted(out.items()))
