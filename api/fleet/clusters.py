"""Endpoints for clusters: their machines and GPU slots, and the settings that operators set."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import Query
from pydantic import Field, StringConstraints
from sqlalchemy import select, tuple_

from api.auth import Caller, Operator, Viewer
from api.bodies import MAX_TEXT, Body, JsonOnly
from api.fleet.regions import MachineCountsView, SlotsView, counts, grouped, slots
from api.openapi import refusals
from api.paging import MAX_ITEMS, Cursor, Limit, Page, page
from api.people.tenants import GpuType
from api.problems import existing, invalid
from api.routing import Router
from api.state import StateOf
from api.views import View, write_audit
from domain.capacity import CapacityKind
from infra.db import outbox
from infra.db.models import Cluster, Machine
from mizzen.objects.urls import check_url

router = Router(prefix="/v1", tags=["fleet"])
_MOST_USD_PER_H = 1e6
_MOST_MBIT = 1e9


class ClusterView(View):
    """A cluster of a region."""

    region: str
    name: str
    manager: str
    zone: str | None = Field(description="Zone of its machines within the region, as the platform names it")
    capacity: CapacityKind = Field(description="How its machines were obtained")
    prices: dict[str, float] = Field(
        description="US dollars an hour: of a GPU under its type, of a core under `cpu`",
        examples=[{"a100": 2.1, "cpu": 0.04}],
    )
    store_url: str | None = Field(
        description="Store for checkpoints of workloads that run there; null: the region's bucket"
    )
    link_mbit: float | None = Field(
        description="Bandwidth of its link to the region's other clusters, in Mbit/s; null: not set"
    )
    tenant: str | None = Field(
        description="The only tenant that may use the machines, which are its pilots; null: all tenants may, or the"
        " key belongs to another tenant"
    )
    machines: MachineCountsView
    gpus: dict[str, SlotsView]


class ClusterBody(Body):
    """Settings of a cluster; omitted fields are not changed."""

    zone: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)] | None = Field(
        None, description="Null removes the zone", examples=["us-east-1b"]
    )
    capacity: CapacityKind | None = None
    prices: dict[GpuType, Annotated[float, Field(ge=0, le=_MOST_USD_PER_H)]] | None = Field(
        None, max_length=1000, description="Replace all prices, from now on", examples=[{"a100": 2.1}]
    )
    store_url: Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)] | None = Field(
        None,
        description="Null: checkpoints are saved in the region's bucket. Applies to attempts that start from now on",
        examples=["s3://building-7/mizzen"],
    )
    link_mbit: Annotated[float, Field(gt=0, le=_MOST_MBIT)] | None = Field(
        None, description="Null removes the value", examples=[1000]
    )


class ClusterList(Page[ClusterView]):
    """A page of clusters, sorted by region and name."""


@router.get("/clusters", summary="List clusters")
def list_clusters(
    state: StateOf,
    caller: Viewer,
    region: Annotated[str | None, Query(description="Only clusters in this region")] = None,
    limit: Limit = MAX_ITEMS,
    cursor: Cursor = None,
) -> ClusterList:
    """Lists clusters with their machines and GPU slots."""
    wanted = select(Cluster).order_by(Cluster.region, Cluster.name).limit(limit + 1)
    if region is not None:
        wanted = wanted.where(Cluster.region == region)
    if cursor is not None:
        after_region, _slash, after_name = cursor.partition("/")
        wanted = wanted.where(tuple_(Cluster.region, Cluster.name) > tuple_(after_region, after_name))
    with state.transaction() as session:
        clusters, following = page(session.scalars(wanted).all(), limit, lambda row: f"{row.region}/{row.name}")
        machines = select(Machine).where(Machine.region.in_({row.region for row in clusters}))
        by_cluster = grouped(session.scalars(machines), lambda m: f"{m.region}/{m.cluster}")
        items = [_view(row, by_cluster[f"{row.region}/{row.name}"], caller) for row in clusters]
        return ClusterList(items=items, next_cursor=following)


@router.patch(
    "/clusters/{region}/{name}",
    summary="Set a cluster's zone, capacity kind, prices, store and link",
    dependencies=[JsonOnly],
    responses=refusals(404),
)
def set_cluster(region: str, name: str, body: ClusterBody, state: StateOf, caller: Operator) -> ClusterView:
    """Sets the zone, capacity kind, prices, store and link of a cluster. New prices do not change past costs."""
    with state.transaction() as session:
        row = existing(session, Cluster, (region, name), "cluster", lock=True)
        changed = body.model_dump(mode="json", include=body.model_fields_set)
        for field in ("capacity", "prices"):
            if field in changed and changed[field] is None:
                raise invalid(field, "must not be null; omit it to keep the current value")
        if changed.get("store_url") is not None:
            try:
                check_url(changed["store_url"])
            except ValueError as error:
                raise invalid("store_url", str(error)) from None
        for field, value in changed.items():
            setattr(row, field, value)
        outbox.wake_scheduler(session)
        write_audit(session, caller, "cluster.set", f"{region}/{name}", **changed)
        session.flush()
        own = select(Machine).where(Machine.region == region, Machine.cluster == name)
        return _view(row, session.scalars(own).all(), caller)


def _view(row: Cluster, machines: Sequence[Machine], caller: Caller) -> ClusterView:
    tenant = row.tenant if caller.tenant in (None, row.tenant) else None
    return ClusterView.from_row(row, tenant=tenant, machines=counts(machines), gpus=slots(machines))
