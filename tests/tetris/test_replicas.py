"""Extra replicas: for disaster recovery, for jobs without a region, and for hot tables."""

import dataclasses
import itertools
import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from domain.ids import split_read
from domain.instance import InstanceRegion, PlacedTable, Reads, RecurringJob, TetrisInstance
from research.tetris.generate import generate
from tests.depth import examples
from tests.tetris.small import small_instance
from tetris.columns import NONE, Columns
from tetris.pieces import RequiredPieces
from tetris.replicas import ReplicaPolicy, candidate_regions, jobs_without_region, replicas_document, replicate

ONLY_JOBS = ReplicaPolicy(disaster_recovery_level=0, hot_jobs=1 << 30)
ONLY_RECOVERY = ReplicaPolicy(hot_jobs=1 << 30)


def regions(*names: str, room: float = 100.0) -> tuple[InstanceRegion, ...]:
    """Returns regions with 10 GPU hours of type `a` each."""
    return tuple(InstanceRegion(name, room, {"a": 10.0}) for name in names)


def test_a_disaster_takes_one_copy_at_most() -> None:
    """The recovery replica is in a region unlikely to fail with the home, and then in one that can take the load."""
    given = TetrisInstance(
        (*regions("r", "s"), InstanceRegion("t", 100.0, {"a": 40.0}), InstanceRegion("u", 100.0)),
        (PlacedTable("x", 10.0, "r"),),
        (RecurringJob("j", "ml", ("x",), 1, gpu_type="a", gpu_hours=30.0),),
    )
    columns = Columns.of(given)
    found = replicate(columns, columns.home, ONLY_RECOVERY)
    assert [(columns.regions[r.region], r.reason) for r in found.replicas] == [("t", "disaster_recovery")]
    together = ReplicaPolicy(correlated={("r", "t"): 0.01}, hot_jobs=1 << 30)
    found = replicate(columns, columns.home, together)
    assert [columns.regions[r.region] for r in found.replicas] == ["s"]


def test_a_job_of_two_kinds_of_hardware_gets_a_replica() -> None:
    """If no region has both GPU types of a table's jobs, a replica goes to the region with the most supply of one."""
    given = TetrisInstance(
        (
            InstanceRegion("r", 100.0, {"a": 10.0}),
            InstanceRegion("s", 100.0, {"b": 5.0}),
            InstanceRegion("t", 100.0, {"b": 50.0}),
        ),
        (PlacedTable("x", 10.0, "r"),),
        (
            RecurringJob("j", "ml", ("x",), 1, gpu_type="a", gpu_hours=1.0),
            RecurringJob("k", "ml", ("x",), 3, gpu_type="b", gpu_hours=1.0),
            RecurringJob("l", "ml", ("x",), 3, gpu_type="c", gpu_hours=1.0),
        ),
    )
    columns = Columns.of(given)
    found = replicate(columns, columns.home, ONLY_JOBS)
    assert [(r.table, columns.regions[r.region], r.job) for r in found.replicas] == [(0, "t", 1)]
    assert [(u.job, u.reason) for u in found.unplaced] == [(2, "no_hardware")]
    assert candidate_regions(columns, found.held).tolist() == [[True, False, False], [False, False, True], [False] * 3]


def test_only_the_partitions_that_are_needed_are_copied() -> None:
    """A job that reads a tenth of a table gets a replica of a tenth of its bytes, where the whole would not fit."""
    given = TetrisInstance(
        (InstanceRegion("r", 100.0, {"a": 10.0}), InstanceRegion("s", 30.0, {"a": 20.0})),
        (PlacedTable("x", 60.0, "r"), PlacedTable("y", 10.0, "s")),
        (RecurringJob("j", "ml", ("x", "y"), 1, gpu_type="a", gpu_hours=1.0),),
    )
    columns = Columns.of(given)
    whole = replicate(columns, columns.home, ONLY_JOBS)
    assert [(r.table, r.region, r.part) for r in whole.replicas] == [(1, 0, 1.0)]
    needed = RequiredPieces.of(columns, Reads({"x/2": 4.0, "x/1": 2.0}, {"j": ("x/2", "x/1")}))
    assert needed.part.tolist() == pytest.approx([0.1, 1.0])
    part = replicate(columns, columns.home, ONLY_JOBS, needed)
    assert [(r.table, r.region) for r in part.replicas] == [(0, 1)]
    assert part.stored_bytes.tolist() == pytest.approx([60.0, 16.0])
    (told,) = replicas_document(columns, part, needed)["replicas"]
    assert told == {
        "table": "x", "region": "s", "reason": "no_region", "part": pytest.approx(0.1), "partitions": ["x/1", "x/2"],
        "job": "j",
    }  # fmt: skip


