"""Climb: optimal plans of small instances, plans without new violations, and the same plan for the same seed."""

import numpy as np
import pytest

from bench.tetris_dense import dense
from domain.instance import InstanceRegion, PlacedTable, RecurringJob, TetrisInstance, Weights
from reference.tetris_score import score
from research.tetris.versions import v1
from tests.tetris.small import allowed, every_plan, small_instance
from tetris.climb import SearchStep, _Climb, climb
from tetris.columns import Columns
from tetris.explain import explain
from tetris.problem import PlacementProblem


def never() -> float:
    """A clock that does not advance, so that a search ends by its number of evaluations on any machine."""
    return 0.0


@pytest.mark.parametrize("seed", range(12))
def test_the_best_of_all_plans_is_found(seed: int) -> None:
    """On instances of up to 243 plans, no allowed plan has less excess, or equal excess and a smaller total."""
    instance = small_instance(seed, 5 if seed % 2 else 7, 3 if seed % 2 else 2, 9)
    columns = Columns.of(instance)
    found = climb(columns, clock=never, time_s=0.3, seed=seed)
    mine = score(instance, columns.plan_of(found.home))
    assert allowed(instance, mine)
    assert mine.total == pytest.approx(found.total, rel=1e-9)
    problem = PlacementProblem(columns)
    for plan in every_plan(instance):
        problem.restart(columns.homes_of(plan))
        lack, broken = problem.excess
        if broken <= 1e-9:
            assert (lack, problem.total) >= (found.lack - 1e-8, found.total - 1e-9) or lack > found.lack + 1e-9


def test_the_same_seed_gives_the_same_plan() -> None:
    """The same seed gives the same plan, because evaluations are counted instead of time."""
    columns = Columns.of(small_instance(5, 40, 5, 90))
    one, two = (climb(columns, clock=never, time_s=0.2, seed=3) for _ in range(2))
    assert np.array_equal(one.home, two.home)
    assert one.evaluations == two.evaluations


def test_steps_only_improve_and_are_heard() -> None:
    """Each recorded step has less excess or a smaller total than the one before, and the listener gets each step."""
    heard: list[SearchStep] = []
    found = climb(Columns.of(small_instance(8, 60, 4, 120)), clock=never, time_s=0.3, listener=heard.append)
    assert len(found.steps) > 2
    assert heard[-1].total <= heard[0].total or heard[-1].lack < heard[0].lack
    order = [(round(step.lack, 9), step.total) for step in found.steps]
    assert order == sorted(order, reverse=True)


@pytest.mark.rotating
def test_the_long_walk_is_worth_its_budget() -> None:
    """On an instance with shared tables and tight quotas, the long walk ends a fifth below the greedy passes.

    Short walks and neighbourhoods alone save an eighth.
    """
    columns = dense(1000, 6, 1)
    found = climb(columns, clock=never, time_s=1.5, proves=False)
    assert found.lack == 0.0 and found.total < 0.835 * climb(columns, time_s=0.0).total


@pytest.mark.parametrize(("time_s", "walks"), [(10.0, 1), (60.0, 5)])
def test_long_walks_share_nearly_all_of_the_budget(time_s: float, walks: int) -> None:
    """A search of 10 seconds has one long walk; one of a minute has several, because a walk's result varies.

    Together they use 93% of the budget.
    """
    search = _Climb(dense(300, 6, 1), time_s, 0, None, lambda: False, False, never)
    walk = search.plan_long_walk(penalty=1.0)
    assert walk is not None
    assert walks * walk.length == pytest.approx(0.93 * search.budget.evaluations)


def test_it_ends_where_it_is_told_to() -> None:
    """A search that is stopped returns the best plan so far."""
    columns = Columns.of(small_instance(8, 60, 4, 120))
    assert np.array_equal(climb(columns, time_s=60.0, stop=lambda: True).home, columns.home)
    with pytest.raises(ValueError, match="time_s: -1"):
        climb(columns, time_s=-1)


