"""The instance of a region's datacenters, the choice of running regions, and the assignment of partitions."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, delete, select

from domain.datacenters import Placed, StoredPartition, region_instance, running_regions
from domain.instance import InstanceRegion, PlacedTable, Reads, RecurringJob, TetrisInstance
from infra.db import models, tables
from infra.db.datacenters import AssignmentError, assign_partitions, gather_datacenters
from infra.db.session import transaction
from infra.db.usage import record_runs
from infra.errors import CatalogueError
from reference.tetris_score import score
from tetris.climb import climb
from tetris.columns import Columns

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)


def _machine(region: str, cluster: str, gpu_type: str | None, state: str = "ready") -> models.Machine:
    return models.Machine(
        id=f"{region}/{cluster}/{gpu_type}-{state}", region=region, cluster=cluster, rack="r", gpu_type=gpu_type,
        gpus=0 if gpu_type is None else 4, cpus_milli=1, memory_bytes=1, free_cpus_milli=1, free_memory_bytes=1,
        state=state, incarnation="i", public_key="", address="",
    )  # fmt: skip


def _run(job: str, tables: list[str], **more: Any) -> dict[str, Any]:
    columns = {
        "source": "own", "run": job, "job": job, "kind": "ml", "app": "training", "priority": 1, "tables": tables,
        "gpu_hours": {"a100": 10.0}, "cpu_hours": 0.0, "ended_at": NOW - timedelta(hours=1),
    }  # fmt: skip
    return {**columns, **more}


@pytest.fixture
def house(database: Engine) -> Engine:
    """Creates a region of two datacenters with two tables, and another region with a table that is partly copied."""
    with transaction(database) as session:
        session.add_all(models.Region(name=name, bucket_url=f"file:///{name}") for name in ("north", "south", "west"))
        session.flush()
        session.add_all(
            models.Datacenter(region="north", name=name, storage_bytes=size) for name, size in (("d1", 100), ("d2", 70))
        )
        session.flush()
        for region, cluster, datacenter in (("north", "k1", "d1"), ("north", "k2", "d2"), ("north", "k3", None)):
            session.add(models.Cluster(region=region, name=cluster, datacenter=datacenter))
        session.add(models.Cluster(region="south", name="k1"))
        session.flush()
        session.add_all(
            _machine(region, cluster, gpu_type, state)
            for region, cluster, gpu_type, state in (
                ("north", "k1", "a100", "ready"), ("north", "k1", "a100", "lost"), ("north", "k2", "a100", "joining"),
                ("north", "k2", None, "ready"), ("north", "k3", "v100", "ready"), ("south", "k1", "h100", "ready"),
            )
        )  # fmt: skip
        _add_table(session, "days", "north", (40, 30, 20, 10))
        _add_table(session, "small", "north", (5,))
        _add_table(session, "far", "south", (7, 8))
        session.add(tables.Replica(data_table="far", region="north", state="ready", whole=False))
        session.flush()
        session.add(tables.ReplicaPartition(data_table="far", partition="p2", region="north", ready_at=NOW))
        session.add(tables.ReplicaPartition(data_table="far", partition="p1", region="north"))
        _set(session, ("days", "p1"), "d1")
    return database


def _add_table(session: Any, name: str, home: str, sizes: Iterable[int]) -> None:
    session.add(tables.Table(name=name, home_region=home))
    session.flush()
    session.add(tables.Replica(data_table=name, region=home, state="ready"))
    session.flush()
    session.add_all(
        tables.Partition(data_table=name, name=f"p{n}", location=f"tables/{name}/p{n}/", size_bytes=size)
        for n, size in enumerate(sizes, start=1)
    )
    session.flush()


def _set(session: Any, key: tuple[str, str], datacenter: str) -> None:
    session.get_one(tables.ReplicaPartition, (*key, "north")).datacenter = datacenter


def _gather(engine: Engine, *runs: dict[str, Any], region: str = "north", **options: Any) -> TetrisInstance:
    with transaction(engine, isolation="REPEATABLE READ") as session:
        record_runs(session, runs)
        return gather_datacenters(session, region, now=NOW, **options)


def test_the_instance_of_a_region(house: Engine) -> None:
    """Datacenters have their clusters' GPU hours; unassigned partitions start where space is free, largest first."""
    found = _gather(
        house,
        _run("days", ["days"]),
        _run("some", ["days/p2", "days/p4", "small"], priority=3),
        _run("with a part", ["days/p2", "far/p2"]),
        _run("elsewhere", ["far/p1"]),
        _run("not all there", ["days/p2", "far/p1"]),
        _run("nothing", []),
        _run("mostly here", ["days/p1", "small", "far"], kind="spark", gpu_hours={}, cpu_hours=3.0),
    )
    assert found.regions == (
        InstanceRegion("north/d1", 100.0, {"a100": 96.0}),
        InstanceRegion("north/d2", 70.0, {"a100": 96.0}),
    )
    assert found.tables == (
        PlacedTable("days/p1", 40.0, "north/d1"), PlacedTable("days/p2", 30.0, "north/d2"),
        PlacedTable("days/p3", 20.0, "north/d1"), PlacedTable("days/p4", 10.0, "north/d1"),
        PlacedTable("far/p2", 8.0, "north/d2"), PlacedTable("small/p1", 5.0, "north/d2"),
    )  # fmt: skip
    assert [(j.name, j.tables, j.kind, j.priority, j.gpu_hours) for j in found.jobs] == [
        ("own/days", ("days/p1", "days/p2", "days/p3", "days/p4"), "ml", 1, 10.0),
        ("own/mostly here", ("days/p1", "far/p2", "small/p1"), "spark", 1, 0.0),
        ("own/some", ("days/p2", "days/p4", "small/p1"), "ml", 3, 10.0),
        ("own/with a part", ("days/p2", "far/p2"), "ml", 1, 10.0),
    ]


