"""The exact method, compared with all plans of small instances by the plain score."""

import math
from dataclasses import replace
from itertools import chain, repeat

import numpy as np
import pytest

from domain.instance import InstanceRegion, PlacedTable, RecurringJob, TetrisInstance
from reference.tetris_score import score
from research.tetris.generate import generate
from tests.tetris.small import allowed, every_plan, excess_of, small_instance
from tetris.climb import climb
from tetris.columns import Columns
from tetris.exact import ExactProgress, solve
from tetris.exact.branch import Branching
from tetris.problem import PlacementProblem


def best_by_enumeration(instance: TetrisInstance) -> tuple[float, float]:
    """Returns the least excess of allowed plans, and the least total among the plans with that excess."""
    weights = []
    for plan in every_plan(instance):
        found = score(instance, plan)
        if allowed(instance, found):
            weights.append((excess_of(instance, found), found.total))
    least = min(weights)[0]
    return least, min(total for over, total in weights if over <= least * (1 + 1e-9))


def assert_is_best(instance: TetrisInstance) -> None:
    columns = Columns.of(instance)
    answer = solve(columns, time_s=60)
    least, total = best_by_enumeration(instance)
    found = score(instance, columns.plan_of(answer.home))
    assert answer.proved and answer.limit == ""
    assert allowed(instance, found)
    assert found.total == pytest.approx(answer.total, rel=1e-9, abs=1e-12)
    assert answer.total == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert answer.bound == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert answer.excess == pytest.approx(least, rel=1e-9, abs=1e-12)
    assert answer.excess == pytest.approx(excess_of(instance, found), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(25))
def test_it_finds_the_best_of_all_plans(seed: int) -> None:
    """The exact method finds the optimum of random instances with ties, replicas, zeros and infeasible starts."""
    tables, regions = ((5, 3), (4, 4), (6, 2), (4, 3), (3, 1))[seed % 5]
    assert_is_best(small_instance(seed, tables, regions, jobs=4 + seed % 7))


def test_equal_tables_are_one_class() -> None:
    """Interchangeable tables form one class, whose orders are not all tried; the plan stays optimal."""
    names = ("a", "b", "c")
    regions = tuple(InstanceRegion(n, 30.0 + 7 * i, {"g": 10.0 * i}) for i, n in enumerate(names))
    tables = tuple(PlacedTable(f"t{i}", 4.0, "a") for i in range(6))
    jobs = tuple(RecurringJob(f"j{i}", "ml", (f"t{i}",), 1, gpu_type="g", gpu_hours=5.0) for i in range(3))
    instance = TetrisInstance(regions, tables, jobs)
    branching = Branching(Columns.of(instance))
    assert branching.fixed.twin.tolist() == [[-1, 1], [0, 2], [1, -1], [-1, 4], [3, 5], [4, -1]]
    assert_is_best(instance)


def test_tables_of_one_job_may_be_exchanged_if_its_order_does_not_matter() -> None:
    """Two tables that the same jobs read are interchangeable; a table that other jobs read too is not."""
    tables = tuple(PlacedTable(f"t{i}", 4.0, "a") for i in range(3))
    jobs = (RecurringJob("j", "ml", ("t0", "t1", "t2"), 1), RecurringJob("k", "ml", ("t2", "t1"), 1, weight=2.0))
    branching = Branching(
        Columns.of(TetrisInstance((InstanceRegion("a", 99.0), InstanceRegion("b", 99.0)), tables, jobs))
    )
    assert branching.fixed.twin.tolist() == [[-1, -1], [-1, 2], [1, -1]]


@pytest.mark.parametrize(
    "instance",
    [
        TetrisInstance((InstanceRegion("a", 0.0),), (), ()),
        TetrisInstance((InstanceRegion("a", 1.0), InstanceRegion("b", 0.0)), (PlacedTable("t", 0.0, "a"),), ()),
        TetrisInstance(
            (InstanceRegion("a", 0.0, {"g": 0.0}),), (), (RecurringJob("j", "ml", (), 1, gpu_type="h", gpu_hours=3.0),)
        ),
        TetrisInstance(
            (InstanceRegion("a", 9.0, {"g": 3.0}), InstanceRegion("b", 9.0)),
            (PlacedTable("t", 1.0, "b", ("a",)), PlacedTable("u", 1.0, "b", ("a",))),
            (RecurringJob("j", "ml", ("t",), 1, gpu_type="g", gpu_hours=3.0),),
            move_quota_bytes=0.0,
        ),
    ],
    ids=["nothing", "no bytes", "a job without tables", "only replicas may be used"],
)
def test_corners(instance: TetrisInstance) -> None:
    """Zero denominators, instances without a choice, and moves that copy no bytes are handled."""
    assert_is_best(instance)


