"""The fleet at a time in the past: the map of a region, and the workloads that got or left slots in the hour before."""

from datetime import UTC, datetime, timedelta
from typing import Annotated
from urllib.parse import quote

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse

from api.auth import Caller, Viewer
from api.fleet.slots import moves, slots_at, state_changes
from api.problems import existing, invalid
from api.routing import Router
from api.state import ApiState, StateOf
from console import fleet_pages
from console.fleet_pages import own_tenant, tenants_of
from console.fleet_picture import COLOURS, LABELS, TENANT_COLOURS, MapContent, RegionMap, SlotUse, uses_of
from console.pages import TOP, page
from domain.units import format_duration
from infra.db.models import Region

router = Router(prefix=TOP, include_in_schema=False)
SLIDER_DAYS = 3
"""How far back the slider reaches, at most."""
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
    at = _minute(state, at, now)
    with state.transaction() as session:
        existing(session, Region, region, "region")
        found = moves(session, region, caller.tenant, at - _BEFORE, at, _ROWS)
        changed = state_changes(session, region, at - _BEFORE, at, _ROWS)
        tenants = tenants_of(session, caller)
    legend = [(COLOURS[SlotUse.FREE], "free"), (COLOURS[SlotUse.HELD], "held by others")]
    if caller.tenant is not None:
        legend.append((COLOURS[SlotUse.OWN], f"held by {caller.tenant}"))
    else:
        legend = legend[:1] + [(TENANT_COLOURS[n % len(TENANT_COLOURS)], name) for n, name in enumerate(tenants)]
    legend += [(COLOURS[use], LABELS[use]) for use in (SlotUse.CLOSED, SlotUse.LOST)]
    days = min(SLIDER_DAYS, int(state.settings.lifecycle.keep_fleet_history_s // 86400))
    others = [(label, at + timedelta(minutes=by), by < 0) for label, by in _STEPS]
    return page(
        request, "past.html", region=region, at=at, moves=found, changed=changed, legend=legend, begin=at - _BEFORE,
        map=_map(state, caller, region, at), ago=min(days * 1440, int((now - at).total_seconds() // 60)),
        days=days, steps=[one for one in others if _oldest(state, now) <= one[1] <= now],
    )  # fmt: skip


@router.get("/fleet/{region}/past.png")
def show_past_map(region: str, state: StateOf, caller: Viewer, at: datetime) -> Response:
    """Returns the map of a region at a time."""
    found = _map(state, caller, region, _minute(state, at, datetime.now(UTC)))
    return Response(
        found.png, media_type="image/png", headers={"Cache-Control": "private, max-age=60", "Vary": "Cookie"}
    )


def _oldest(state: ApiState, now: datetime) -> datetime:
    return now - timedelta(seconds=state.settings.lifecycle.keep_fleet_history_s)


def _minute(state: ApiState, at: datetime, now: datetime) -> datetime:
    at = at.replace(tzinfo=at.tzinfo or UTC).astimezone(UTC).replace(second=0, microsecond=0)
    if at > now:
        raise invalid("at", "must be a time in the past", f"{at:%Y-%m-%dT%H:%MZ}")
    if at < _oldest(state, now):
        kept = format_duration(state.settings.lifecycle.keep_fleet_history_s)
        message = f"must be at most {kept} ago: older records are not kept (lifecycle.keep_fleet_history_s)"
        raise invalid("at", message, f"{at:%Y-%m-%dT%H:%MZ}")
    return at


def _map(state: ApiState, caller: Caller, region: str, at: datetime) -> RegionMap:
    def read() -> MapContent:
        with state.transaction() as session:
            tenants = tenants_of(session, caller)
            machines = slots_at(session, region, tenants or own_tenant(caller), at)
        return MapContent(machines, uses_of(machines, tenants))

    return fleet_pages.PICTURES.get((region, caller.tenant, f"at {at.isoformat()}"), read)
