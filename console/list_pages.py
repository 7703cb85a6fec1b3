"""Tenants, services, tables, capacity and health: one list each."""

from typing import Annotated

from fastapi import Query, Request, Response

from api.auth import Operator, Viewer
from api.data.tables import list_tables
from api.fleet.costs import list_costs
from api.fleet.instances import list_instances
from api.fleet.loops import list_loops
from api.fleet.pools import list_pools
from api.people.tenants import list_tenants
from api.routing import Router
from api.services.routes import list_services, show_service
from api.state import StateOf
from console.pages import TOP, page

router = Router(prefix=TOP, include_in_schema=False)
_ROWS = 50
After = Annotated[str, Query(max_length=300)]


@router.get("/tenants")
def show_tenants(request: Request, state: StateOf, caller: Viewer, cursor: After = "") -> Response:
    """Shows tenants with their quotas, their use, and what they cost in the last week."""
    found = list_tenants(state, caller, _ROWS, cursor or None)
    usd: dict[str, float] = {}
    for cost in list_costs(state, caller).items:
        usd[cost.tenant] = usd.get(cost.tenant, 0.0) + cost.usd
    return page(request, "tenants.html", found=found, usd=usd, cursor=cursor)


@router.get("/services")
def show_services(request: Request, state: StateOf, caller: Viewer, cursor: After = "") -> Response:
    """Shows services."""
    found = list_services(state, caller, limit=_ROWS, cursor=cursor or None)
    return page(request, "services.html", found=found, cursor=cursor)


@router.get("/services/{id}")
def show_one_service(request: Request, id: str, state: StateOf, caller: Viewer) -> Response:
    """Shows a service with its replicas."""
    return page(request, "service.html", service=show_service(id, state, caller))


@router.get("/tables")
def show_tables(request: Request, state: StateOf, caller: Viewer, cursor: After = "") -> Response:
    """Shows tables with their replicas."""
    found = list_tables(state, caller, limit=_ROWS, cursor=cursor or None)
    return page(request, "tables.html", found=found, cursor=cursor)


@router.get("/capacity")
def show_capacity(request: Request, state: StateOf, caller: Viewer, cursor: After = "") -> Response:
    """Shows pools and instances."""
    pools = [] if cursor else list_pools(state, caller).items
    found = list_instances(state, caller, limit=_ROWS, cursor=cursor or None)
    return page(request, "capacity.html", pools=pools, found=found, cursor=cursor)


@router.get("/health")
def show_health(request: Request, state: StateOf, caller: Operator) -> Response:
    """Shows the periodic loops, with what has failed."""
    return page(request, "health.html", loops=list_loops(state, caller).items)
