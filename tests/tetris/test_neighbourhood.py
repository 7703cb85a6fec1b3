"""Neighbourhoods that CP-SAT solves: they are feasible, keep the constraints, and improve on single moves."""

from itertools import product

import numpy as np
import pytest

from domain.instance import InstanceRegion, PlacedTable, RecurringJob, TetrisInstance, Weights
from research.tetris.generate import generate
from tests.depth import few
from tests.tetris.small import small_instance
from tetris.climb import one_pass
from tetris.columns import Columns
from tetris.homes_model import HomesModel
from tetris.kernels import search
from tetris.neighbourhood import Neighbourhood
from tetris.problem import PlacementProblem

EFFORT_S = 0.1


def _all(problem: PlacementProblem) -> HomesModel:
    return HomesModel(problem, np.arange(len(problem.home), dtype=np.int32))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_breaks_no_more_than_the_plan(seed: int) -> None:
    """Every solution of the model keeps storage, CPU quotas, training at home and the move quota as the plan does."""
    problem = PlacementProblem(Columns.of(small_instance(seed)))
    found, spent_s = _all(problem).solve(seed, EFFORT_S)
    assert found and spent_s <= EFFORT_S * 1.1
    lack_before, _ = problem.excess
    for homes in found:
        problem.restart(np.array(homes, np.int32))
        lack, broken = problem.excess
        assert broken <= 1e-9 and lack <= lack_before + 1e-9


@pytest.mark.parametrize("tables, regions", few([(14, 4), (300, 8), (3000, 12)], 1))
def test_neighbourhoods_of_mast_shape_are_solved_in_their_effort(tables: int, regions: int) -> None:
    """CP-SAT solves each neighbourhood within its effort, at least with the current plan as the solution."""
    problem = PlacementProblem(generate(tables, regions, seed=1))
    one_pass(problem, np.zeros(search.N_TALLY))
    before = problem.excess[0], problem.total
    near = Neighbourhood(problem)
    draw = np.random.default_rng(5)
    for turn in range(3):
        found, _ = HomesModel(problem, near.choose(draw)).solve(turn, EFFORT_S)
        assert found
        assert near.improve(draw) > 0
    assert problem.excess[0] <= before[0] + 1e-9
    assert problem.excess[0] < before[0] or problem.total <= before[1]


def _two_groups_change_places() -> TetrisInstance:
    """Returns two jobs of two tables each, each job in the other's region, with space for one more table per region."""
    regions = InstanceRegion("a", 5.0, {"g": 9.0}), InstanceRegion("b", 5.0, {"h": 9.0})
    tables = tuple(PlacedTable(f"{r}{n}", 2.0, r) for r, n in product("ab", range(2)))
    jobs = (
        RecurringJob("h", "ml", ("a0", "a1"), 1, gpu_type="h", gpu_hours=9.0),
        RecurringJob("g", "ml", ("b0", "b1"), 1, gpu_type="g", gpu_hours=9.0),
    )
    return TetrisInstance(regions, tables, jobs, Weights(storage=0.0))


def test_what_neither_moves_nor_swaps_find() -> None:
    """No single move and no swap of two tables improves the plan; a neighbourhood moves four tables at once."""
    columns = Columns.of(_two_groups_change_places())
    problem = PlacementProblem(columns)
    assert one_pass(problem, np.zeros(search.N_TALLY)) == 0
    Neighbourhood(problem).improve(np.random.default_rng(1))
    assert problem.home.tolist() == [1, 1, 0, 0]


def test_what_is_no_better_is_not_taken() -> None:
    """At the optimum, the plan does not change."""
    columns = Columns.of(_two_groups_change_places())
    problem = PlacementProblem(columns, np.array([1, 1, 0, 0], np.int32))
    total = problem.total
    for seed in range(5):
        Neighbourhood(problem).improve(np.random.default_rng(seed))
        assert problem.home.tolist() == [1, 1, 0, 0] and problem.total == total
