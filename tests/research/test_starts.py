"""The measurement of expected starts: a small replay, and the interval score by example."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.experiments.start_intervals import MeasuredWait, StartObserver, interval_score, scenario, scores
from research.traces.rows import TraceRow


def test_interval_score() -> None:
    """Within the interval the score is its length; outside, each second costs ten more."""
    waited, low, high = np.array([5.0, 1.0, 12.0]), np.full(3, 2.0), np.full(3, 9.0)
    assert interval_score(waited, low, high).tolist() == [7.0, 17.0, 37.0]


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_interval_score_is_that_of_both_quantiles(waited_s: float, low_s: float, length_s: float) -> None:
    """The score is 2 / alpha times the sum of the quantile losses at alpha / 2 and 1 - alpha / 2."""
    losses = [
        max(level * (waited_s - end_s), (level - 1) * (waited_s - end_s))
        for level, end_s in ((0.1, low_s), (0.9, low_s + length_s))
    ]
    (found,) = interval_score(np.array([waited_s]), np.array([low_s]), np.array([low_s + length_s]))
    assert found == pytest.approx(10 * sum(losses), abs=1e-6)


def test_only_the_second_half_is_scored() -> None:
    """The fixed interval is learned from the first half, and does not contain the longer waits of the second."""
    waits = [MeasuredWait(float(k), 100.0 if k < 10 else 200.0, 150.0, 250.0, 1, 1) for k in range(20)]
    found = scores(waits)
    assert (found.waits, found.coverage, found.fixed_coverage) == (10, 1.0, 0.0)
    assert (found.score_s, found.fixed_score_s) == (100.0, 1000.0)
    assert found.ratio == pytest.approx(0.1)


def test_a_replay_forecasts_every_wait() -> None:
    """Workloads of an hour arrive faster than they end: each that waits has an interval and starts."""
    rows = [
        TraceRow(f"w{k}", 60.0 * k, "t", 1, 3600.0, 1, 8, ("v100",), 1000, 1 << 30, ())
        for k in range(40)
    ]  # fmt: skip
    found = StartObserver(scenario(rows)).go()
    assert len(found) > 10
    assert all(w.low_s <= w.high_s and w.waited_s >= 0 for w in found)
