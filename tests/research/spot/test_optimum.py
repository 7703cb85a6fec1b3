"""The omniscient optimum: against every policy, and on examples that can be computed by hand."""

import os
import signal
from dataclasses import replace
from random import Random
from threading import Event, Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from research.spot.optimum import OptimumError, solve_optimum
from research.spot.policies import POLICIES, make_policy
from research.spot.replay import ReplaySettings, replay_spans
from research.spot.traces import SpotTrace
from services.spot.policies import PolicySettings
from tests.services.spot.strategies import traces, zones_of


@settings(max_examples=15)
@given(traces(most_zones=3), st.integers(1, 5), st.integers(0, 6), st.integers(1, 2), st.sampled_from(sorted(POLICIES)))
def test_no_policy_is_cheaper(trace: SpotTrace, gap_s: int, cold_s: int, target: int, name: str) -> None:
    """At the availability that a policy reaches, the optimum costs at most as much; the aggregate one even less."""
    # Few and short ticks, because the model has a variable for each second.
    trace = replace(trace, gap_s=float(gap_s), capacity=tuple(counts[:6] for counts in trace.capacity))
    rules = ReplaySettings(target, float(cold_s), 3.0)
    policy = make_policy(name, PolicySettings(trace.zones, 1, retry_s=trace.gap_s))
    found = replay_spans(trace, policy, rules, 0, trace.ticks)[0]
    costs = []
    for by_zone in (True, False):
        best = solve_optimum(
            trace, rules, 0, trace.ticks, found.availability, by_zone=by_zone, step_s=1.0, gap=0.0, limit_s=20.0
        )
        assert best.availability >= found.availability - 1e-6
        assert best.gap <= 1e-6
        costs.append(best.cost)
    assert costs[1] - 1e-6 <= costs[0] <= found.cost + 1e-6


def test_examples() -> None:
    """The replica that replaces a lost one is billed during its cold start, and aggregate readiness avoids that."""
    trace = SpotTrace(zones_of(2), 100.0, ((1, 1, 0), (0, 1, 1)))
    rules = ReplaySettings(1, 40.0, 2.0)
    by_zone = solve_optimum(trace, rules, 0, 3, 260 / 300, gap=0.0)
    # 200 s in the first zone, and 140 s in the second one.
    assert (by_zone.cost, by_zone.availability) == (pytest.approx(340 / 600), pytest.approx(260 / 300))
    assert solve_optimum(trace, rules, 0, 3, 260 / 300, by_zone=False, gap=0.0).cost == pytest.approx(300 / 600)
    assert solve_optimum(trace, rules, 0, 3, 0.0).cost == 0
    # Without spot capacity, an on-demand replica is needed during the whole window.
    none = SpotTrace(zones_of(1), 100.0, ((0, 0, 0),))
    assert solve_optimum(none, rules, 0, 3, 260 / 300).cost == pytest.approx(1)
    with pytest.raises(OptimumError, match=r"an availability of 1 was found.*need 40 s"):
        solve_optimum(trace, rules, 0, 3, 1.0)
    with pytest.raises(ValueError, match="the trace has 3 ticks"):
        solve_optimum(trace, rules, 1, 3, 0.5)


def test_signals_do_not_stop_the_solver(capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C reaches the program's own handler; the solver still finds the optimum."""
    random = Random(0)
    counts = tuple(tuple(random.randint(0, 3) for _ in range(60)) for _ in range(3))
    trace, rules = SpotTrace(zones_of(3), 300.0, counts), ReplaySettings()
    wanted = solve_optimum(trace, rules, 0, 60, 0.95)
    seen: list[int] = []
    solved = Event()

    def press() -> None:
        while not solved.wait(0.001):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    thread = Thread(target=press)
    try:
        thread.start()
        found = solve_optimum(trace, rules, 0, 60, 0.95)
    finally:
        solved.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert found == wanted
    assert seen
    assert "CTRL-C" not in capfd.readouterr().out
