"""The budget of a search: a number of evaluations, and a limit of CPU time."""

import time

import numpy as np
import pytest

from tests.tetris.small import small_instance
from tetris.budget import EVALUATIONS_PER_S, OVERRUN, Budget, Cooling
from tetris.climb import SearchStep, climb
from tetris.columns import Columns


def never() -> float:
    """A clock that stands still."""
    return 0.0


class Ticking:
    """A clock that advances by `tick_s` at each call."""

    def __init__(self, tick_s: float) -> None:
        self.tick_s = tick_s
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def test_effort_or_time_whichever_is_more() -> None:
    """A budget is used up when its evaluations are used up or its time is over, whichever comes first."""
    still = Budget(2.0, lambda: 5.0)
    assert still.part(EVALUATIONS_PER_S) == pytest.approx(0.5) and still.part_of_time == 0.0
    assert still.part(2 * EVALUATIONS_PER_S) == 1.0 and still.left_s == pytest.approx(2.0 * OVERRUN)
    now = [0.0]
    short = Budget(10.0, lambda: now[0], ends_s=4.0)
    now[0] = 3.0
    assert short.left(0.0) == pytest.approx(2.5 * EVALUATIONS_PER_S)
    assert short.part(0.0) == pytest.approx(0.75) and short.left_s == pytest.approx(1.0)
    now[0] = 9.0
    assert short.part(0.0) > 1.0 and short.left_s == 0.0
    assert Budget(0.0, lambda: 5.0).part(0.0) == 1.0
    assert Budget(10.0, lambda: 5.0, ends_s=4.0).part(0.0) == 1.0


@pytest.mark.parametrize("tables", [12, 100])
def test_a_search_ends_by_the_clock(tables: int) -> None:
    """A search with a slow clock still ends in time: it reads the clock rarely, and its plan is complete.

    Each reading takes a tenth of a second here, also in the first passes of the search.
    """
    columns = Columns.of(small_instance(5, tables, 5, 3 * tables))
    clock = Ticking(0.1)
    found = climb(columns, time_s=5.0, clock=clock)
    assert clock.now_s - 100.0 < 5.0 * OVERRUN + 2.0
    assert found.total <= climb(columns, time_s=0.0).total + 1e-9
    late = Ticking(0.1)
    climb(columns, time_s=10.0, clock=late, ends_s=101.0)
    assert late.now_s < 104.0


def test_time_in_which_other_programs_run_does_not_count() -> None:
    """A search that waits for the CPU, here because it sleeps, makes as many evaluations as one that does not."""
    columns = Columns.of(small_instance(5, 60, 5, 180))
    waits = iter([1.0])

    def wait(_: SearchStep) -> None:
        time.sleep(next(waits, 0.0))

    waited = climb(columns, time_s=0.3, proves=False, listener=wait)
    whole = climb(columns, time_s=0.3, proves=False, clock=never)
    assert waited.evaluations > 0.5 * whole.evaluations


def test_a_walk_cools_all_the_time() -> None:
    """Temperatures fall during the whole walk, to below 1/20 of `cold`, and are proportional to the mean change."""
    heats = Cooling.of_long_walk(0.05)
    at = [heats.at(part) for part in np.linspace(0.0, 1.0, 50)]
    assert at == sorted(at, reverse=True) and at[0] == heats.hot and at[-1] < heats.cold / 20
    assert Cooling.of_long_walk(0.1).hot == pytest.approx(2 * heats.hot)
