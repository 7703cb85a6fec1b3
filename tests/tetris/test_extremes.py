"""Sizes, hours and weights at the limits of the accepted range: no overflow, and plans of equal quality."""

import math
from dataclasses import replace

import numpy as np
import pytest

from domain.instance import (
    LEAST_AMOUNT,
    MOST_AMOUNT,
    InstanceRegion,
    PlacedTable,
    RecurringJob,
    TetrisInstance,
    Weights,
)
from reference.tetris_score import score
from tests.tetris.small import small_instance
from tetris.climb import climb
from tetris.columns import Columns
from tetris.exact import solve
from tetris.neighbourhood import Neighbourhood
from tetris.problem import PlacementProblem


def never() -> float:
    """A clock that does not advance."""
    return 0.0


def scaled(instance: TetrisInstance, size: float, weight: float, capacity: float) -> TetrisInstance:
    """Returns the instance with its sizes, weights of terms, and capacities multiplied."""
    weights = instance.weights
    return replace(
        instance,
        tables=tuple(replace(t, size_bytes=t.size_bytes * size) for t in instance.tables),
        regions=tuple(replace(r, storage_bytes=r.storage_bytes * capacity) for r in instance.regions),
        weights=replace(
            weights, read=weights.read * weight, gpu=weights.gpu * weight, storage=weights.storage * weight
        ),
        move_quota_bytes=None,
    )


@pytest.mark.parametrize(
    ("size", "weight", "capacity"),
    [
        (0.0, 1.0, 9e15),
        (1e18, 1.0, 1e18),
        (1e-18, 1.0, 1e-18),
        (1.0, 1.0, 1e17),
        (1.0, 1e18, 1.0),
        (1.0, 1e-15, 1.0),
        (1e-18, 1e18, 1e15),
    ],
)
def test_plans_do_not_depend_on_units(size: float, weight: float, capacity: float) -> None:
    """Climb works for any unit of bytes and of the objective, and its total equals the plain score's."""
    given = scaled(small_instance(8, 20, 4, 40), size, weight, capacity)
    columns = Columns.of(given)
    found = climb(columns, clock=never, time_s=0.1, seed=1)
    plain = score(given, columns.plan_of(found.home)).total
    assert math.isfinite(plain)
    assert found.total == pytest.approx(plain, rel=1e-9)
    assert found.total < score(given, {}).total


def test_the_magnitude_of_weights_does_not_change_what_is_found() -> None:
    """Weights that are 2**30 times larger or smaller give an equally good plan, with and without the full search."""
    given = replace(small_instance(11, 20, 4, 40), move_quota_bytes=None)
    for time_s in (0.0, 0.1):
        totals = [
            climb(Columns.of(scaled(given, 1.0, weight, 1.0)), clock=never, time_s=time_s, seed=1).total / weight
            for weight in (1.0, 2.0**30, 2.0**-30)
        ]
        assert totals == pytest.approx([totals[0]] * 3, rel=0.02)


EXTREMES = TetrisInstance(
    (
        InstanceRegion("r", MOST_AMOUNT, {"a": LEAST_AMOUNT, "b": MOST_AMOUNT}, {"app": LEAST_AMOUNT}),
        InstanceRegion("s", LEAST_AMOUNT, {"a": MOST_AMOUNT}, {"app": MOST_AMOUNT}),
        InstanceRegion("t", 0.0),
    ),
    (*(PlacedTable(f"t{i}", (LEAST_AMOUNT, MOST_AMOUNT, 0.0, 1.0)[i % 4], "rst"[i % 3]) for i in range(16)),),
    (
        *(
            RecurringJob(
                f"j{i}", "ml", (f"t{i % 16}", f"t{(3 * i + 1) % 16}"), 1 + i % 3, app="app", gpu_type="ab"[i % 2],
                gpu_hours=(LEAST_AMOUNT, MOST_AMOUNT, 5.0)[i % 3], cpu_hours=(MOST_AMOUNT, LEAST_AMOUNT)[i % 2],
                weight=(MOST_AMOUNT, LEAST_AMOUNT, 1.0)[i // 2 % 3],
            )
            for i in range(24)
        ),
        RecurringJob("k", "spark", ("t0", "t1", "t2"), 7, app="app", cpu_hours=MOST_AMOUNT),
    ),
)  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("weights", [
    Weights(MOST_AMOUNT, MOST_AMOUNT, MOST_AMOUNT, MOST_AMOUNT, {1: MOST_AMOUNT, 2: LEAST_AMOUNT}),
    Weights(LEAST_AMOUNT, LEAST_AMOUNT, LEAST_AMOUNT, LEAST_AMOUNT, {1: LEAST_AMOUNT, 2: MOST_AMOUNT}),
    Weights(LEAST_AMOUNT, MOST_AMOUNT, 0.0, 0.0),
    Weights(0.0, 0.0, 0.0),
])  # fmt: skip
def test_the_largest_beside_the_smallest(weights: Weights) -> None:
    """With the largest and smallest values together, each method ends without a warning and with no worse plan."""
    given = replace(EXTREMES, weights=weights)
    columns = Columns.of(given)
    before = score(given, {})
    assert math.isfinite(before.total)
    found = climb(columns, clock=never, time_s=0.1)
    assert score(given, columns.plan_of(found.home)).total <= before.total * (1 + 1e-9) or found.lack < 1e300
    problem = PlacementProblem(columns)
    draw = np.random.default_rng(0)
    for _ in range(3):
        assert Neighbourhood(problem).improve(draw) > 0
    small_of = replace(given, tables=given.tables[:4], jobs=_of_tables(given, 4))
    small = Columns.of(small_of)
    answer = solve(small, time_s=60)
    assert answer.proved
    assert answer.total <= score(small_of, {}).total * (1 + 1e-9) or answer.excess < 1e300


def _of_tables(instance: TetrisInstance, count: int) -> tuple[RecurringJob, ...]:
    there = {t.name for t in instance.tables[:count]}
    return tuple(j for j in instance.jobs if there.issuperset(j.tables))
