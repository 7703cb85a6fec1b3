"""The simple simulated annealing that Tetris is compared with; its plans and those of `climb` have one score.

Its loops are used by a benchmark only and are compiled here, which takes longer than the tests.
"""

from collections.abc import Callable

import numpy as np
import pytest

from bench.annealing import anneal
from bench.tetris_dense import dense
from research.tetris.generate import generate
from tests.tetris.small import small_instance
from tetris.climb import climb
from tetris.columns import Columns
from tetris.problem import PlacementProblem


class Ticking:
    """A clock that advances by one second per `looks` calls, so that durations are the same on every machine."""

    def __init__(self, looks: int) -> None:
        self.looks, self.now = looks, 0

    def __call__(self) -> float:
        self.now += 1
        return self.now / self.looks


@pytest.mark.long
@pytest.mark.parametrize("made", [dense, generate], ids=["dense", "MAST's shape"])
def test_it_is_a_rival(made: Callable[[int, int, int], Columns]) -> None:
    """Annealing keeps the start's constraints and finds much better plans than greedy passes."""
    columns = made(60, 4, 1)
    home = anneal(columns, time_s=1.0, clock=Ticking(20))
    problem = PlacementProblem(columns, home)
    lack, broken = problem.excess
    greedy = climb(columns, time_s=0.0)
    assert broken <= 1e-9 and lack <= greedy.lack + 1e-9
    assert problem.total < 0.95 * greedy.total
    assert np.array_equal(home, anneal(columns, time_s=1.0, clock=Ticking(20)))


@pytest.mark.long
def test_climb_is_not_behind() -> None:
    """On an instance with shared tables and tight quotas, `climb` is at most 1% worse than annealing.

    The suite `tetris-annealing` compares both at full size and with equal time.
    """
    columns = dense(120, 5, 1)
    total = PlacementProblem(columns, anneal(columns, time_s=1.0, clock=Ticking(50))).total
    found = climb(columns, time_s=1.0, clock=lambda: 0.0)
    assert found.lack == 0.0 and found.total <= 1.01 * total


def test_what_it_does_not_know_is_refused() -> None:
    """Annealing rejects instances with replicas or a move quota, which it does not support."""
    columns = next(c for c in (Columns.of(small_instance(seed)) for seed in range(20)) if len(c.replica))
    with pytest.raises(ValueError, match="replicas and quotas of moved bytes"):
        anneal(columns, time_s=0.1)