def test_a_plan_to_begin_with_is_kept_unless_a_better_one_is_found() -> None:
    """Without time, the result is the given plan, with a bound at or below its total."""
    columns = Columns.of(small_instance(1000, 8, 3, 12))
    best = solve(columns, time_s=60)
    begun = solve(columns, time_s=0, upper=best.home)
    assert begun.home.tolist() == best.home.tolist()
    assert begun.total == pytest.approx(best.total)
    assert begun.bound <= best.total * (1 + 1e-9)
    assert begun.limit == "time" or begun.proved


def test_a_plan_that_is_not_allowed_is_not_begun_with() -> None:
    """A given plan beyond the move quota is ignored, and the result is the start."""
    instance = replace(small_instance(7, 5, 3, 6), move_quota_bytes=0.0)
    columns = Columns.of(instance)
    away = next(
        home
        for plan in every_plan(instance)
        if math.isinf(Branching(columns).weigh((home := columns.homes_of(plan)).astype(np.int64)).excess)
    )
    assert solve(columns, time_s=0, upper=away).home.tolist() == columns.home.tolist()


def test_a_search_that_is_stopped_says_so() -> None:
    """`stop` ends the search at its next check, and reported progress never gets worse."""
    columns = Columns.of(small_instance(1001, 14, 4, 30))
    told: list[ExactProgress] = []
    answer = solve(columns, time_s=60, progress=told.append, stop=lambda: len(told) > 1)
    assert answer.limit == "stopped" and not answer.proved
    assert answer.bound <= answer.total
    assert (told[0].excess, told[0].total) >= (told[-1].excess, told[-1].total)
    assert told[0].nodes == 0 < told[-1].nodes


@pytest.mark.parametrize("slices", [1, 3])
def test_a_bound_before_the_end_is_below_every_plan(slices: int) -> None:
    """The bound of an unfinished search is at most the optimum, and below every plan."""
    columns = generate(24, 4, seed=2)
    clock = chain([0.0] * (1 + slices), repeat(100.0))
    answer = solve(columns, time_s=100, clock=clock.__next__)
    assert answer.limit == "time" and answer.nodes > 0 and not answer.proved
    assert 0 <= answer.bound < min(answer.total, climb(columns, time_s=0.5, proves=False).total)


def test_what_is_too_large_is_refused() -> None:
    """An instance that is too large is rejected with the number, the limit and the method to use instead."""
    regions = tuple(InstanceRegion(f"r{i:02}", 1.0) for i in range(63))
    with pytest.raises(ValueError, match="regions: 63: the exact method supports up to 62; use climb"):
        solve(Columns.of(TetrisInstance(regions, (), ())), time_s=1)
    tables = tuple(PlacedTable(f"t{i}", 1.0, "a") for i in range(5000))
    jobs = tuple(RecurringJob(f"j{i}", "ml", (f"t{i}", f"t{i + 1}"), 1) for i in range(4999))
    with pytest.raises(ValueError, match="tables: 5000 with 4999 groups of jobs"):
        solve(Columns.of(TetrisInstance((InstanceRegion("a", 1.0),), tables, jobs)), time_s=1)


@pytest.mark.parametrize("seed", range(12))
def test_excess_is_what_the_score_finds_over_the_limits(seed: int) -> None:
    """The excess of both methods equals that of the plain score, for the start and for other plans."""
    instance = small_instance(seed)
    columns = Columns.of(instance)
    branching, draw = Branching(columns), np.random.default_rng(seed)
    for home in (columns.home, draw.integers(0, 3, len(columns.home)).astype(np.int32)):
        problem = PlacementProblem(columns, home)
        expected = excess_of(instance, score(instance, columns.plan_of(home)))
        assert problem.excess[0] == pytest.approx(expected, abs=1e-9)
        weight = branching.weigh(home.astype(np.int64))
        assert math.isinf(weight.excess) or weight.excess == pytest.approx(expected, abs=1e-9)
        assert math.isinf(weight.excess) or weight.total == pytest.approx(problem.total, rel=1e-9)
    assert PlacementProblem(columns).excess[1] == 0
