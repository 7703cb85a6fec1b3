"""Endpoint for the cost of workloads, by tenant and day."""

from datetime import UTC, date, datetime, timedelta
from typing import Annotated

from fastapi import Query
from pydantic import Field

from api.auth import Viewer
from api.bodies import Name
from api.openapi import refusals
from api.problems import invalid
from api.routing import Router
from api.state import StateOf
from api.views import View
from domain.capacity import CapacityKind
from infra.db.costs import costs

router = Router(prefix="/v1", tags=["fleet"])
_USUAL_DAYS = 7
_MOST_DAYS = 400
_FIRST_DAY, _LAST_DAY = date(2000, 1, 1), date(2999, 12, 31)


class CostView(View):
    """Usage of one resource by a tenant's workloads on one day, and its cost."""

    day: date = Field(description="Day in UTC")
    tenant: str
    capacity: CapacityKind
    resource: str = Field(description="A GPU type, or `cpu`", examples=["a100"])
    hours: float = Field(description="GPU hours or core hours")
    unpriced_h: float = Field(description="The part of `hours` for which no price is known")
    usd: float


class CostList(View):
    """Costs, sorted by day, tenant, capacity kind and resource."""

    items: list[CostView]


@router.get("/costs", summary="List costs of workloads", responses=refusals(404))
def list_costs(
    state: StateOf,
    caller: Viewer,
    since: Annotated[
        date | None,
        Query(alias="from", ge=_FIRST_DAY, le=_LAST_DAY, description="First day (UTC); default: 6 days before `to`"),
    ] = None,
    until: Annotated[
        date | None, Query(alias="to", ge=_FIRST_DAY, le=_LAST_DAY, description="Last day (UTC); default: today")
    ] = None,
    tenant: Annotated[Name | None, Query(description="Only this tenant")] = None,
) -> CostList:
    """Lists the resources that workloads held, with costs by cluster prices (`PATCH /v1/clusters/{region}/{name}`).

    A key with a tenant gets only the costs of that tenant.
    """
    if tenant is not None:
        caller.require_tenant(tenant)
    today = datetime.now(UTC).date()
    last = until or today
    first = since or last - timedelta(days=_USUAL_DAYS - 1)
    if not first <= last:
        raise invalid("query.from", f"must not be after the last day, {last}", first.isoformat())
    if (last - first).days >= _MOST_DAYS:
        raise invalid("query.from", f"must be at most {_MOST_DAYS} days before the last day, {last}", first.isoformat())
    with state.transaction() as session:
        found = costs(session, first, last, tenant or caller.tenant)
        return CostList(items=[CostView.model_validate(cost, from_attributes=True) for cost in found])
