"""Endpoints for regions and datacenters: their slots, storage and quotas."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated

from pydantic import Field
from sqlalchemy import select
from sqlalchemy.orm import Session

from api.auth import Operator, Viewer
from api.bodies import Body, Bytes, JsonOnly, Name
from api.openapi import refusals
from api.paging import MAX_ITEMS, Cursor, Limit, Page, page
from api.problems import existing, invalid
from api.routing import Router
from api.state import StateOf
from api.views import View, write_audit
from infra.db.buckets import BucketState, bucket_states
from infra.db.models import Cluster, Datacenter, Machine, Region
from infra.db.silent_regions import SilentRegion, silent_regions

router = Router(prefix="/v1", tags=["fleet"])


class SlotsView(View):
    """GPU slots of one type on machines that are not lost."""

    total: int
    held: int
    promised: int = Field(description="Slots held by a workload that is being evicted and promised to another workload")


class MachineCountsView(View):
    """Number of machines by state."""

    ready: int
    joining: int
    lost: int
    cordoned: int = Field(
        description="Machines in any of these states that are cordoned or being drained: nothing new is placed on them"
    )


class DatacenterView(View):
    """A datacenter of a region."""

    name: str
    storage_bytes: int | None
    clusters: list[str]


class RegionView(View):
    """A region with its settings, machines and state."""

    name: str
    bucket_url: str
    storage_bytes: int | None = Field(description="Storage for tables in its bucket; null: not set")
    cpu_hours: dict[str, float] = Field(description="App to its quota of CPU hours a day; other apps have no limit")
    datacenters: list[DatacenterView]
    clusters: list[str]
    machines: MachineCountsView
    gpus: dict[str, SlotsView]
    state: str = Field(
        description="`answering`, `slow` (its schedulers bid late), `silent` (its schedulers do not bid) or "
        "`bucket_unavailable` (its bucket does not respond); in the last two states nothing is placed there",
        examples=["answering"],
    )
    state_since: datetime | None = Field(description="When it entered this state; null if it is answering")
    bucket_error: str | None = Field(description="Error of the last check of its bucket; null: the bucket responds")


class RegionBody(Body):
    """Settings of a region; omitted fields are not changed."""

    storage_bytes: Bytes | None = Field(None, description="Null removes the value")
    cpu_hours: dict[Name, Annotated[float, Field(ge=0)]] | None = Field(
        None, description="App to its quota of CPU hours a day; replaces all quotas", examples=[{"spark": 5000}]
    )


class DatacenterBody(Body):
    """Settings of a datacenter: its storage, and the clusters of the region that are in it."""

    storage_bytes: Bytes | None = None
    clusters: list[Name] = []


class RegionList(Page[RegionView]):
    """A page of regions, sorted by name."""


@router.get("/regions", summary="List regions")
def list_regions(state: StateOf, _: Viewer, limit: Limit = MAX_ITEMS, cursor: Cursor = None) -> RegionList:
    """Lists regions with their clusters, machines and GPU slots."""
    wanted = select(Region).order_by(Region.name).limit(limit + 1)
    if cursor is not None:
        wanted = wanted.where(Region.name > cursor)
    with state.transaction() as session:
        regions, following = page(session.scalars(wanted).all(), limit, lambda row: row.name)
        clusters = session.scalars(select(Cluster).order_by(Cluster.region, Cluster.name)).all()
        datacenters = session.scalars(select(Datacenter).order_by(Datacenter.region, Datacenter.name)).all()
        machines = grouped(session.scalars(select(Machine)), lambda m: m.region)
        silent = silent_regions(session)
        buckets = bucket_states(session, [row.name for row in regions])
        return RegionList(
            items=[_region(row, clusters, datacenters, machines[row.name], silent, buckets) for row in regions],
            next_cursor=following,
        )


@router.get("/regions/{name}", summary="Get a region", responses=refusals(404))
def get_region(name: str, state: StateOf, _: Viewer) -> RegionView:
    """Returns one region."""
    with state.transaction() as session:
        return _one(session, existing(session, Region, name, "region"))


@router.patch(
    "/regions/{name}",
    summary="Set a region's storage and CPU quotas",
    dependencies=[JsonOnly],
    responses=refusals(404),
)
def set_region(name: str, body: RegionBody, state: StateOf, caller: Operator) -> RegionView:
    """Sets the inputs of Tetris for a region: its storage, and the CPU hours a day for the jobs of each app."""
    with state.transaction() as session:
        row = existing(session, Region, name, "region", lock=True)
        changed = body.model_dump(include=body.model_fields_set)
        if changed.get("cpu_hours", {}) is None:
            raise invalid("cpu_hours", "must be a mapping of apps to CPU hours; use {} for no quotas")
        for field, value in changed.items():
            setattr(row, field, value)
        write_audit(session, caller, "region.set", name, **changed)
        return _one(session, row)


@router.put(
    "/regions/{name}/datacenters/{datacenter}",
    summary="Set a datacenter",
    dependencies=[JsonOnly],
    responses=refusals(404),
)
def set_datacenter(name: str, datacenter: Name, body: DatacenterBody, state: StateOf, caller: Operator) -> RegionView:
    """Creates or changes a datacenter. Clusters of the datacenter that are not listed are removed from it."""
    with state.transaction() as session:
        region = existing(session, Region, name, "region", lock=True)
        clusters = {c.name: c for c in session.scalars(select(Cluster).where(Cluster.region == name))}
        for index, cluster in enumerate(body.clusters):
            if cluster not in clusters:
                there = ", ".join(sorted(clusters)) or "none"
                raise invalid(f"clusters[{index}]", f"region {name} has no such cluster; it has {there}", cluster)
        row = session.get(Datacenter, (name, datacenter)) or Datacenter(region=name, name=datacenter)
        row.storage_bytes = body.storage_bytes
        session.add(row)
        session.flush()
        for own in clusters.values():
            if own.name in body.clusters:
                own.datacenter = datacenter
            elif own.datacenter == datacenter:
                own.datacenter = None
        write_audit(session, caller, "datacenter.set", f"{name}/{datacenter}", **body.model_dump())
        return _one(session, region)


def _one(session: Session, row: Region) -> RegionView:
    session.flush()
    clusters = session.scalars(select(Cluster).where(Cluster.region == row.name).order_by(Cluster.name)).all()
    own = select(Datacenter).where(Datacenter.region == row.name).order_by(Datacenter.name)
    machines = session.scalars(select(Machine).where(Machine.region == row.name)).all()
    silent, buckets = silent_regions(session), bucket_states(session, [row.name])
    return _region(row, clusters, session.scalars(own).all(), machines, silent, buckets)


def _region(
    row: Region,
    clusters: Iterable[Cluster],
    datacenters: Iterable[Datacenter],
    machines: Iterable[Machine],
    silent: Mapping[str, SilentRegion],
    buckets: Mapping[str, BucketState],
) -> RegionView:
    own = list(machines)
    bucket = buckets.get(row.name)
    state, since_s = _state(silent.get(row.name), bucket)
    here = [cluster for cluster in clusters if cluster.region == row.name]
    centers = [
        DatacenterView(
            name=d.name, storage_bytes=d.storage_bytes, clusters=[c.name for c in here if c.datacenter == d.name]
        )
        for d in datacenters
        if d.region == row.name
    ]
    return RegionView(
        name=row.name, bucket_url=row.bucket_url, storage_bytes=row.storage_bytes, cpu_hours=row.cpu_hours,
        datacenters=centers, clusters=[c.name for c in here], machines=counts(own), gpus=slots(own),
        state=state, state_since=None if since_s is None else datetime.fromtimestamp(since_s, UTC),
        bucket_error=bucket.error or None if bucket is not None else None,
    )  # fmt: skip


def _state(missing: SilentRegion | None, bucket: BucketState | None) -> tuple[str, float | None]:
    """Returns a region's state and its start in seconds since the epoch. States that block placement come first."""
    if missing is not None and not missing.slow:
        return "silent", missing.since_s
    if bucket is not None and bucket.failing_since_s is not None:
        return "bucket_unavailable", bucket.failing_since_s
    return ("answering", None) if missing is None else ("slow", missing.since_s)


