"""A region's columns: changes in any order equal a snapshot, and awards take effect immediately."""

from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.scheduling import PlacementRequest, RegionSnapshot
from reference import bids as reference
from rms.award import Award, award, leave, revoke
from rms.bid import bid_in
from rms.gang import Planner
from rms.region import RegionColumns
from tests.decisions.after_award import after_award
from tests.depth import examples

from . import PROPERTY
from .fleets import crowded, regions, requests


def _turn_into(region: RegionColumns, now: RegionSnapshot, was: RegionSnapshot | None, rng: Random) -> None:
    """Applies to a region, in random order, the changes from one snapshot to another; the two may differ completely."""
    news = [partial(region.put_machine, m) for m in now.machines]
    news += [partial(region.put_running, w) for w in now.running]
    if was is not None:
        there, live = {m.id for m in now.machines}, {w.id for w in now.running}
        news += [partial(region.drop_machine, m.id) for m in was.machines if m.id not in there]
        news += [partial(region.drop_running, w.id) for w in was.running if w.id not in live]
    rng.shuffle(news)
    for tell in news:
        tell()
    region.refresh(now.now_s)


@settings(PROPERTY, max_examples=examples(200))
@given(st.lists(st.tuples(regions(), requests()), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_changes_lead_where_a_snapshot_does(steps: list[tuple[RegionSnapshot, PlacementRequest]], rng: Random) -> None:
    """After any changes, a region's bid equals the reference's; a bid does not change the region."""
    region = RegionColumns("here")
    planner = Planner(region)
    was = None
    for now, request in steps:
        _turn_into(region, now, was, rng)
        was = now
        for _ in range(2):
            assert bid_in(planner, request) == reference.bid(now, request)


@settings(PROPERTY, max_examples=examples(200))
@given(st.integers(0, 2**32))
def test_an_award_shows_in_the_next_bid(seed: int) -> None:
    """Consecutive bids in one region, each after the awards before it, equal those on snapshots after these awards."""
    snapshot, _ = crowded(seed)
    region = RegionColumns.of(snapshot)
    planner = Planner(region)
    for number in range(4):
        request = replace(crowded(seed + number)[1], workload=f"new{number}")
        answer = bid_in(planner, request)
        assert answer == reference.bid(snapshot, request)
        if answer.plan is not None:
            award(region, answer.plan, request)
            snapshot = after_award(snapshot, answer.plan, request)
    region.refresh(snapshot.now_s + 5)
    later = replace(snapshot, now_s=snapshot.now_s + 5)
    assert bid_in(planner, request) == reference.bid(later, request)


@settings(PROPERTY, max_examples=examples(100))
@given(st.integers(0, 2**32))
def test_a_protected_workload_is_spared_until_its_time(seed: int) -> None:
    """A workload that started recently is not evicted before the end of its minimum runtime."""
    snapshot, request = crowded(seed)
    rng = Random(seed)
    times = (900.0, 1000.0, 1000.5, 2000.0)
    running = tuple(replace(w, protected_until_s=rng.choice(times)) for w in snapshot.running)
    region = RegionColumns("here")
    for machine in snapshot.machines:
        region.put_machine(machine)
    for workload in running:
        region.put_running(workload)
    planner = Planner(region)
    for now_s in (1000.0, 1500.0, 3000.0):
        region.refresh(now_s)
        now = replace(snapshot, running=running, now_s=now_s)
        assert bid_in(planner, request) == reference.bid(now, request)


def _awards(seed: int) -> tuple[RegionColumns, RegionSnapshot, list[Award]]:
    """Returns a region after up to four awards, the snapshot before them, and the awards."""
    snapshot, _ = crowded(seed)
    region = RegionColumns.of(snapshot)
    planner = Planner(region)
    given = []
    for number in range(4):
        request = replace(crowded(seed + number)[1], workload=f"new{number}")
        answer = bid_in(planner, request)
        if answer.plan is not None:
            given.append(award(region, answer.plan, request))
    return region, snapshot, given


@settings(PROPERTY, max_examples=examples(200))
@given(st.integers(0, 2**32))
def test_a_revoked_award_leaves_no_trace(seed: int) -> None:
    """After all awards are revoked, a region bids as before the first award."""
    region, snapshot, given = _awards(seed)
    for one in reversed(given):
        revoke(region, one)
    for number in range(2):
        request = crowded(seed + number)[1]
        assert bid_in(Planner(region), request) == reference.bid(snapshot, request)


def _in_use(region: RegionColumns) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Returns the sum of free and held resources by machine, shape (3, machines)."""
    out = region.machines.free.copy()
    for workload in region.running_workloads():
        for h in workload.holdings:
            row = region.row(h.machine)
            if row is not None:
                out[:, row] += (h.gpus, h.cpus_milli, h.memory_bytes)
    return out


@settings(PROPERTY, max_examples=examples(200))
@given(st.integers(0, 2**32))
def test_whoever_leaves_gives_up_all_and_promises_are_kept(seed: int) -> None:
    """In any order of leaving, resources are conserved; an award whose victims have left holds its whole plan."""
    region, snapshot, given = _awards(seed)
    whole = _in_use(RegionColumns.of(snapshot))
    asked = {f"new{number}": crowded(seed + number)[1] for number in range(4)}
    rng = Random(seed)
    leaving = [w.id for w in region.running_workloads() if not w.id.startswith("new") and rng.random() < 0.8]
    leaving += [one.plan.workload for one in given if rng.random() < 0.3]
    rng.shuffle(leaving)
    for id_ in leaving:
        leave(region, id_)
        assert (_in_use(region) == whole).all()
    for one in given:
        if one.plan.workload not in leaving and {v.id for v in one.victims} <= set(leaving):
            held = sum(h.gpus for h in region.workload(one.plan.workload).holdings)
            assert held == sum(job.gpus for job in asked[one.plan.workload].jobs)
