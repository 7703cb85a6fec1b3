"""The compiled incremental objective equals the plain score after any moves, and predicted changes are exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.instance import TetrisInstance
from reference.tetris_score import score
from tests.depth import examples
from tests.tetris.small import allowed, small_instance
from tetris.columns import Columns
from tetris.problem import PlacementProblem


@settings(max_examples=examples(150), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    tables=st.integers(0, 9),
    regions=st.integers(1, 5),
    jobs=st.integers(0, 14),
    moves=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=6),
)
def test_incremental_equals_plain(
    seed: int, tables: int, regions: int, jobs: int, moves: list[tuple[int, int]]
) -> None:
    """The terms, the total and the violations equal those of the plain score before, between and after any moves."""
    instance = small_instance(seed, tables, regions, jobs)
    columns = Columns.of(instance)
    problem = PlacementProblem(columns)
    agrees(instance, columns, problem)
    for table, region in moves:
        if not tables:
            break
        table, region = table % tables, region % regions
        weighed = problem.weigh(table)
        expected = weighed.total[region], weighed.lack[region], weighed.broken[region]
        before = problem.total, *problem.excess
        problem.move(table, region)
        after = problem.total, *problem.excess
        assert np.subtract(after, before) == pytest.approx(expected, abs=1e-9)
        agrees(instance, columns, problem)


def agrees(instance: TetrisInstance, columns: Columns, problem: PlacementProblem) -> None:
    """Asserts that total and violations equal those of the plain score."""
    plain = score(instance, columns.plan_of(problem.home))
    assert problem.total == pytest.approx(plain.total, rel=1e-9, abs=1e-9)
    mine = problem.score()
    assert (mine.read, mine.gpu, mine.storage) == pytest.approx((plain.read, plain.gpu, plain.storage), abs=1e-9)
    amounts = [{(v.constraint, v.where): v.by for v in found.violations} for found in (mine, plain)]
    assert amounts[0] == pytest.approx(amounts[1])
    lack, broken = problem.excess
    assert (lack > 0) == bool(plain.violations)
    assert (broken <= 1e-9) == allowed(instance, plain)
    fresh = PlacementProblem(columns, problem.home.copy())
    assert problem.total == pytest.approx(fresh.total, rel=1e-9, abs=1e-12)
    assert np.array_equal(problem.state.region, fresh.state.region)
