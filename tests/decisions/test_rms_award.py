"""A region right after an award: no resource is allocated twice, for any number of awards in a pass."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.scheduling import PlacementRequest, Plan, RegionSnapshot
from rms.bid import bid
from tests.decisions.after_award import after_award
from tests.depth import examples

from . import PROPERTY
from .fleets import crowded, gpu_job, machine, region, regions, request, requests, running


def _sums(snapshot: RegionSnapshot) -> Counter[tuple[str, str]]:
    """Returns the sum of free and held resources by machine and resource."""
    total: Counter[tuple[str, str]] = Counter()
    for m in snapshot.machines:
        total[m.id, "gpus"] += m.free_gpus
        total[m.id, "cpus"] += m.free_cpus_milli
        total[m.id, "memory"] += m.free_memory_bytes
    listed = {m.id for m in snapshot.machines}
    for holding in (h for w in snapshot.running for h in w.holdings if h.machine in listed):
        total[holding.machine, "gpus"] += holding.gpus
        total[holding.machine, "cpus"] += holding.cpus_milli
        total[holding.machine, "memory"] += holding.memory_bytes
    return total


def _nothing_overdrawn(snapshot: RegionSnapshot) -> bool:
    return all(min(m.free_gpus, m.free_cpus_milli, m.free_memory_bytes) >= 0 for m in snapshot.machines)


@settings(PROPERTY, max_examples=examples(200))
@given(regions(), st.lists(requests(), min_size=2, max_size=4))
def test_a_tick_of_awards_gives_nothing_out_twice(snapshot: RegionSnapshot, asking: list[PlacementRequest]) -> None:
    """Bids after earlier awards of a pass overdraw no machine and never evict the same workload twice."""
    _check_tick(snapshot, asking)


@settings(PROPERTY, max_examples=examples(200))
@given(st.integers(0, 2**32))
def test_a_tick_of_awards_in_a_crowd_gives_nothing_out_twice(seed: int) -> None:
    """The same holds if every award needs victims."""
    snapshot, _ = crowded(seed)
    _check_tick(snapshot, [crowded(seed + number)[1] for number in range(3)])


def _check_tick(snapshot: RegionSnapshot, asking: list[PlacementRequest]) -> None:
    before, evicted = _sums(snapshot), set[str]()
    for number, made in enumerate(asking):
        request_ = replace(made, workload=f"new{number}")
        plan = bid(snapshot, request_).plan
        if plan is None:
            continue
        assert not evicted & set(plan.victims)
        evicted |= set(plan.victims)
        snapshot = after_award(snapshot, plan, request_)
        assert _nothing_overdrawn(snapshot)
        assert _sums(snapshot) == before
        assert {w.id for w in snapshot.running if not w.evictable} >= evicted | {plan.workload}


def _awarded() -> tuple[RegionSnapshot, Plan, PlacementRequest]:
    """Returns a plan that uses two free GPUs and six of the eight GPUs of a victim."""
    snapshot = region([machine("m", 12, used=10)], [running("victim", ("m", 8)), running("other", ("m", 2), rank=1)])
    asking = request(gpu_job(8, 1), rank=2)
    plan = bid(snapshot, asking).plan
    assert plan is not None and plan.victims == ("victim",)
    return snapshot, plan, asking


def test_free_first_and_the_surplus_stays_with_the_victim() -> None:
    """Free slots are used first; the victim keeps its slots, and no other workload can get its surplus."""
    snapshot, plan, asking = _awarded()
    after = after_award(snapshot, plan, asking)
    assert [m.free_gpus for m in after.machines] == [0]
    assert {w.id: (w.gpus, w.evictable) for w in after.running} == {
        "victim": (8, False),
        "other": (2, True),
        "new": (2, False),
    }
    assert bid(after, replace(asking, workload="next", jobs=(gpu_job(1, 1),))).plan is None


def test_the_snapshot_itself_is_left_alone() -> None:
    """`after_award` does not change the given snapshot."""
    snapshot, plan, asking = _awarded()
    copy = replace(snapshot)
    after_award(snapshot, plan, asking)
    assert snapshot == copy


def test_a_plan_that_does_not_belong_is_an_error() -> None:
    """Plans for other workloads, of partial gangs, on unknown or full machines, or with wrong victims are rejected."""
    snapshot, plan, asking = _awarded()
    (placement,) = plan.jobs
    wrong: list[tuple[str, RegionSnapshot, Plan, PlacementRequest]] = [
        ("not for 'someone'", snapshot, plan, replace(asking, workload="someone")),
        ("plan places the jobs", snapshot, replace(plan, jobs=()), asking),
        ("7 of 8 tasks", snapshot, replace(plan, jobs=(replace(placement, machines=(("m", 7),)),)), asking),
        ("uses machine 'x'", snapshot, replace(plan, jobs=(replace(placement, machines=(("x", 8),)),)), asking),
        ("victim 'other'", snapshot, replace(plan, victims=("other",)), asking),
        ("2 GPUs free and 0 held", snapshot, replace(plan, victims=()), asking),
        ("victim 'victim'", after_award(snapshot, plan, asking), plan, asking),
    ]
    for message, where, given_plan, given_request in wrong:
        with pytest.raises(ValueError, match=message):
            after_award(where, given_plan, given_request)
