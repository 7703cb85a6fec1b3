"""The simulation in the cadence bench matches its documentation."""

from math import inf

import numpy as np
import pytest

from bench import cadence
from bench.cadence import LIVE_STEP_S, STEP_S, best, case, fixed, live, time_per_work, up_times, without_saves


def by_hand(up_s: list[float], save_s: float, steps: int) -> float:
    """Returns the time per work, computed step by step and save by save."""
    done_s = 0.0
    for up in up_s:
        now_s, saved_s = 0.0, 0.0
        while True:
            now_s += steps * STEP_S + save_s
            if now_s > up:
                break
            saved_s += steps * STEP_S
        done_s += saved_s
    return sum(up_s) / done_s if done_s else inf


@pytest.mark.parametrize("steps", [1, 3, 40, 10_000])
def test_time_per_work_is_that_of_a_plain_walk(steps: int) -> None:
    """The closed form over up-times equals the step-by-step simulation."""
    up_s = up_times(np.random.default_rng(3), 600.0, 1.0, 200)
    assert time_per_work(up_s, 2.5, steps) == pytest.approx(by_hand(list(up_s), 2.5, steps))


@pytest.mark.parametrize("shape", [1.0, cadence.SHAPE])
def test_up_times_have_their_mean(shape: float) -> None:
    """Up-times have the given mean for any shape, and are equal for equal seeds."""
    up_s = up_times(np.random.default_rng(1), 500.0, shape, 100_000)
    assert up_s.mean() == pytest.approx(500, rel=0.02)
    assert np.array_equal(up_s, up_times(np.random.default_rng(1), 500.0, shape, 100_000))


def test_the_search_finds_the_best_of_all() -> None:
    """The search's interval is as good as any interval up to four times as long, within the error of its grid."""
    up_s = up_times(np.random.default_rng(2), 1200.0, 1.0, 5000)
    found, steps = best(lambda k: time_per_work(up_s, 30.0, k), 124)
    costs = {k: time_per_work(up_s, 30.0, k) for k in range(1, 500)}
    assert costs[steps] == found <= 1.0005 * min(costs.values())


def test_without_saves_a_job_must_be_done_in_one_go() -> None:
    """Without saves, a job must finish within one up-time; shorter up-times are lost.

    Of 5, 12 and 7 s, one is long enough for 10 s of work and none for 20 s.
    """
    up_s = np.array([5.0, 12.0, 7.0])
    assert without_saves(up_s, 10.0) == pytest.approx((5 + 7 + 10) / 10)
    assert without_saves(up_s, 20.0) == inf


def test_a_round_of_a_line() -> None:
    """The best interval is no worse than the chosen one, ten minutes and thirty minutes."""
    found = case(up_times(np.random.default_rng(4), 10_800.0, 1.0, 2000), 10_800.0, 30.0)
    assert found["chosen_s"] == 804 and found["best_h"] <= found["chosen_h"]
    assert found["best_h"] <= min(found["ten_minutes_h"], found["thirty_minutes_h"]) < found["none_h"]


def test_the_live_one_loses_what_it_does_not_know_and_no_more() -> None:
    """On the same failures, the live cadence is at most a tenth worse than the fixed interval of the formula."""
    up_s = up_times(np.random.default_rng(5), cadence.LIVE_MTBF_S, 1.0, 100)
    by_formula = fixed(np.random.default_rng(6), up_s, int(804 / LIVE_STEP_S))
    assert 1 < by_formula < inf
    assert live(np.random.default_rng(6), up_s) <= 1.1 * by_formula
