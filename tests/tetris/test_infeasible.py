"""The search where the start violates a limit: plans within 3 % of the proved optimum, for every seed.

Effort is counted, and no clock is read, so the plans do not depend on the machine.
"""

from pathlib import Path

import pytest

from bench.infeasible import infeasible
from bench.tetris_infeasible import SEARCH_S, SEEDS
from tetris.climb import climb
from tetris.columns import Columns
from tetris.documents import read_instance

WORST = 0.03
FULL = 6.503831404701919
"""The optimum of `full_region.json`, by `mizzen tetris solve --method exact`."""
OPTIMA = {
    0: (0.0, 5.1492076919528404),
    1: (0.0, 7.000665500972577),
    2: (0.0, 9.023743098733275),
    3: (0.0, 11.404903356135884),
    4: (0.0, 7.442519988934249),
    5: (0.040391863677151876, 5.808268278461374),
    6: (0.0, 6.548708976482797),
    7: (0.00237472277622717, 6.848118766170666),
    8: (0.0495458298926507, 12.81579254408524),
    9: (0.0, 6.1287902689346705),
}
"""Excess and total of the optimum by the number of the instance, which `make bench SUITE=tetris-infeasible` prints."""


def never() -> float:
    """A clock that stands still."""
    return 0.0


@pytest.mark.rotating
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 20), marks=pytest.mark.long)], ids=["few", "all"])
def test_a_region_that_is_too_full(seeds: range) -> None:
    """An instance of 10 tables on which a search with too little time ends 9 % above the optimum."""
    columns = Columns.of(read_instance((Path(__file__).parent / "full_region.json").read_bytes()))
    for seed in seeds:
        found = climb(columns, time_s=10.0, seed=seed, clock=never)
        assert found.lack == 0.0
        assert found.total <= (1 + WORST) * FULL


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, SEEDS), marks=pytest.mark.long)], ids=["few", "all"])
@pytest.mark.parametrize("number", OPTIMA)
def test_random_instances(number: int, seeds: range) -> None:
    """Ten of the instances of the benchmark."""
    columns, (excess, total) = infeasible(number), OPTIMA[number]
    for seed in seeds:
        found = climb(columns, time_s=SEARCH_S, seed=seed, clock=never)
        assert found.lack <= excess + 1e-9
        assert found.total <= (1 + WORST) * total