def grouped(machines: Iterable[Machine], key: Callable[[Machine], str]) -> dict[str, list[Machine]]:
    """Groups machines by `key`. Looking up a missing key in the result returns an empty list."""
    out: dict[str, list[Machine]] = defaultdict(list)
    for machine in machines:
        out[key(machine)].append(machine)
    return out


def counts(machines: Iterable[Machine]) -> MachineCountsView:
    """Returns the number of machines by state."""
    states = defaultdict(int, {"ready": 0, "joining": 0, "lost": 0})
    cordoned = 0
    for machine in machines:
        states[machine.state] += 1
        cordoned += machine.cordon is not None or machine.draining
    return MachineCountsView(ready=states["ready"], joining=states["joining"], lost=states["lost"], cordoned=cordoned)


def slots(machines: Iterable[Machine]) -> dict[str, SlotsView]:
    """Returns the GPU slots of machines that are not lost, by GPU type, without slots that owners have taken back."""
    found: dict[str, list[int]] = {}
    for machine in machines:
        if machine.gpu_type is not None and machine.state != "lost":
            sums = found.setdefault(machine.gpu_type, [0, 0, 0])
            sums[0] += machine.gpus - machine.withheld.bit_count()
            sums[1] += machine.held.bit_count()
            sums[2] += machine.promised.bit_count()
    return {
        gpu_type: SlotsView(total=total, held=held, promised=promised)
        for gpu_type, (total, held, promised) in sorted(found.items())
    }
