"""Regions and clusters with their slots."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Annotated

from fastapi import APIRouter, Query
from sqlalchemy import select

from api.auth import Viewer
from api.openapi import refusals
from api.problems import not_found
from api.state import StateOf
from api.views import View
from infra.db.models import Cluster, Machine, Region

router = APIRouter(prefix="/v1", tags=["fleet"])


class SlotsView(View):
    """GPU slots of one type on machines that are not lost."""

    total: int
    held: int
    promised: int
    """Held by a workload that is being evicted, and promised to another."""


class MachinesView(View):
    """Number of machines by state."""

    ready: int
    joining: int
    lost: int
    cordoned: int
    """Of those above, the ones on which nothing new is placed: cordoned or being drained."""


class ClusterView(View):
    """A dynamic cluster of a region."""

    region: str
    name: str
    manager: str
    machines: MachinesView
    gpus: dict[str, SlotsView]


class RegionView(View):
    """A region."""

    name: str
    bucket_url: str
    clusters: list[str]
    machines: MachinesView
    gpus: dict[str, SlotsView]


class ClusterList(View):
    """Clusters by region and name."""

    items: list[ClusterView]


class RegionList(View):
    """Regions by name."""

    items: list[RegionView]


@router.get("/regions", summary="List regions")
def list_regions(state: StateOf, _: Viewer) -> RegionList:
    """All regions, with their clusters, machines and GPU slots."""
    with state.transaction() as session:
        regions = session.scalars(select(Region).order_by(Region.name)).all()
        clusters = session.scalars(select(Cluster).order_by(Cluster.region, Cluster.name)).all()
        machines = _grouped(session.scalars(select(Machine)), lambda m: m.region)
        return RegionList(items=[_region(row, clusters, machines[row.name]) for row in regions])


@router.get("/regions/{name}", summary="A region", responses=refusals(404))
def get_region(name: str, state: StateOf, _: Viewer) -> RegionView:
    """One region."""
    with state.transaction() as session:
        row = session.get(Region, name)
        if row is None:
            raise not_found("region", name)
        clusters = session.scalars(select(Cluster).where(Cluster.region == name).order_by(Cluster.name)).all()
        return _region(row, clusters, session.scalars(select(Machine).where(Machine.region == name)).all())


@router.get("/clusters", summary="List clusters")
def list_clusters(
    state: StateOf, _: Viewer, region: Annotated[str | None, Query(description="Only this region's")] = None
) -> ClusterList:
    """All clusters, with their machines and GPU slots."""
    with state.transaction() as session:
        clusters, machines = select(Cluster).order_by(Cluster.region, Cluster.name), select(Machine)
        if region is not None:
            clusters, machines = clusters.where(Cluster.region == region), machines.where(Machine.region == region)
        by_cluster = _grouped(session.scalars(machines), lambda m: f"{m.region}/{m.cluster}")
        items = [
            ClusterView(region=row.region, name=row.name, manager=row.manager, machines=_counts(own), gpus=_slots(own))
            for row in session.scalars(clusters)
            for own in [by_cluster[f"{row.region}/{row.name}"]]
        ]
        return ClusterList(items=items)


def _region(row: Region, clusters: Iterable[Cluster], machines: Iterable[Machine]) -> RegionView:
    own = list(machines)
    names = [cluster.name for cluster in clusters if cluster.region == row.name]
    return RegionView(name=row.name, bucket_url=row.bucket_url, clusters=names, machines=_counts(own), gpus=_slots(own))


def _grouped(machines: Iterable[Machine], key: Callable[[Machine], str]) -> dict[str, list[Machine]]:
    out: dict[str, list[Machine]] = defaultdict(list)
    for machine in machines:
        out[key(machine)].append(machine)
    return out


def _counts(machines: Iterable[Machine]) -> MachinesView:
    states = defaultdict(int, {"ready": 0, "joining": 0, "lost": 0})
    cordoned = 0
    for machine in machines:
        states[machine.state] += 1
        cordoned += machine.cordon is not None or machine.draining
    return MachinesView(ready=states["ready"], joining=states["joining"], lost=states["lost"], cordoned=cordoned)


def _slots(machines: Iterable[Machine]) -> dict[str, SlotsView]:
    found: dict[str, list[int]] = {}
    for machine in machines:
        if machine.gpu_type is not None and machine.state != "lost":
            sums = found.setdefault(machine.gpu_type, [0, 0, 0])
            sums[0] += machine.gpus
            sums[1] += machine.held.bit_count()
            sums[2] += machine.promised.bit_count()
    return {
        gpu_type: SlotsView(total=total, held=held, promised=promised)
        for gpu_type, (total, held, promised) in sorted(found.items())
    }
