"""Limits on how often something may happen, on a simulated clock."""

import itertools

import pytest

from activities.scheduling.rate_limits import BURST, LoopPace, TimeShare


def _taken(pace: LoopPace, until_s: float) -> list[float]:
    """Returns the times at which tokens are taken if each is taken as early as allowed."""
    out, at_s = [], 100.0
    while at_s < 100.0 + until_s:
        out.append(at_s)
        at_s = pace.take(at_s)
    return out


def test_after_a_quiet_time_some_come_at_the_least_interval_and_then_at_the_rate() -> None:
    """After a pause a burst of tokens comes at intervals of 0.1 s; once the bucket is empty, two come each second."""
    taken = _taken(LoopPace(0.1, 2.0), 60.0)
    gaps = [b - a for a, b in itertools.pairwise(taken)]
    assert all(abs(gap - 0.1) < 1e-6 for gap in gaps[: BURST - 1])
    assert all(abs(gap - 0.5) < 1e-6 for gap in gaps[BURST + 3 :])
    assert 2.0 * 60 <= len(taken) <= 2.0 * 60 + BURST + 1


def test_what_is_rare_never_waits_longer_than_the_interval() -> None:
    """At one token a second with a rate of two a second, each token waits only the minimum interval."""
    pace = LoopPace(0.1, 2.0)
    for second in range(100):
        assert abs(pace.take(float(second)) - second - 0.1) < 1e-6


class _Time:
    """A clock that advances only by simulated work and sleep."""

    def __init__(self) -> None:
        self.now_s, self.slept_s = 1000.0, 0.0

    def sleep(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.slept_s += wait_s


@pytest.mark.parametrize("parts", [1, 20])
def test_rounds_one_after_the_other_use_their_share(parts: int) -> None:
    """Rounds use their share of time, however many pieces each has; pauses between rounds count as rest."""
    clock = _Time()
    share = TimeShare(0.25, 10.0, clock=lambda: clock.now_s, sleep=clock.sleep)
    began_s = clock.now_s
    for _ in range(100):
        share.begin()
        for _ in range(parts):
            with share.spending():
                clock.now_s += 0.2 / parts
    assert abs((clock.now_s - began_s) - (100 * 0.2 / 0.25 - 0.6)) < 1e-6
    slept_s = clock.slept_s
    clock.now_s += 0.6
    share.begin()
    assert abs(clock.slept_s - slept_s) < 1e-6


def test_short_rounds_are_free() -> None:
    """Rounds within the free time never wait; of longer rounds, only the time beyond it counts."""
    clock = _Time()
    share = TimeShare(0.5, 10.0, clock=lambda: clock.now_s, sleep=clock.sleep, free_s=0.1)
    for took_s, slept_s in ((0.1, 0.0), (0.05, 0.0), (0.3, 0.2)):
        before_s = clock.slept_s
        share.begin()
        with share.spending():
            clock.now_s += took_s
        share.begin()
        assert abs(clock.slept_s - before_s - slept_s) < 1e-9


def test_no_round_waits_for_longer_than_it_may() -> None:
    """After a round of a minute, or a failed one, the next waits at most 1 s; with a share of 1 it does not wait."""
    clock = _Time()
    for part, rest_s in ((0.1, 1.0), (1.0, 0.0)):
        share = TimeShare(part, 1.0, clock=lambda: clock.now_s, sleep=clock.sleep)
        slept_s = clock.slept_s
        share.begin()
        with pytest.raises(ValueError, match="failed"), share.spending():
            clock.now_s += 60.0
            raise ValueError("failed")
        share.begin()
        assert abs(clock.slept_s - slept_s - rest_s) < 1e-9
