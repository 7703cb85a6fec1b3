"""The fleet: regions, the map and the machines of a region, one machine, and the forms that cordon and drain it."""

import re
from typing import Annotated, Literal, get_args
from urllib.parse import quote

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse
from sqlalchemy.orm import Session

from api.auth import Caller, Operator, Role, Viewer
from api.fleet import machines
from api.fleet.machines import CordonBody, get_machine, list_machines
from api.fleet.regions import get_region
from api.fleet.slots import slots_by_cluster, slots_by_region, slots_now
from api.people.tenants import tenant_names
from api.problems import not_found
from api.routing import Router
from api.state import ApiState, StateOf
from api.workloads.workload_queries import names_of
from console.cookies import Form
from console.fleet_picture import (
    COLOURS,
    LABELS,
    TENANT_COLOURS,
    MapContent,
    RegionMap,
    RegionMaps,
    SlotUse,
    grid_of,
    kinds_of,
    prices_of,
    uses_of,
)
from console.pages import TOP, page, temporal_link
from domain.ids import machine_workflow_id

router = Router(prefix=TOP, include_in_schema=False)
_ROWS = 50
_PATH = "/machines/{region}/{cluster}/{machine}"
_POINT = re.compile(r"([0-9]{1,5}),([0-9]{1,5})")
Subject = Literal["state", "tenant", "kind", "price"]
"""What the colours of a map show. Colours by tenant are only for keys without a tenant."""
_TERMS = {"kind": kinds_of, "price": prices_of}
PICTURES = RegionMaps()
"""The pictures of this process."""


@router.get("/fleet")
def show_regions(request: Request, state: StateOf, _: Viewer) -> Response:
    """Shows the regions."""
    with state.transaction() as session:
        regions = slots_by_region(session)
    return page(request, "regions.html", regions=regions)


@router.get("/fleet/{region}")
def show_region(
    request: Request,
    region: str,
    state: StateOf,
    caller: Viewer,
    by: Subject = "state",
    cluster: Annotated[str, Query(max_length=300)] = "",
    cursor: Annotated[str, Query(max_length=300)] = "",
) -> Response:
    """Shows the map of a region with its zones and clusters, and a page of machines, of all clusters or of one."""
    found = list_machines(state, caller, region, cluster or None, _ROWS, cursor or None)
    if not found.items and not cursor:
        get_region(region, state, caller)
    by = _subject(caller, by)
    is_whole = not (cursor or cluster)
    shown = _map(state, caller, region, by) if is_whole else None
    with state.transaction() as session:
        clusters = slots_by_cluster(session, region) if is_whole else []
    subjects = [one for one in get_args(Subject) if one == _subject(caller, one)]
    return page(
        request, "region.html", region=region, found=found, by=by, subjects=subjects, cursor=cursor, map=shown,
        cluster=cluster, clusters=clusters,
    )  # fmt: skip


def _subject(caller: Caller, by: Subject) -> Subject:
    return "state" if by == "tenant" and caller.tenant is not None else by


@router.get("/fleet/{region}/map.png")
def show_map(request: Request, region: str, state: StateOf, caller: Viewer, by: Subject = "state") -> Response:
    """Returns the map of a region: 304 if the browser has this version."""
    found = _map(state, caller, region, by)
    headers = {"ETag": found.etag, "Cache-Control": "private, no-cache", "Vary": "Cookie"}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.png, media_type="image/png", headers=headers)


def _map(state: ApiState, caller: Caller, region: str, by: Subject) -> RegionMap:
    by = _subject(caller, by)
    audience = None if by in _TERMS else caller.tenant
    return PICTURES.get((region, audience, by), lambda: _content(state, caller, region, by))


def tenants_of(session: Session, caller: Caller) -> list[str]:
    """Returns the names of the tenants, in the order of their colours; empty for a key with a tenant."""
    return [] if caller.tenant is not None else tenant_names(session)


def own_tenant(caller: Caller) -> list[str]:
    """Returns the tenant of a key; empty: the key has none."""
    return [] if caller.tenant is None else [caller.tenant]


def _content(state: ApiState, caller: Caller, region: str, by: Subject) -> MapContent:
    if by in _TERMS:
        with state.transaction() as session:
            return _TERMS[by](slots_now(session, region, with_terms=True))
    with state.transaction() as session:
        tenants = tenants_of(session, caller) if by == "tenant" else []
        machines = slots_now(session, region, tenants or own_tenant(caller))
    legend = [(COLOURS[use], label) for use, label in LABELS.items() if not (tenants and use is SlotUse.HELD)]
    if caller.tenant is not None:
        legend.insert(1, (COLOURS[SlotUse.OWN], f"held by {caller.tenant}"))
    legend += [(TENANT_COLOURS[n % len(TENANT_COLOURS)], name) for n, name in enumerate(tenants)]
    return MapContent(machines, uses_of(machines, tenants), legend)


@router.get("/fleet/{region}/at")
def find_on_map(request: Request, region: str, state: StateOf, _: Viewer) -> Response:
    """Goes to the machine at the point of the map that was clicked, which the browser sends as `?x,y`."""
    point = _POINT.fullmatch(request.url.query)
    with state.transaction() as session:
        machines = slots_now(session, region)
    found = None if point is None else grid_of(machines).machine_at(int(point[1]), int(point[2]))
    path = f"fleet/{quote(region)}" if found is None else f"machines/{machines.ids[found]}"
    return RedirectResponse(f"{TOP}/{path}", 303)


@router.get(_PATH)
def show_machine(request: Request, region: str, cluster: str, machine: str, state: StateOf, caller: Viewer) -> Response:
    """Shows one machine."""
    found = get_machine(region, cluster, machine, state, caller)
    temporal = temporal_link(state, caller, machine_workflow_id(found.id))
    with state.transaction() as session:
        names = names_of(session, caller, found.workloads)
    return page(
        request, "machine.html", machine=found, names=names, may_change=caller.may(Role.OPERATOR), temporal=temporal
    )


@router.post(_PATH + "/{action}")
def change_machine(
    region: str, cluster: str, machine: str, action: str, state: StateOf, caller: Operator, form: Form
) -> Response:
    """Cordons or drains a machine, or ends a cordon or drain."""
    note = CordonBody(reason=form.get("reason", "").strip()[:200] or None)
    match action:
        case "cordon":
            machines.cordon(region, cluster, machine, state, caller, note)
        case "uncordon":
            machines.uncordon(region, cluster, machine, state, caller)
        case "drain":
            machines.drain(region, cluster, machine, state, caller, note)
        case "undrain":
            machines.undrain(region, cluster, machine, state, caller)
        case _:
            raise not_found("action", action)
    return RedirectResponse(f"{TOP}/machines/{quote(f'{region}/{cluster}/{machine}')}", 303)
