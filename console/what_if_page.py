"""What if: simulates the live system with other quotas, fewer regions or another policy, for operators."""

import re

from fastapi import Request, Response
from fastapi.responses import RedirectResponse

from api.auth import Operator
from api.fleet.slots import slots_by_region
from api.fleet.snapshot import get_snapshot
from api.problems import HttpProblem, ProblemType, invalid, not_found
from api.routing import Router
from api.state import StateOf
from console.cookies import Form
from console.pages import TOP, page
from console.what_if_run import SimulationRunsError, WhatIfRuns
from infra.errors import ConfigurationError
from simulation.live import change
from simulation.policies import POLICIES

router = Router(prefix=TOP, include_in_schema=False)
RUNS = WhatIfRuns()
"""The simulations of this process."""
_PAGE = f"{TOP}/what-if"
_MOST_HOURS = 168
_MOST_QUOTAS = 20
# The report has its style and its charts inline, and no scripts.
_REPORT_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'"


@router.get("/what-if")
def show_what_if(request: Request, state: StateOf, _: Operator) -> Response:
    """Shows the form, and the progress or the result of the newest simulation."""
    with state.transaction() as session:
        regions = [one.region for one in slots_by_region(session)]
    run = RUNS.newest
    rows = run.rows() if run is not None and run.has_ended and run.error is None else []
    return page(
        request, "what_if.html", regions=regions, policies=POLICIES.values(), run=run, rows=rows, most=_MOST_HOURS
    )  # fmt: skip


@router.post("/what-if")
def start_what_if(state: StateOf, caller: Operator, form: Form) -> Response:
    """Starts a simulation. A change that is not possible is refused at once."""
    quotas = [f"quota.{text}" for text in re.split(r"[,\s]+", form.get("quotas", "")) if text]
    drains = [region for region in (form.get("drain", ""),) if region]
    hours, policy = form.get("hours", ""), form.get("policy", "global")
    if not (hours.isascii() and hours.isdigit() and 1 <= int(hours[:4]) <= _MOST_HOURS):
        raise invalid("hours", f"must be a number of hours from 1 to {_MOST_HOURS}", hours)
    if policy not in POLICIES:
        raise invalid("policy", f"must be one of {', '.join(POLICIES)}", policy)
    if len(quotas) > _MOST_QUOTAS:
        raise invalid("quotas", f"must be at most {_MOST_QUOTAS} quotas", len(quotas))
    if not quotas and not drains and policy == "global":
        raise invalid("quotas", "must name a quota, or choose a region or another policy: nothing would change")
    live = get_snapshot(state, caller)
    try:
        change(live, quotas, drains)
    except ConfigurationError as error:
        raise invalid("quotas", str(error).partition(": ")[2], form.get("quotas")) from None
    says = [text.removeprefix("quota.") for text in quotas] + [f"without {region}" for region in drains]
    says += [f"policy {policy}"] if policy != "global" else []
    options = [f"--until={hours}h", "--policy=global", *([f"--policy={policy}"] if policy != "global" else [])]
    options += [f"--set={text}" for text in quotas] + [f"--drain={region}" for region in drains]
    try:
        RUNS.start(", ".join(says), caller.label or caller.id, live.model_dump_json().encode(), options)
    except SimulationRunsError as error:
        raise HttpProblem(
            ProblemType.CONFLICT, f"another simulation runs ({error}): wait for its end, or cancel it"
        ) from None
    return RedirectResponse(_PAGE, 303)


@router.post("/what-if/cancel")
def cancel_what_if(_: Operator, __: Form) -> Response:
    """Cancels the simulation that runs."""
    if RUNS.newest is not None:
        RUNS.newest.cancel()
    return RedirectResponse(_PAGE, 303)


@router.get("/what-if/report")
def show_report(_: Operator) -> Response:
    """Returns the report of the newest simulation, with charts."""
    report = RUNS.newest.report() if RUNS.newest is not None else None
    if report is None:
        raise not_found("report", "of a simulation")
    return Response(report, media_type="text/html; charset=utf-8", headers={"Content-Security-Policy": _REPORT_POLICY})
