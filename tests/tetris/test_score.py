"""The plain score: each term on instances that can be computed by hand."""

import math
from dataclasses import replace

import pytest

from domain.instance import InstanceRegion, PlacedTable, RecurringJob, TetrisInstance, Violation, Weights, job_region
from reference.tetris_score import score

TWO = (InstanceRegion("r1", 100.0, {"a": 30.0}), InstanceRegion("r2", 300.0, {"a": 10.0}))


def instance(*jobs: RecurringJob, **more: object) -> TetrisInstance:
    """Returns an instance of two regions with a table of 25 bytes in the first and one of 75 bytes in the second."""
    tables = (PlacedTable("t1", 25.0, "r1"), PlacedTable("t2", 75.0, "r2"))
    return TetrisInstance(TWO, tables, jobs, **more)  # type: ignore[arg-type]


def test_read_counts_what_is_not_at_home() -> None:
    """The read term counts, by job weight, the tables that a job reads outside of its region.

    A job without a region reads all of its tables remotely.
    """
    apart = RecurringJob("j", "ml", ("t1", "t2"), 3, weight=2.0)
    assert score(instance(apart), {}).read == 2.0
    assert score(instance(apart), {"t1": "r2"}).read == 0.0
    most = RecurringJob("k", "spark", ("t1", "t2"), 3)
    assert score(instance(most), {}).read == 0.25
    assert score(instance(RecurringJob("n", "presto", (), 3)), {}).read == 0.0


def test_gpu_compares_shares_and_adds_overload() -> None:
    """The GPU term is the squared difference of the shares of demand and supply, plus a sigmoid of the overload.

    Overload is weighted by level.
    """
    job = RecurringJob("j", "ml", ("t2",), 1, gpu_type="a", gpu_hours=20.0)
    weights = Weights(by_priority={1: 3.0})
    apart = (0 - 0.75) ** 2 + (1 - 0.25) ** 2
    overload = 4 * (1 / (1 + math.exp(-10 / 20)) - 0.5)
    assert score(instance(job, weights=weights), {}).gpu == pytest.approx(3 * (apart + overload))


def test_any_demand_overloads_where_no_supply_is() -> None:
    """Without any supply, the sigmoid is 1 for any demand, and shares of a zero total are 0."""
    job = RecurringJob("j", "ml", ("t2",), 1, gpu_type="b", gpu_hours=1e-6)
    idle = score(instance(RecurringJob("j", "ml", ("t2",), 1)), {}).gpu
    assert score(instance(job), {}).gpu == pytest.approx(idle + 1.0 + 4 * 0.5)


def test_storage_compares_shares() -> None:
    """The storage term is the squared difference of a region's shares of bytes and capacity; a zero total gives 0."""
    assert score(instance(), {}).storage == pytest.approx(0.0)
    assert score(instance(), {"t1": "r2"}).storage == pytest.approx(0.25**2 * 2)
    assert score(TetrisInstance((InstanceRegion("r", 0.0),), (), ()), {}).total == 0.0


def test_a_replica_is_used_up() -> None:
    """A move to a replica copies no bytes, and the table has one copy less afterwards."""
    start = replace(instance(), tables=(PlacedTable("t1", 25.0, "r1", ("r2",)),), move_quota_bytes=0.0)
    assert score(start, {"t1": "r2"}).violations == ()
    assert score(start, {}).storage == pytest.approx(0.25**2 * 2)
    assert score(start, {"t1": "r2"}).storage == pytest.approx(0.25**2 * 2)
    without = replace(start, tables=(PlacedTable("t1", 25.0, "r1"),))
    assert score(without, {"t1": "r2"}).violations == (Violation("move_quota", "all", 25.0),)


def test_where_a_job_runs() -> None:
    """An ML job runs where all its tables are; others where most are, then by bytes, then by name."""
    tables = {t.name: t for t in (PlacedTable("a", 1.0, ""), PlacedTable("b", 2.0, ""), PlacedTable("c", 1.0, ""))}
    home = {"a": "x", "b": "y", "c": "x"}
    assert job_region(RecurringJob("j", "ml", ("a", "c"), 1), tables, home) == "x"
    assert job_region(RecurringJob("j", "ml", ("a", "b"), 1), tables, home) is None
    assert job_region(RecurringJob("j", "spark", ("a", "b", "c"), 1), tables, home) == "x"
    assert job_region(RecurringJob("j", "spark", ("a", "b"), 1), tables, home) == "y"
    assert job_region(RecurringJob("j", "presto", ("a", "c"), 1), tables, {"a": "y", "c": "x"}) == "x"


def test_constraints_say_where_and_by_how_much() -> None:
    """Violations of storage, CPU quota and home threshold have the place and the amount."""
    regions = (InstanceRegion("r1", 50.0, {"a": 30.0}, {"spark": 10.0}), InstanceRegion("r2", 300.0))
    jobs = (
        RecurringJob("j", "ml", ("t1",), 1, gpu_type="a", gpu_hours=10.0),
        RecurringJob("k", "ml", (), 2, gpu_type="a", gpu_hours=10.0),
        RecurringJob("s", "spark", ("t2",), 5, app="spark", cpu_hours=12.0),
    )
    given = replace(instance(*jobs), regions=regions)
    assert score(given, {}).violations == ()
    assert score(given, {"t1": "r2", "t2": "r1"}).violations == (
        Violation("storage", "r1", 25.0),
        Violation("cpu_hours", "r1/spark", 2.0),
        Violation("home_threshold", "all", 0.5),
    )


def test_a_plan_of_something_else_is_refused() -> None:
    """A plan that names an unknown table or region is rejected."""
    with pytest.raises(ValueError, match="no table 'x'"):
        score(instance(), {"x": "r1"})
    with pytest.raises(ValueError, match=r"homes\.t1: the instance has no region 'x'"):
        score(instance(), {"t1": "x"})
