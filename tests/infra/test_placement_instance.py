"""Recurring jobs from usage, and the instance that is gathered from catalogue, fleet and usage."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine

from domain.instance import InstanceRegion, PlacedTable, Reads, RecurringJob, TetrisInstance, Weights
from infra.db import models, tables
from infra.db.placement_instance import gather
from infra.db.reads import partial_reads, unknown_reads
from infra.db.session import transaction
from infra.db.usage import record_runs, recurring_jobs
from infra.errors import CatalogueError

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


def _run(run: str, days_ago: float, **more: Any) -> dict[str, Any]:
    columns = {
        "source": "spark", "run": run, "job": "daily", "kind": "spark", "app": "spark", "priority": 7, "tables": ["t"],
        "gpu_hours": {}, "cpu_hours": 10.0, "ended_at": NOW - timedelta(days=days_ago),
    }  # fmt: skip
    return {**columns, **more}


@pytest.fixture
def house(database: Engine) -> Engine:
    """Creates regions with machines, a table with a replica, and a table with copying, deleted and partial replicas."""
    with transaction(database) as session:
        session.add(models.Region(name="a", bucket_url="file:///a", storage_bytes=1000, cpu_hours={"spark": 50}))
        session.add(models.Region(name="b", bucket_url="file:///b", storage_bytes=2000))
        session.add(models.Region(name="c", bucket_url="file:///c", storage_bytes=0))
        session.add(models.Region(name="d", bucket_url="file:///d", storage_bytes=0))
        session.flush()
        session.add(models.Cluster(region="a", name="k"))
        session.flush()
        for name, gpu_type, gpus, state in (
            ("1", "a100", 8, "ready"), ("2", "a100", 4, "joining"), ("3", "v100", 2, "lost"), ("4", None, 0, "ready"),
        ):  # fmt: skip
            session.add(
                models.Machine(
                    id=f"a/k/{name}", region="a", cluster="k", rack="r", gpu_type=gpu_type, gpus=gpus, cpus_milli=1,
                    memory_bytes=1, free_cpus_milli=1, free_memory_bytes=1, state=state, incarnation="i", public_key="",
                    address="",
                )
            )  # fmt: skip
        for name, home in (("t", "a"), ("n.u", "b")):
            session.add(tables.Table(name=name, home_region=home))
            session.flush()
            session.add(tables.Replica(data_table=name, region=home, state="ready"))
            session.flush()
            location = f"tables/{name}/"
            session.add(tables.Partition(data_table=name, name="all", location=location, size_bytes=60))
        session.add(tables.Replica(data_table="t", region="b", state="ready"))
        session.add(tables.Replica(data_table="n.u", region="a", state="copying"))
        session.add(tables.Replica(data_table="n.u", region="c", state="ready", whole=False))
        session.add(tables.Replica(data_table="n.u", region="d", state="deleting", delete_at=NOW))
    return database


def _jobs(engine: Engine, *runs: dict[str, Any], **options: Any) -> tuple[RecurringJob, ...]:
    with transaction(engine) as session:
        record_runs(session, runs)
        return recurring_jobs(session, NOW, **{"window_days": 30.0, **options})


def test_the_instance_of_a_small_world(house: Engine) -> None:
    """The supply excludes lost machines, only ready replicas of whole tables count, and hours are per day."""
    with transaction(house) as session:
        record_runs(session, [_run("1", 0.5), _run("2", 1.5)])
        found = gather(session, now=NOW)
    assert found == TetrisInstance(
        regions=(
            InstanceRegion("a", 1000.0, {"a100": 288.0}, {"spark": 50}),
            InstanceRegion("b", 2000.0),
            InstanceRegion("c", 0.0),
            InstanceRegion("d", 0.0),
        ),
        tables=(PlacedTable("n.u", 60.0, "b"), PlacedTable("t", 60.0, "a", ("b",))),
        jobs=(RecurringJob("spark/daily", "spark", ("t",), 7, "spark", None, 0.0, 10.0, 1.0),),
        weights=Weights(gpu=10.0, by_priority={1: 4.0, 2: 2.0}),
    )


def test_a_job_is_the_runs_of_its_name(house: Engine) -> None:
    """A job reads all existing tables that its runs read; kind, app and priority come from its newest run."""
    found = _jobs(
        house,
        _run("1", 9.5, tables=["t", "gone"], priority=1, app="old"),
        _run("2", 3.5, tables=["n.u", "t"], priority=4, gpu_hours={"v100": 30.0, "a100": 5.0}),
        _run("3", 0.5, tables=[], priority=2, kind="ml", gpu_hours={"a100": 15.0}, cpu_hours=1.0),
        _run("4", 0.5, job="other", tables=["gone"]),
        _run("1", 0.5, source="presto", kind="presto", app=None),
    )
    assert found == (
        RecurringJob("presto/daily", "presto", ("t",), 7, None, None, 0.0, 10.0, 1.0),
        RecurringJob("spark/daily", "ml", ("n.u", "t"), 2, "spark", "v100", 5.0, 2.1, 0.3),
        RecurringJob("spark/other", "spark", (), 7, "spark", None, 0.0, 1.0, 0.1),
    )


def test_runs_read_tables_or_partitions(house: Engine) -> None:
    """A job reads the partitions that its runs named, or the table if a run read it whole or they are all of it."""
    with transaction(house) as session:
        session.add(tables.Table(name="days", home_region="a"))
        session.flush()
        session.add(tables.Replica(data_table="days", region="a", state="ready"))
        session.flush()
        for day, size in enumerate((10, 20, 30, 40), start=1):
            session.add(tables.Partition(data_table="days", name=f"ds={day}", location=f"days/{day}/", size_bytes=size))
    found = _jobs(
        house,
        _run("1", 2.5, tables=["days/ds=2", "t"]),
        _run("2", 1.5, tables=["days/ds=1", "days/ds=2", "days/ds=9", "t/all", "t"]),
        _run("3", 0.5, tables=["days/ds=1", "gone/ds=1"]),
        _run("4", 40, tables=["days"]),
        _run("5", 0.5, job="all", tables=["days/ds=1", "days/ds=2", "days/ds=3"]),
        _run("6", 0.5, job="all", tables=["days/ds=4"]),
        _run("7", 0.5, job="both", tables=["days/ds=1", "days"]),
        _run("8", 0.5, job="gone", tables=["days/ds=9"]),
        _run("9", 0.5, job="single", tables=["days/ds=4", "n.u/all"]),
    )
    assert [(j.name, j.tables) for j in found] == [
        ("spark/all", ("days",)), ("spark/both", ("days",)), ("spark/daily", ("days", "t")), ("spark/gone", ()),
        ("spark/single", ("days", "n.u")),
    ]  # fmt: skip
    with transaction(house) as session:
        reads = partial_reads(session, NOW, 30.0)
        assert unknown_reads(session, ["t", "t/all", "days/ds=4"]) == {}
        unknown = unknown_reads(session, ["t", "t/ds=1", "gone", "gone/ds=1"])
    assert reads == Reads(
        {"days/ds=1": 10.0, "days/ds=2": 20.0, "days/ds=4": 40.0},
        {"spark/daily": ("days/ds=1", "days/ds=2"), "spark/single": ("days/ds=4",)},
    )
    no_table = "there is no such table; register it first, or leave it out"
    no_partition = "table t has no such partition; append it first, or leave it out"
    assert unknown == {"gone": no_table, "gone/ds=1": no_table, "t/ds=1": no_partition}


def test_only_the_window_counts(house: Engine) -> None:
    """Only runs within the window count; averages are over the window, or since the source's first run if shorter."""
    runs = [_run("long ago", 40), _run("1", 29.5), _run("2", 1), _run("to come", -1)]
    assert [(j.weight, j.cpu_hours) for j in _jobs(house, *runs)] == [(2 / 30, 20 / 30)]
    assert [(j.weight, j.cpu_hours) for j in _jobs(house, window_days=10.0)] == [(0.5, 5.0)]
    assert _jobs(house, window_days=0.5) == ()
    with pytest.raises(ValueError, match="window_days: 0: must be greater than 0"):
        _jobs(house, window_days=0)


def test_a_run_is_recorded_once(house: Engine) -> None:
    """A run is identified by its source and id, within one call and across calls."""
    with transaction(house) as session:
        assert record_runs(session, [_run("1", 1), _run("1", 1, cpu_hours=99.0), _run("1", 1, source="x")]) == 2
        assert record_runs(session, [_run("1", 1, cpu_hours=99.0), _run("2", 1)]) == 1
        assert record_runs(session, []) == 0
    assert [(j.name, j.cpu_hours, j.weight) for j in _jobs(house)] == [
        ("spark/daily", 10.0, 1.0),
        ("x/daily", 5.0, 0.5),
    ]


def test_what_is_missing_is_named(database: Engine) -> None:
    """Without regions, or without their storage, there is no instance; the error says how to set them."""
    with transaction(database) as session, pytest.raises(CatalogueError, match="regions: there is no region"):
        gather(session)
    with transaction(database) as session:
        session.add_all(models.Region(name=name, bucket_url="file:///x") for name in "ab")
        session.flush()
        with pytest.raises(CatalogueError, match=r"storage_bytes of region a, b: is not set; .*regions set REGION"):
            gather(session)
