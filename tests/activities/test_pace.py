"""How often something may happen, on a clock of the test's own."""

import itertools

from activities.pace import BURST, Pace


def _taken(pace: Pace, until_s: float) -> list[float]:
    """When tokens are taken by somebody who takes each as soon as it may be."""
    out, at_s = [], 100.0
    while at_s < 100.0 + until_s:
        out.append(at_s)
        at_s = pace.take(at_s)
    return out


def test_after_a_quiet_time_some_come_at_the_least_interval_and_then_at_the_rate() -> None:
    """A burst at intervals of 0.1 s until the bucket is empty, then two a second."""
    taken = _taken(Pace(0.1, 2.0), 60.0)
    gaps = [b - a for a, b in itertools.pairwise(taken)]
    assert all(abs(gap - 0.1) < 1e-6 for gap in gaps[: BURST - 1])
    assert all(abs(gap - 0.5) < 1e-6 for gap in gaps[BURST + 3 :])
    assert 2.0 * 60 <= len(taken) <= 2.0 * 60 + BURST + 1


def test_what_is_rare_never_waits_longer_than_the_interval() -> None:
    """Once a second at two a second: each may come after the interval."""
    pace = Pace(0.1, 2.0)
    for second in range(100):
        assert abs(pace.take(float(second)) - second - 0.1) < 1e-6