@pytest.mark.parametrize(
    "instance",
    [
        TetrisInstance((InstanceRegion("r", 1.0),), (), ()),
        TetrisInstance((InstanceRegion("r", 1.0), InstanceRegion("s", 1.0)), (), (RecurringJob("j", "ml", (), 1),)),
        TetrisInstance(
            (InstanceRegion("r", 0.0), InstanceRegion("s", 0.0)),
            (PlacedTable("t", 0.0, "r"),),
            (RecurringJob("j", "spark", ("t",), 1),),
        ),
    ],
)
def test_instances_of_almost_nothing(instance: TetrisInstance) -> None:
    """Instances without tables, bytes or a second region are solved without an error."""
    found = climb(Columns.of(instance), clock=never, time_s=0.05)
    assert found.total == score(instance, {}).total
    assert found.proved


def test_moves_add_up() -> None:
    """The moves of a plan, applied in order, change the start's terms into the plan's, and name the affected jobs."""
    instance = small_instance(11, 12, 4, 25)
    columns = Columns.of(instance)
    found = climb(columns, clock=never, time_s=0.2)
    moves = list(explain(columns, found.home))
    before, after = score(instance, {}), score(instance, columns.plan_of(found.home))
    assert {m.table: m.target for m in moves} == columns.plan_of(found.home)
    for term in ("read", "gpu", "storage", "total"):
        change = getattr(after, term) - getattr(before, term)
        assert sum(getattr(m, term) for m in moves) == pytest.approx(change, abs=1e-9)
    gained = sum(len(m.gain_region) - len(m.lose_region) for m in moves)
    regions = [
        np.count_nonzero(PlacementProblem(columns, home).state.region >= 0) for home in (columns.home, found.home)
    ]
    assert gained == regions[1] - regions[0]


def test_moves_that_gain_the_most_come_first() -> None:
    """A move that only pays after another one comes directly after it, before moves that gain less."""
    regions = (InstanceRegion("r", 1e3), InstanceRegion("s", 1e3))
    tables = (
        PlacedTable("e", 10.0, "r"),
        PlacedTable("b", 90.0, "r"),
        PlacedTable("a", 5.0, "r"),
        PlacedTable("d", 1.0, "s"),
    )
    jobs = (
        RecurringJob("one", "ml", ("a", "d"), 3),
        RecurringJob("pair", "ml", ("a", "b", "d"), 3, weight=9.0),
        RecurringJob("little", "ml", ("e", "d"), 3, weight=0.1),
    )
    columns = Columns.of(TetrisInstance(regions, tables, jobs, weights=Weights(storage=0.0)))
    moves = list(explain(columns, columns.homes_of({"a": "s", "b": "s", "e": "s"})))
    assert [m.table for m in moves] == ["a", "b", "e"]
    assert [m.gain_region for m in moves] == [("one",), ("pair",), ("little",)]


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_moves_is_close_to_the_greedy_one(seed: int) -> None:
    """The first move gains the most, and the first half gains about as much as the greedy order."""
    columns = Columns.of(small_instance(seed, 30, 4, 60))
    home = np.random.default_rng(seed).integers(0, 4, 30).astype(np.int32)
    totals = [m.total for m in explain(columns, home)]
    problem, greedy, left = PlacementProblem(columns), [], set(np.flatnonzero(home != columns.home).tolist())
    while left:
        change, table = min((float(problem.weigh(t).total[home[t]]), t) for t in left)
        greedy.append(change)
        left.remove(table)
        problem.move(table, int(home[table]))
    assert totals[0] == pytest.approx(greedy[0])
    half = len(greedy) // 2
    assert sum(totals[:half]) == pytest.approx(sum(greedy[:half]), abs=0.1 * -sum(min(0.0, g) for g in greedy))


def test_v1_looks_at_neither_overload_nor_priority() -> None:
    """V1 uses shares only and colocates as many jobs as it can; V2 also uses overload and priorities."""
    regions = (InstanceRegion("r", 100.0, {"a": 10.0}), InstanceRegion("s", 100.0, {"a": 30.0}))
    tables = (*(PlacedTable(f"t{i}", 1.0, "r") for i in range(4)), PlacedTable("x", 1.0, "s"))
    jobs = tuple(RecurringJob(f"j{i}", "ml", (f"t{i}",), 3, gpu_type="a", gpu_hours=10.0) for i in range(4))
    start = TetrisInstance(regions, tables, jobs, weights=Weights(by_priority={3: 0.0}, storage=1000.0))
    first, second = (search(Columns.of(start), time_s=0.2).home for search in (v1, climb))
    assert np.bincount(first[:4], minlength=2).tolist() == [1, 3]
    assert sorted(np.bincount(second, minlength=2).tolist()) == [2, 3]
