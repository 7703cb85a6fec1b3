"""Reservations: the earliest start equals that of a plain reference, which tries one time after the other."""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.priority import OVER_QUOTA_RANK
from domain.scheduling import PlacementRequest, RegionSnapshot, RunningWorkload
from reference import bids as reference
from reference.packing import free_now, release
from rms.gang import Planner
from rms.machines import shift
from rms.region import RegionColumns
from rms.reserve import (
    Reservation,
    available_from_s,
    known_ends_s,
    renew,
    reserve,
    reserve_unknown,
    withheld,
    without_withheld,
)
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


def _fits(snapshot: RegionSnapshot, request: PlacementRequest, gone: Set[str], taken: Sequence[Reservation]) -> bool:
    """Returns whether the request fits without evictions after `gone` have left and without the amounts in `taken`."""
    free = {
        machine: np.array(amounts)
        for machine, amounts in release(free_now(snapshot), [w for w in snapshot.running if w.id in gone]).items()
    }
    for made in taken:
        for machine, need in made.needs.items():
            free[machine] -= need
    left = {id_: [max(0, int(amount)) for amount in amounts] for id_, amounts in free.items()}
    machines = tuple(
        replace(m, free_gpus=left[m.id][0], free_cpus_milli=left[m.id][1], free_memory_bytes=left[m.id][2])
        for m in snapshot.machines
    )
    later = replace(snapshot, machines=machines, running=())
    return reference.bid(later, replace(request, rank=OVER_QUOTA_RANK, may_not_evict=frozenset())).plan is not None


def _start_s(
    snapshot: RegionSnapshot, request: PlacementRequest, taken: Sequence[Reservation] = (), *, known: bool
) -> float | None:
    """Returns the earliest time at which the request fits without evictions; None: never. The plain version."""
    at_s = {one.id: _available_s(one, request, snapshot.now_s, known=known) for one in snapshot.running}
    for time_s in sorted({one for one in at_s.values() if one < inf}):
        if _fits(snapshot, request, {id_ for id_, from_s in at_s.items() if from_s <= time_s}, taken):
            return time_s
    return None


def _busy(snapshot: RegionSnapshot, request: PlacementRequest) -> dict[str, int]:
    """Returns the GPUs by machine (thousandths of cores, for a gang without GPUs) of holders with unknown ends."""
    busy = {m.id: 0 for m in snapshot.machines}
    with_gpus = any(job.gpus_per_task for job in request.jobs)
    for one in snapshot.running:
        if _available_s(one, request, snapshot.now_s, known=True) == inf:
            for h in one.holdings:
                busy[h.machine] += h.gpus if with_gpus else h.cpus_milli
    return busy


def _least_busy(snapshot: RegionSnapshot, request: PlacementRequest, taken: Sequence[Reservation]) -> int | None:
    """Returns the smallest `_busy` limit with which the gang fits into the machines within it; None: it never fits."""
    busy = _busy(snapshot, request)
    for level in sorted(set(busy.values())):
        inside = replace(snapshot, machines=tuple(m for m in snapshot.machines if busy[m.id] <= level))
        others = [replace(one, needs={m: n for m, n in one.needs.items() if busy[m] <= level}) for one in taken]
        if _fits(inside, request, {one.id for one in snapshot.running}, others):
            return level
    return None


def _taken(seed: int, region: RegionColumns) -> list[Reservation]:
    """Returns the reservation of another gang, which was drawn for another region, if it can have one here."""
    other = replace(_case(seed + 1)[1], workload="other", spread=None)
    planner = Planner(region)
    made = reserve(planner, other, available_from_s(planner, other, known_ends_s(region)))
    return [] if made is None else [made]


def _reserve(
    region: RegionColumns, request: PlacementRequest, taken: Sequence[Reservation] = (), *, known: bool
) -> Reservation | None:
    planner = Planner(region)
    ends_s = known_ends_s(region) if known else None
    return reserve(planner, request, available_from_s(planner, request, ends_s), taken)


@contextmanager
def _unchanged(region: RegionColumns) -> Iterator[None]:
    """Checks that the region is after the block as it was before."""
    free, state = region.machines.free.copy(), region.state
    yield
    assert (region.machines.free == free).all()
    assert region.state == state


@settings(PROPERTY, max_examples=examples(300))
@given(seed=st.integers(0, 10**6), known=st.booleans())
def test_the_start_is_that_of_the_plain_reference(seed: int, known: bool) -> None:
    """The start is the earliest time at which the gang fits, and the region is unchanged afterwards."""
    snapshot, request = _case(seed)
    region = RegionColumns.of(snapshot)
    taken = _taken(seed, region)
    with _unchanged(region):
        made = _reserve(region, request, taken, known=known)
    assert (None if made is None else made.starts_at_s) == _start_s(snapshot, request, taken, known=known)


@settings(PROPERTY, max_examples=examples(300))
@given(seed=st.integers(0, 10**6))
def test_a_reservation_without_a_known_start_is_on_the_least_busy_machines(seed: int) -> None:
    """The machines of such a reservation are the least busy ones with which the gang fits, by the plain reference."""
    snapshot, request = _case(seed)
    region = RegionColumns.of(snapshot)
    taken, planner = _taken(seed, region), Planner(region)
    with _unchanged(region):
        made = reserve_unknown(planner, request, available_from_s(planner, request, known_ends_s(region)), taken)
    busy = _busy(snapshot, request)
    most = None if made is None else max(busy[machine] for machine in made.needs)
    assert most == _least_busy(snapshot, request, taken)


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
