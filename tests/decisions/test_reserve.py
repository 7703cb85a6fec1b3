"""Reservations: the earliest start equals that of a plain reference, which tries one time after the other."""

from dataclasses import replace
from math import inf
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from domain.priority import OVER_QUOTA_RANK
from domain.scheduling import PlacementRequest, RegionSnapshot, RunningWorkload
from reference import bids as reference
from rms.gang import Planner
from rms.machines import shift
from rms.region import RegionColumns
from rms.reserve import Reservation, available_from_s, known_ends_s, renew, reserve, withheld, without_withheld
from tests.depth import examples

from . import PROPERTY
from .fleets import crowded


def _case(seed: int) -> tuple[RegionSnapshot, PlacementRequest]:
    """Returns a crowded region whose holders are protected until, or end at, random times."""
    snapshot, request = crowded(seed)
    rng = Random(seed)
    holders = [
        replace(
            one,
            evictable=rng.random() < 0.9,
            protected_until_s=snapshot.now_s + rng.choice((-10.0, 30.0, 60.0, 90.0, 120.0)),
            ends_by_s=snapshot.now_s + rng.choice((20.0, 75.0, 500.0, inf, inf)),
        )
        for one in snapshot.running
    ]
    return replace(snapshot, running=tuple(holders)), replace(request, avoids=frozenset(), displaces=frozenset())


def _available_s(holder: RunningWorkload, request: PlacementRequest, now_s: float, *, known: bool) -> float:
    """Returns when the resources of a holder are available; infinity: not known. The plain version."""
    times_s = [max(now_s, holder.ends_by_s)] if known else []
    if holder.rank > request.rank and holder.id not in request.may_not_evict:
        times_s.append(max(now_s, holder.protected_until_s) if holder.evictable else now_s)
    return min(times_s, default=inf)


def _start_s(snapshot: RegionSnapshot, request: PlacementRequest, *, known: bool) -> float | None:
    """Returns the earliest time at which the request fits without evictions; None: never. The plain version."""
    at_s = {one.id: _available_s(one, request, snapshot.now_s, known=known) for one in snapshot.running}
    for time_s in sorted({one for one in at_s.values() if one < inf}):
        free = {m.id: [m.free_gpus, m.free_cpus_milli, m.free_memory_bytes] for m in snapshot.machines}
        for one in snapshot.running:
            for h in one.holdings if at_s[one.id] <= time_s else ():
                if h.machine in free:
                    amounts = (h.gpus, h.cpus_milli, h.memory_bytes)
                    free[h.machine] = [a + b for a, b in zip(free[h.machine], amounts, strict=True)]
        machines = tuple(
            replace(m, free_gpus=free[m.id][0], free_cpus_milli=free[m.id][1], free_memory_bytes=free[m.id][2])
            for m in snapshot.machines
        )
        later = replace(snapshot, machines=machines, running=())
        if reference.bid(later, replace(request, rank=OVER_QUOTA_RANK, may_not_evict=frozenset())).plan is not None:
            return time_s
    return None


def _reserve(region: RegionColumns, request: PlacementRequest, *, known: bool) -> Reservation | None:
    planner = Planner(region)
    ends_s = known_ends_s(region) if known else None
    return reserve(planner, request, available_from_s(planner, request, ends_s))


@settings(PROPERTY, max_examples=examples(300))
@given(seed=st.integers(0, 10**6), known=st.booleans())
def test_the_start_is_that_of_the_plain_reference(seed: int, known: bool) -> None:
    """The start is the earliest time at which the gang fits, and the region is unchanged afterwards."""
    snapshot, request = _case(seed)
    region = RegionColumns.of(snapshot)
    before = region.machines.free.copy(), region.state
    made = _reserve(region, request, known=known)
    assert (None if made is None else made.starts_at_s) == _start_s(snapshot, request, known=known)
    assert (region.machines.free == before[0]).all()
    assert region.state == before[1]


@settings(PROPERTY, max_examples=examples(200))
@given(seed=st.integers(0, 10**6))
def test_a_reservation_is_renewed_with_the_same_or_an_earlier_start(seed: int) -> None:
    """As long as nothing else takes its resources, a reservation keeps its machines and starts no later."""
    snapshot, request = _case(seed)
    region = RegionColumns.of(snapshot)
    made = _reserve(region, request, known=True)
    if made is None:
        return
    before = region.machines.free.copy()
    with without_withheld(region, withheld(region, [made])):
        assert (region.machines.free >= before.clip(max=0)).all(), "no more is withheld than is free"
    assert (region.machines.free == before).all()
    rng = Random(seed)
    for one in snapshot.running:
        if rng.random() < 0.3:
            region.drop_running(one.id)
            for h in one.holdings:
                if (row := region.row(h.machine)) is not None:
                    shift(region.machines, row, h.gpus, h.cpus_milli, h.memory_bytes)
    region.refresh(snapshot.now_s)
    planner = Planner(region)
    available_s = available_from_s(planner, request, known_ends_s(region))
    again = renew(planner, request, available_s, made.needs, made.sources)
    assert again is not None
    assert again.starts_at_s <= made.starts_at_s
    assert again.needs.keys() == made.needs.keys()
