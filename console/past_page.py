"""The fleet at a time in the past: the map of a region, and the workloads that got or left slots in the hour before."""

from datetime import UTC, datetime, timedelta
from typing import Annotated
from urllib.parse import quote

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse

from api.auth import Caller, Viewer
from api.fleet.regions import get_region
from api.fleet.slots import as_held, moves, slots_held_at, slots_of_machines
from api.problems import invalid
from api.routing import Router
from api.state import ApiState, StateOf
from console import fleet_pages
from console.fleet_pages import tenants_of
from console.fleet_picture import COLOURS, TENANT_COLOURS, MapContent, RegionMap, SlotUse, grid_of, uses_of
from console.pages import TOP, page

router = Router(prefix=TOP, include_in_schema=False)
SLIDER_DAYS = 3
"""How far back the slider reaches. A URL reaches as far back as workloads are kept."""
_BEFORE = timedelta(hours=1)
_ROWS = 50
_STEPS = (("a day", -1440), ("an hour", -60), ("10 minutes", -10), ("10 minutes", 10), ("an hour", 60), ("a day", 1440))
"""The distances in time of the links to other pages, in minutes."""


@router.get("/fleet/{region}/past")
def show_past(
    request: Request,
    region: str,
    state: StateOf,
    caller: Viewer,
    at: datetime | None = None,
    minutes_ago: Annotated[int | None, Query(ge=0, le=SLIDER_DAYS * 1440)] = None,
) -> Response:
    """Shows which tenants held which slots at a time. The slider's form is redirected to the page of that time."""
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    if at is None:
        then = now - timedelta(minutes=minutes_ago or 0)
        return RedirectResponse(f"{TOP}/fleet/{quote(region)}/past?at={then:%Y-%m-%dT%H:%MZ}", 303)
    at = _minute(at, now)
    get_region(region, state, caller)
    with state.transaction() as session:
        found = moves(session, region, caller.tenant, at - _BEFORE, at, _ROWS)
    tenants = tenants_of(state, caller)
    legend = [(COLOURS[SlotUse.FREE], "free"), (COLOURS[SlotUse.HELD], "held by others")]
    if caller.tenant is not None:
        legend.append((COLOURS[SlotUse.OWN], f"held by {caller.tenant}"))
    else:
        legend = legend[:1] + [(TENANT_COLOURS[n % len(TENANT_COLOURS)], name) for n, name in enumerate(tenants)]
    others = [(label, at + timedelta(minutes=by), by < 0) for label, by in _STEPS]
    return page(
        request, "past.html", region=region, at=at, moves=found, legend=legend, begin=at - _BEFORE,
        map=_map(state, caller, region, at), ago=min(SLIDER_DAYS * 1440, int((now - at).total_seconds() // 60)),
        days=SLIDER_DAYS, steps=[one for one in others if one[1] <= now],
    )  # fmt: skip


@router.get("/fleet/{region}/past.png")
def show_past_map(region: str, state: StateOf, caller: Viewer, at: datetime) -> Response:
    """Returns the map of a region at a time."""
    found = _map(state, caller, region, _minute(at, datetime.now(UTC)))
    return Response(
        found.png, media_type="image/png", headers={"Cache-Control": "private, max-age=60", "Vary": "Cookie"}
    )


def _minute(at: datetime, now: datetime) -> datetime:
    at = at.replace(tzinfo=at.tzinfo or UTC).astimezone(UTC).replace(second=0, microsecond=0)
    if at > now:
        raise invalid("at", "must be a time in the past", f"{at:%Y-%m-%dT%H:%MZ}")
    return at


def _map(state: ApiState, caller: Caller, region: str, at: datetime) -> RegionMap:
    def read() -> MapContent:
        with state.transaction() as session:
            held = slots_held_at(session, region, at)
            machines = as_held(slots_of_machines(session, region), held)
        own = [one for one in held if caller.tenant in (None, one.tenant)]
        return MapContent(grid_of(machines), uses_of(machines, own, tenants_of(state, caller)))

    return fleet_pages.PICTURES.get((region, caller.tenant, f"at {at.isoformat()}"), read)
