"""Capacity: pools, instances, refused launches, and prices over time."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import Query, Request, Response

from api.auth import Role, Viewer
from api.fleet.instances import list_instances
from api.fleet.pools import list_pools
from api.routing import Router
from api.state import StateOf
from console.curves import chart_of
from console.pages import TOP, page
from infra.db.price_history import cluster_prices, offers, refused_launches

router = Router(prefix=TOP, include_in_schema=False)
_ROWS = 50
_CURVES = 8
_DAYS = 7


@router.get("/capacity")
def show_capacity(
    request: Request, state: StateOf, caller: Viewer, cursor: Annotated[str, Query(max_length=300)] = ""
) -> Response:
    """Shows pools and instances, and the prices of the last week."""
    pools = [] if cursor else list_pools(state, caller).items
    found = list_instances(state, caller, limit=_ROWS, cursor=cursor or None)
    end = datetime.now(UTC).replace(second=0, microsecond=0) + timedelta(minutes=1)
    begin = end - timedelta(days=_DAYS)
    charts, refused = [], []
    if not cursor:
        with state.transaction() as session:
            prices = cluster_prices(session, begin, end)
            changed = dict(sorted(prices.items(), key=lambda one: -len(one[1]))[:_CURVES])
            taken = offers(session, begin, _CURVES) if caller.may(Role.OPERATOR) else {}
            refused = refused_launches(session, begin, _ROWS) if caller.may(Role.OPERATOR) else []
        # Of a new installation, the time since its first price.
        known = [at for series in (*changed.values(), *taken.values()) for at, _ in series]
        begin = max(begin, min(known, default=begin).replace(second=0, microsecond=0))
        charts = [
            ("Prices of clusters", chart_of(changed, begin, end, is_stepped=True)),
            ("Offers taken, at the time of the request", chart_of(taken, begin, end, is_stepped=False)),
        ]
    return page(
        request, "capacity.html", pools=pools, found=found, cursor=cursor, charts=charts, refused=refused, days=_DAYS
    )  # fmt: skip
