"""Growth of elastic workloads in random regions: equality with the reference, and what it must not do."""

from dataclasses import replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from domain.scheduling import PlacementRequest, RegionSnapshot
from gms.auction.growth import Grower, growth
from reference import growth as reference
from rms.gang import Planner
from rms.region import RegionColumns
from tests.depth import examples

from . import PROPERTY
from .fleets import regions, requests


@st.composite
def _growers(draw: st.DrawFn) -> tuple[RegionSnapshot, Grower]:
    """Draws a region, and one of its workloads with an elastic job."""
    snapshot, drawn = draw(regions()), draw(requests())
    (job, *_), tasks = drawn.jobs, draw(st.integers(1, 3))
    id_ = draw(st.sampled_from([w.id for w in snapshot.running] or ["gone"]))
    job = replace(job, tasks=1, most_tasks=draw(st.integers(1, 8)), topology=replace(job.topology, slice_tasks=1))
    request = PlacementRequest(id_, drawn.rank, (job,), avoids=drawn.avoids)
    ends_by_s = draw(st.sampled_from((inf, inf, snapshot.now_s + 400.0, snapshot.now_s + 2000.0)))
    started_s = snapshot.now_s - draw(st.sampled_from((100.0, 5000.0, 100_000.0)))
    return snapshot, Grower(request, tasks, started_s, ends_by_s)


@settings(PROPERTY, max_examples=examples(300))
@given(_growers())
def test_equals_the_reference(drawn: tuple[RegionSnapshot, Grower]) -> None:
    """The place is that of the reference, evicts nothing and has more tasks; the columns stay as they are."""
    snapshot, grower = drawn
    region = RegionColumns.of(snapshot)
    free = region.machines.free.copy()
    plan = growth(Planner(region), grower)
    assert plan == reference.growth(snapshot, grower)
    assert (region.machines.free == free).all()
    if plan is not None:
        assert plan.victims == () and grower.tasks < plan.jobs[0].tasks <= grower.request.jobs[0].most_tasks