def test_each_job_needs_its_own_partitions() -> None:
    """Each job needs exactly its own partitions; partitions that are already there are not copied again."""
    jobs = {"i": ("x/1",), "j": ("x/2",), "k": ("x/1", "x/2", "x/3"), "l": ()}
    given = TetrisInstance(
        (InstanceRegion("r", 100.0), InstanceRegion("s", 80.0, {"a": 20.0})),
        (PlacedTable("x", 60.0, "r"),),
        tuple(RecurringJob(name, "ml", ("x",), 1 + n, gpu_type="a", gpu_hours=1.0) for n, name in enumerate(jobs)),
    )
    columns = Columns.of(given)
    reads = Reads({"x/1": 10.0, "x/2": 10.0, "x/3": 10.0}, {job: names for job, names in jobs.items() if names})
    needed = RequiredPieces.of(columns, reads)
    found = replicate(columns, columns.home, ONLY_JOBS, needed)
    assert [r.job for r in found.replicas] == [0, 1, 2, 3]
    assert [r.part for r in found.replicas] == pytest.approx([1 / 6, 1 / 6, 0.5, 1.0])
    assert [needed.names(edge) for edge in range(4)] == list(jobs.values())
    assert found.stored_bytes.tolist() == pytest.approx([60.0, 60.0])
    assert candidate_regions(columns, found.pieces, needed).tolist() == [[False, True]] * 4
    small = dataclasses.replace(columns, capacity_bytes=np.array([100.0, 25.0]))
    found = replicate(small, small.home, ONLY_JOBS, needed)
    assert candidate_regions(small, found.pieces, needed)[:, 1].tolist() == [True, True, False, False]
    assert [(u.job, u.short_bytes) for u in found.unplaced] == [(2, pytest.approx(5.0)), (3, pytest.approx(35.0))]


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        (Reads({"x/1": 1.0}, {"z": ("x/1",)}), "reads: 'z' is not a job of the instance"),
        (Reads({"y/1": 1.0}, {"j": ("y/1",)}), "reads of j: 'y/1' is not a partition of a table of that job"),
        (Reads({"x/1": 1.0}, {"j": ("x/1", "x/2")}), "partitions: 'x/2' is missing, but j reads it; give its size"),
    ],
)
def test_reads_of_another_instance(reads: Reads, message: str) -> None:
    """Reads of unknown jobs, tables or partitions are rejected with an error that names them."""
    given = TetrisInstance(
        regions("r"), (PlacedTable("x", 2.0, "r"), PlacedTable("y", 2.0, "r")), (RecurringJob("j", "ml", ("x",), 1),)
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        RequiredPieces.of(Columns.of(given), reads)


@hypothesis.given(seed=st.integers(0, 10_000), data=st.data())
@hypothesis.settings(deadline=None, max_examples=examples(40))
def test_partial_replicas_add_up(seed: int, data: st.DataObject) -> None:
    """Summed by partition, replicas have the reported stored bytes and serve exactly the jobs that count as placed."""
    columns = Columns.of(small_instance(seed, 8, 3, 12))
    days = {name: [f"{name}/{day}" for day in range(3)] for name in columns.table_names}
    sizes = dict(zip(columns.table_names, columns.size_bytes.tolist(), strict=True))
    by_job = {
        name: tuple(
            itertools.chain.from_iterable(
                data.draw(st.lists(st.sampled_from(days[columns.table_names[table]]), max_size=2, unique=True))
                for table in columns.job_table[columns.job_start[j] : columns.job_start[j + 1]]
            )
        )
        for j, name in enumerate(columns.job_names)
    }
    reads = Reads({day: sizes[name] / 4 for name in days for day in days[name]}, by_job)
    needed = RequiredPieces.of(columns, reads)
    found = replicate(columns, columns.home, ReplicaPolicy(hot_jobs=3), needed)
    there: dict[str, set[str]] = {region: set() for region in columns.regions}
    # No job reads a quarter of each table.
    whole = {name: {*days[name], f"{name}/rest"} for name in columns.table_names}
    for table, home in zip(columns.table_names, columns.home, strict=True):
        there[columns.regions[home]] |= whole[table]
    for replica in replicas_document(columns, found, needed)["replicas"]:
        there[replica["region"]] |= set(replica["partitions"] or whole[replica["table"]])
    stored = [sum(sizes[split_read(name)[0]] / 4 for name in there[region]) for region in columns.regions]
    assert stored == pytest.approx(found.stored_bytes)
    for j, job in enumerate(columns.job_names):
        wanted: set[str] = set()
        for table in columns.job_table[columns.job_start[j] : columns.job_start[j + 1]]:
            name = columns.table_names[table]
            wanted |= {day for day in by_job[job] if split_read(day)[0] == name} or whole[name]
        kind = columns.gpu_type[j]
        able = [kind == NONE or columns.supply_h[kind, r] > 0 for r in range(len(columns.regions))]
        serving = [can and wanted <= there[region] for can, region in zip(able, columns.regions, strict=True)]
        assert candidate_regions(columns, found.pieces, needed)[j].tolist() == serving


def test_what_does_not_fit_is_told() -> None:
    """A job whose tables fit in no region stays unplaced, and the missing bytes are reported."""
    given = TetrisInstance(
        regions("r", "s", room=50.0),
        (PlacedTable("x", 40.0, "r"), PlacedTable("y", 45.0, "s")),
        (RecurringJob("j", "ml", ("x", "y"), 1, gpu_type="a", gpu_hours=1.0),),
    )
    columns = Columns.of(given)
    found = replicate(columns, columns.home, ONLY_JOBS)
    assert found.replicas == ()
    assert [(u.reason, u.short_bytes) for u in found.unplaced] == [("no_storage", 35.0)]


def test_high_priority_data_comes_first() -> None:
    """If storage is short, the tables of the higher level get their replicas."""
    given = TetrisInstance(
        (InstanceRegion("r", 100.0, {"a": 1.0}), InstanceRegion("s", 10.0, {"a": 1.0})),
        (PlacedTable("x", 8.0, "r"), PlacedTable("y", 8.0, "r")),
        (RecurringJob("j", "spark", ("x",), 4), RecurringJob("k", "spark", ("y",), 1)),
    )
    columns = Columns.of(given)
    found = replicate(columns, columns.home, ONLY_RECOVERY)
    assert [r.table for r in found.replicas] == [1]


def test_hot_tables_are_spread_by_supply() -> None:
    """The hottest tables of a GPU type go to the regions that have it, within each region's budget by supply."""
    jobs = tuple(RecurringJob(f"j{i}", "ml", ("x",), 3, gpu_type="a", gpu_hours=1.0) for i in range(3))
    jobs += tuple(RecurringJob(f"k{i}", "ml", ("y",), 3, gpu_type="a", gpu_hours=1.0) for i in range(2))
    given = TetrisInstance(
        (
            InstanceRegion("r", 100.0, {"a": 1.0}),
            InstanceRegion("s", 20.0, {"a": 3.0, "b": 1.0}),
            InstanceRegion("t", 100.0),
        ),
        (PlacedTable("x", 7.0, "r"), PlacedTable("y", 7.0, "r")),
        jobs,
    )
    columns = Columns.of(given)
    found = replicate(columns, columns.home, ReplicaPolicy(disaster_recovery_level=0, hot_jobs=2))
    # Of 20 bytes, half are for hot tables and three quarters of that for type a: enough for the hottest table only.
    assert [(r.table, columns.regions[r.region], r.reason) for r in found.replicas] == [(0, "s", "hot")]


def test_jobs_come_before_recovery_and_serve_it() -> None:
    """With space for one copy, a job without a region gets it; the copy also counts as the table's recovery replica."""
    given = TetrisInstance(
        (InstanceRegion("r", 100.0, {"a": 10.0}), InstanceRegion("s", 20.0, {"b": 10.0}), InstanceRegion("t", 0.0)),
        (PlacedTable("x", 15.0, "r"), PlacedTable("y", 15.0, "r")),
        (
            RecurringJob("j", "ml", ("x",), 1, gpu_type="a", gpu_hours=1.0),
            RecurringJob("k", "ml", ("y",), 7, gpu_type="b", gpu_hours=1.0),
        ),
    )
    columns = Columns.of(given)
    found = replicate(columns, columns.home, ONLY_RECOVERY)
    assert [(r.table, r.region, r.reason) for r in found.replicas] == [(1, 1, "no_region")]
    columns.capacity_bytes[2] = 100.0
    more = replicate(columns, columns.home, ONLY_RECOVERY)
    assert [(r.table, r.region, r.reason) for r in more.replicas] == [(1, 1, "no_region"), (0, 2, "disaster_recovery")]
    apart = ReplicaPolicy(correlated={("r", "s"): 0.1}, hot_jobs=1 << 30)
    assert [(r.table, r.region) for r in replicate(columns, columns.home, apart).replicas] == [(1, 1), (0, 2), (1, 2)]


def test_hot_data_of_high_priority_comes_first() -> None:
    """A hot table of priority 1 gets the budget before one of priority 7 that more jobs read."""
    jobs = tuple(RecurringJob(f"j{i}", "ml", ("x",), 7, gpu_type="a", gpu_hours=1.0) for i in range(12))
    jobs += tuple(RecurringJob(f"k{i}", "ml", ("y",), 1, gpu_type="a", gpu_hours=1.0) for i in range(10))
    given = TetrisInstance(
        regions("r", "s", room=30.0), (PlacedTable("x", 10.0, "r"), PlacedTable("y", 10.0, "r")), jobs
    )
    columns = Columns.of(given)
    found = replicate(columns, columns.home, ReplicaPolicy(disaster_recovery_level=0))
    assert [(r.table, columns.regions[r.region], r.reason) for r in found.replicas] == [(1, "s", "hot")]


def test_analytics_reads_from_afar() -> None:
    """Spark jobs may read remote tables, so they get no replicas; an ML job with the same tables does."""
    tables = (PlacedTable("x", 10.0, "r"), PlacedTable("y", 10.0, "r"), PlacedTable("z", 10.0, "s"))
    kinds = (("spark", None, []), ("spark", "a", [("z", "r")]), ("ml", None, [("z", "r")]))
    for kind, gpu_type, wanted in kinds:
        job = RecurringJob("j", kind, ("x", "y", "z"), 1, gpu_type=gpu_type)  # type: ignore[arg-type]
        columns = Columns.of(TetrisInstance((*regions("r"), InstanceRegion("s", 100.0)), tables, (job,)))
        found = replicate(columns, columns.home, ONLY_JOBS)
        assert [(columns.table_names[r.table], columns.regions[r.region]) for r in found.replicas] == wanted
        assert len(jobs_without_region(columns, found.held)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_capacity_is_kept_and_all_is_accounted_for(seed: int) -> None:
    """Replicas never exceed storage, held parts and bytes agree, and jobs without a region are reported."""
    columns = Columns.of(small_instance(seed, 12, 4, 25))
    found = replicate(columns, columns.home, ReplicaPolicy(hot_jobs=2))
    stored = (found.held * columns.size_bytes[:, None]).sum(axis=0)
    assert stored == pytest.approx(found.stored_bytes)
    homes = np.bincount(columns.home, weights=columns.size_bytes, minlength=4)
    assert (found.stored_bytes <= np.maximum(columns.capacity_bytes, homes) + 1e-6).all()
    assert set(jobs_without_region(columns, found.held)) <= {u.job for u in found.unplaced}
    assert all(columns.gpu_type[u.job] != NONE or u.reason == "no_storage" for u in found.unplaced)


def test_hardly_any_job_is_left_without_a_region() -> None:
    """On an instance like MAST's with space for replicas, at most one job in a thousand has no region."""
    columns = generate(2000, 8, seed=1)
    columns.capacity_bytes[:] *= 3.0
    before = candidate_regions(columns, replicate(columns, columns.home, ONLY_JOBS).held)
    found = replicate(columns, columns.home, ReplicaPolicy())
    assert len(jobs_without_region(columns, found.held)) <= 0.001 * len(columns.kind)
    assert candidate_regions(columns, found.held).sum() > before.sum()