def test_jobs_follow_the_plan(house: Engine) -> None:
    """If the plan moves a table's home away, the region's instance loses its partitions and the jobs that follow it."""
    runs = _run("days", ["days"]), _run("small", ["small"], gpu_hours={})
    found = _gather(house, *runs, homes={"days": "south"})
    assert [t.name for t in found.tables] == ["far/p2", "small/p1"]
    assert [j.name for j in found.jobs] == ["own/small"]
    assert [j.name for j in _gather(house, homes={"far": "north"}).jobs] == ["own/days", "own/small"]
    with pytest.raises(ValueError, match="homes: there is no table 'gone'"):
        _gather(house, homes={"gone": "north"})


def test_where_jobs_run() -> None:
    """A job runs in its tables' home if the GPU type is there, else where all of its reads are.

    Among several regions, the one with the most supply is chosen, then the first by name.
    """
    jobs = (
        RecurringJob("home", "ml", ("x",), 1, gpu_type="a"),
        RecurringJob("hardware", "ml", ("x",), 1, gpu_type="b"),
        RecurringJob("both", "ml", ("x", "y"), 1, gpu_type="a"),
        RecurringJob("no GPUs", "ml", ("x", "y"), 1),
        RecurringJob("part", "ml", ("x", "z"), 1, gpu_type="a"),
        RecurringJob("other part", "ml", ("x", "z"), 1, gpu_type="a"),
        RecurringJob("unknown hardware", "ml", ("x",), 1, gpu_type="c"),
        RecurringJob("no tables", "ml", (), 1, gpu_type="a"),
        RecurringJob("most", "spark", ("x", "y", "z"), 1),
    )
    placed = Placed(
        tables=(
            PlacedTable("x", 1.0, "r", ("s", "t", "u")),
            PlacedTable("y", 1.0, "s", ("t", "u")),
            PlacedTable("z", 9.0, "r"),
        ),
        jobs=jobs,
        reads=Reads({"z/1": 1.0, "z/2": 1.0}, {"part": ("z/1",), "other part": ("z/1", "z/2")}),
        supply={"r": {"a": 1.0}, "s": {"b": 2.0}, "t": {"a": 5.0, "b": 2.0}, "u": {"a": 5.0, "b": 1.0}},
        parts={("z", "u"): frozenset({"z/1"})},
    )
    assert dict(zip([j.name for j in jobs], running_regions(placed, {"x": "r"}), strict=True)) == {
        "home": "r", "hardware": "s", "both": "t", "no GPUs": "s", "part": "r", "other part": "r",
        "unknown hardware": "r", "no tables": None, "most": "r",
    }  # fmt: skip
    moved = running_regions(placed, {"x": "s"})
    assert [moved[n] for n in (0, 1, 4, 5)] == ["t", "s", "u", None]


