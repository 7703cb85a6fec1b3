"""Tenants, services and health: one list each."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import TypeAdapter, ValidationError

from api.auth import Caller, Operator, Role, Viewer
from api.bodies import Name
from api.fleet.loops import list_loops
from api.people.holders import holders
from api.people.tenants import TenantBody, list_tenants, put_tenant
from api.problems import HttpProblem, ProblemType, invalid
from api.routing import Router
from api.services.routes import list_services, show_service
from api.services.traffic import list_traffic
from api.services.views import ServiceReplicaView
from api.state import StateOf
from api.workloads.workload_queries import names_of
from console.cookies import Form
from console.curves import traffic_charts
from console.pages import TOP, page, temporal_link
from domain.capacity import CPU
from domain.ids import RULES, service_workflow_id
from infra.db import outbox, published_queue
from infra.db.tenants import Tenant

router = Router(prefix=TOP, include_in_schema=False)
_ROWS = 50
_MINUTES = 60
_DAYS = 7
_KINDS = 8
_NAMES: TypeAdapter[str] = TypeAdapter(Name)
After = Annotated[str, Query(max_length=300)]


@router.get("/tenants")
def show_tenants(request: Request, state: StateOf, caller: Viewer, cursor: After = "") -> Response:
    """Shows tenants with their quotas, usage, and costs of the last week."""
    return _tenants(request, state, caller, cursor, {}, None)


def _tenants(
    request: Request, state: StateOf, caller: Caller, cursor: str, given: Mapping[str, str], problem: HttpProblem | None
) -> Response:
    """`given`: what was entered in the form; `problem`: why it was refused."""
    found = list_tenants(state, caller, _ROWS, cursor or None)
    today = datetime.now(UTC).date()
    days = [today - timedelta(days=ago) for ago in reversed(range(_DAYS))]
    latest = days[-3:]  # A phone has room for these.
    usd, gpu_h = (defaultdict[tuple[str, date], float](float) for _ in range(2))
    recent = state.recent_costs.get(days[0], today, caller.tenant)
    for cost in recent.items:
        usd[cost.tenant, cost.day] += cost.usd
        gpu_h[cost.tenant, cost.day] += cost.hours if cost.resource != CPU else 0.0
    with state.transaction() as session:
        kinds = sorted({kind for one in found.items for kind in one.quota.gpus})[:_KINDS]
        held = {kind: rows[:_ROWS] for kind, rows in holders(session, caller, kinds).items()}
    return page(
        request, "tenants.html", status=problem.status_code if problem else 200, given=given, problem=problem,
        held=held, found=found, usd=usd, gpu_h=gpu_h, days=days, cursor=cursor,
        cost_at=recent.at,
        totals={one.name: sum(usd[one.name, day] for day in days) for one in found.items},
        columns=[("Tenant", ""), *((f"{day:%a %d %b}", "number" if day in latest else "number more") for day in days)],
        may_create=caller.may(Role.OPERATOR),
    )  # fmt: skip


@router.post("/tenants")
def create_tenant(request: Request, state: StateOf, caller: Operator, form: Form) -> Response:
    """Creates a tenant. If the form is invalid, shows it again with the reason."""
    try:
        _create(state, caller, form)
    except HttpProblem as problem:
        return _tenants(request, state, caller, "", form, problem)
    return RedirectResponse(f"{TOP}/tenants", 303)


def _create(state: StateOf, caller: Caller, form: Mapping[str, str]) -> None:
    quota = _quota(form.get("gpus", ""))
    if wrong := [type_ for type_, count in quota.items() if not isinstance(count, int)]:
        raise invalid("Quota of GPUs", "must be types with numbers, such as gpu=8, a100=16", wrong[0])
    body = {"level": _number(form.get("level", "")), "quota": {"gpus": quota}}
    try:
        name, made = _NAMES.validate_python(form.get("name", "").strip()), TenantBody.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        rule = RULES.get(first.get("ctx", {}).get("pattern", ""))
        field = ".".join(map(str, first["loc"])) or "name"
        raise invalid(field, f"must be {rule}" if rule else first["msg"], first["input"]) from None
    with state.transaction() as session:
        if session.get(Tenant, name) is not None:
            raise HttpProblem(ProblemType.CONFLICT, f"tenant {name} exists; `mizzen tenants set` changes it")
    put_tenant(name, made, state, caller)


def _number(given: str) -> int | str:
    return int(given) if given.isascii() and given.isdigit() and len(given) < 10 else given


def _quota(given: str) -> dict[str, int | str]:
    pairs = [pair.partition("=") for pair in re.split(r"[,\s]+", given) if pair]
    return {type_: _number(count) for type_, _, count in pairs}


@router.get("/services")
def show_services(request: Request, state: StateOf, caller: Viewer, cursor: After = "") -> Response:
    """Shows services."""
    found = list_services(state, caller, limit=_ROWS, cursor=cursor or None)
    return page(request, "services.html", found=found, cursor=cursor)


@router.get("/services/{id}")
def show_one_service(request: Request, id: str, state: StateOf, caller: Viewer) -> Response:
    """Shows a service with its replicas, and its requests of the last hour."""
    found = show_service(id, state, caller)
    charts = traffic_charts(list_traffic(found.id, state, caller, minutes=_MINUTES).items)
    temporal = temporal_link(state, caller, service_workflow_id(found.id))
    with state.transaction() as session:
        names = names_of(session, caller, [one.workload for one in found.replicas])
    return page(
        request, "service.html", service=found, charts=charts, temporal=temporal, counts=_by_place(found.replicas),
        names=names,
    )  # fmt: skip


def _by_place(replicas: Sequence[ServiceReplicaView]) -> list[tuple[int, str, str, int, int]]:
    """Returns the numbers of ready replicas and of all, by version, zone and kind."""
    found = defaultdict[tuple[int, str, str], list[bool]](list)
    for one in replicas:
        found[one.version, one.zone or "shared machines", one.kind].append(one.stage == "ready")
    return [(*place, sum(ready), len(ready)) for place, ready in sorted(found.items(), reverse=True)]


@router.get("/health")
def show_health(request: Request, state: StateOf, caller: Operator) -> Response:
    """Shows the periodic loops with their failures, the scheduler's times, and the requests to this process."""
    with state.transaction() as session:
        mail = outbox.backlog(session)
        scanned_at, counters = published_queue.progress(session)
    return page(
        request, "health.html", loops=list_loops(state, caller).items, mail=mail, scanned_at=scanned_at,
        counters=counters, served=state.metrics.served(),
    )  # fmt: skip
