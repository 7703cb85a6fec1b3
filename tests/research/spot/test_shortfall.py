"""The shortfall after all zones fell: against a count of single seconds, and on small examples."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.capacity import CapacityKind
from research.spot.policies import POLICIES, make_policy
from research.spot.replay import ReplaySettings, ReplicaSpan, replay_spans
from research.spot.shortfall import Shortfall, measure_shortfall
from research.spot.traces import SpotTrace
from services.spot.policies import PolicySettings
from tests.services.spot.strategies import traces, zones_of


def _plain(
    trace: SpotTrace, spans: tuple[ReplicaSpan, ...], rules: ReplaySettings, first_tick: int, ticks: int
) -> Shortfall:
    """Looks at each second, and at each second of the cold start before it. All times are whole seconds."""

    def capacity(second: int) -> list[int]:
        return [counts[first_tick + int(second // trace.gap_s)] for counts in trace.capacity]

    def used_fell(second: int) -> bool:
        before = [one for one in spans if one.kind is CapacityKind.SPOT and one.launched_s < second <= one.ended_s]
        return bool(before) and all(one.preempted and one.ended_s == second for one in before)

    total = first = used = every = 0
    cold_s = int(rules.cold_start_s)
    for second in range(int(ticks * trace.gap_s)):
        ready = [one for one in spans if one.ready_s is not None and one.ready_s <= second < one.ended_s]
        if len(ready) >= rules.target:
            continue
        total += 1
        if second < cold_s:
            first += 1
            continue
        falls = [at for at in range(max(0, second - cold_s + 1), second + 1) if used_fell(at)]
        used += bool(falls)
        every += any(not any(capacity(at)) for at in falls)
    return Shortfall(total, first, used, every)


@pytest.mark.parametrize("name", ["spothedge", "spothedge+", "round-robin", "even-spread", "on-demand"])
@settings(max_examples=40)
@given(traces(most_zones=3), st.integers(0, 45), st.integers(1, 3), st.data())
def test_equals_a_count_of_seconds(name: str, trace: SpotTrace, cold_s: int, target: int, data: st.DataObject) -> None:
    """All four figures; the total is what the availability leaves."""
    assert name in POLICIES
    first = data.draw(st.integers(0, trace.ticks - 1))
    ticks = data.draw(st.integers(1, trace.ticks - first))
    rules = ReplaySettings(target, float(cold_s), 3.0)
    policy = make_policy(name, PolicySettings(trace.zones, 1, retry_s=trace.gap_s))
    result, spans = replay_spans(trace, policy, rules, first, ticks)
    found = measure_shortfall(trace, spans, rules, first, ticks)
    assert found == _plain(trace, spans, rules, first, ticks)
    assert found.total_s == pytest.approx((1 - result.availability) * ticks * trace.gap_s)
    assert found.all_fell_s <= found.used_fell_s <= found.total_s - found.first_s


def _span(number: int, zone: int, launched_s: float, ended_s: float, *, preempted: bool = True) -> ReplicaSpan:
    name = zones_of(3)[zone].name
    return ReplicaSpan(number, CapacityKind.SPOT, name, launched_s, launched_s + 10, ended_s, preempted)


@pytest.mark.parametrize(
    ("third", "seconds"),
    [((1, 1, 1, 1), Shortfall(20, 10, 10, 0)), ((1, 0, 1, 1), Shortfall(20, 10, 10, 10))],
)
def test_used_zones_and_all_zones(third: tuple[int, ...], seconds: Shortfall) -> None:
    """If both used zones fall at 100 s, it depends on the unused zone whether all zones fell."""
    trace = SpotTrace(zones_of(3), 100.0, ((1, 0, 1, 1), (1, 0, 1, 1), third))
    on_demand = ReplicaSpan(4, CapacityKind.ON_DEMAND, None, 100, 110, 400, False)
    spans = (_span(0, 0, 0, 100), _span(1, 1, 0, 100), on_demand)
    assert measure_shortfall(trace, spans, ReplaySettings(1, 10.0), 0, 4) == seconds


def test_a_surviving_replica_is_no_fall() -> None:
    """One zone falls and the other keeps its replica, which the policy ends at the same time."""
    trace = SpotTrace(zones_of(3), 100.0, ((1, 0), (1, 1), (0, 0)))
    spans = (_span(0, 0, 0, 100), _span(1, 1, 0, 100, preempted=False))
    assert measure_shortfall(trace, spans, ReplaySettings(1, 10.0), 0, 2) == Shortfall(110, 10, 0, 0)


def test_sums() -> None:
    """Shortfalls add up field by field; without windows all fields are 0."""
    assert Shortfall.sum_of([Shortfall(5, 1, 2, 1), Shortfall(7, 3, 1, 0)]) == Shortfall(12, 4, 3, 1)
    assert Shortfall.sum_of([]) == Shortfall()