def test_a_start_of_equal_rooms() -> None:
    """Unassigned partitions go to the datacenter with the most free space, then by name; assigned ones stay.

    A partition that fits nowhere also goes to the datacenter with the most free space.
    """
    held = [StoredPartition("t", name, 6.0, at) for name, at in (("a", None), ("b", None), ("c", "y"), ("d", None))]
    found = region_instance(
        Placed((PlacedTable("t", 24.0, "r"),), (), Reads(), {"r": {}}),
        {},
        "r",
        [InstanceRegion("r/x", 10.0), InstanceRegion("r/y", 10.0)],
        held,
    )
    assert [t.home for t in found.tables] == ["r/x", "r/x", "r/y", "r/y"]


def test_what_is_climbed_is_written_down(house: Engine) -> None:
    """A climb brings each job's partitions together; once assigned, they are the start of the next instance."""
    runs = [_run("one", ["days/p1", "days/p4", "small"]), _run("two", ["days/p2", "days/p3", "far/p2"])]
    given = _gather(house, *runs)
    columns = Columns.of(given)
    plan = columns.plan_of(climb(columns, time_s=0.2, seed=1).home)
    assert score(given, plan).read == 0 < score(given, {}).read
    homes = {table.name: plan.get(table.name, table.home) for table in given.tables}
    with transaction(house) as session:
        assert assign_partitions(session, homes) == 6 - (homes["days/p1"] == "north/d1")
        assert assign_partitions(session, homes) == assign_partitions(session, {}) == 0
    assert {t.name: t.home for t in _gather(house).tables} == homes


def test_plans_that_do_not_fit_any_more(house: Engine) -> None:
    """Each partition or datacenter that does not exist is named, and no assignment is written."""
    homes = {
        "days/p1": "north/d2", "days/p9": "north/d1", "far/p1": "north/d1", "far/p2": "north/d7", "gone/p1": "north/d1",
        "small/p1": "south/d1",
    }  # fmt: skip
    with transaction(house) as session, pytest.raises(AssignmentError) as refused:
        assign_partitions(session, homes)
    lacking = "no ready replica in north has this partition; export the region's instance again"
    assert refused.value.wrong == {
        "days/p9": lacking, "far/p1": lacking, "far/p2": "region north has no datacenter 'd7'; it has d1, d2",
        "gone/p1": lacking, "small/p1": "region south has no datacenter 'd1'; it has none",
    }  # fmt: skip
    with transaction(house) as session:
        assert set(session.scalars(select(tables.ReplicaPartition.datacenter))) == {"d1", None}
        replica = session.get_one(tables.Replica, ("far", "north"))
        replica.state, replica.delete_at = "deleting", NOW
        session.flush()
        with pytest.raises(AssignmentError, match=f"far/p2: {lacking}"):
            assign_partitions(session, {"far/p2": "north/d1"})


def test_what_is_missing_is_named(house: Engine) -> None:
    """A region without datacenters, or with a datacenter whose storage is not set, has no instance."""
    with pytest.raises(CatalogueError, match="region south has no datacenters; set each with its storage and clusters"):
        _gather(house, region="south")
    with pytest.raises(CatalogueError, match="region mars: does not exist"):
        _gather(house, region="mars")
    with transaction(house) as session:
        session.get_one(models.Datacenter, ("north", "d2")).storage_bytes = None
    with pytest.raises(CatalogueError, match="storage_bytes of datacenter d2 of north: is not set"):
        _gather(house)
    with transaction(house) as session:
        session.execute(delete(tables.Table))
        session.get_one(models.Datacenter, ("north", "d2")).storage_bytes = 0
    assert _gather(house).tables == ()
