"""Neighbourhoods that CP-SAT solves: they are solved, keep what the plan keeps, and find what single moves do not."""

from itertools import product

import numpy as np
import pytest

from domain.instance import Instance, Job, Region, Table, Weights
from tests.tetris.small import small_instance
from tetris.climb import one_pass
from tetris.columns import Columns
from tetris.generate import generate
from tetris.homes_model import HomesModel
from tetris.kernels import search
from tetris.neighbourhood import Neighbourhood
from tetris.problem import Problem

EFFORT_S = 0.1


def _all(problem: Problem) -> HomesModel:
    return HomesModel(problem, np.arange(len(problem.home), dtype=np.int32))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_breaks_no_more_than_the_plan(seed: int) -> None:
    """Storage, CPU quotas, hours at home and moved bytes: whatever the model offers may be chosen."""
    problem = Problem(Columns.of(small_instance(seed)))
    found, spent_s = _all(problem).solve(seed, EFFORT_S)
    assert found and spent_s <= EFFORT_S * 1.1
    lack_before, _ = problem.excess
    for homes in found:
        problem.restart(np.array(homes, np.int32))
        lack, broken = problem.excess
        assert broken <= 1e-9 and lack <= lack_before + 1e-9


@pytest.mark.parametrize("tables, regions", [(14, 4), (300, 8), (3000, 12)])
def test_neighbourhoods_of_mast_shape_are_solved_in_their_effort(tables: int, regions: int) -> None:
    """Each has an answer: what it begins with is one, and there is time for more."""
    problem = Problem(generate(tables, regions, seed=1))
    one_pass(problem, np.zeros(search.N_TALLY))
    before = problem.excess[0], problem.total
    near = Neighbourhood(problem)
    draw = np.random.default_rng(5)
    for turn in range(5):
        found, _ = HomesModel(problem, near.choose(draw)).solve(turn, EFFORT_S)
        assert found
        assert near.improve(draw) > 0
    assert problem.excess[0] <= before[0] + 1e-9
    assert problem.excess[0] < before[0] or problem.total <= before[1]


def _two_groups_change_places() -> Instance:
    """Two jobs of two tables each in the other's region; there is room for one table more, and half the hours."""
    regions = Region("a", 5.0, {"g": 9.0}), Region("b", 5.0, {"h": 9.0})
    tables = tuple(Table(f"{r}{n}", 2.0, r) for r, n in product("ab", range(2)))
    jobs = (
        Job("h", "ml", ("a0", "a1"), 1, gpu_type="h", gpu_hours=9.0),
        Job("g", "ml", ("b0", "b1"), 1, gpu_type="g", gpu_hours=9.0),
    )
    return Instance(regions, tables, jobs, Weights(storage=0.0))


def test_what_neither_moves_nor_swaps_find() -> None:
    """No table and no job has room to move, and swaps of two tables take both jobs apart: four tables move at once."""
    columns = Columns.of(_two_groups_change_places())
    problem = Problem(columns)
    assert one_pass(problem, np.zeros(search.N_TALLY)) == 0
    Neighbourhood(problem).improve(np.random.default_rng(1))
    assert problem.home.tolist() == [1, 1, 0, 0]


def test_what_is_no_better_is_not_taken() -> None:
    """At the optimum the plan stays as it is."""
    columns = Columns.of(_two_groups_change_places())
    problem = Problem(columns, np.array([1, 1, 0, 0], np.int32))
    total = problem.total
    for seed in range(5):
        Neighbourhood(problem).improve(np.random.default_rng(seed))
        assert problem.home.tolist() == [1, 1, 0, 0] and problem.total == total
