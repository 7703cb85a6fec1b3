"""Simulation of a day of an instance's jobs on a placement: gangs, hardware, and non-colocated workloads."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from domain.instance import InstanceRegion, PlacedTable, Reads, RecurringJob, TetrisInstance
from mizzen_client.cli.app import run as mizzen
from research.tetris.generate import generate
from research.traces.instance_day import day_of, placement_of
from tests.simulation.scenarios import happenings, when, where
from tetris.columns import ML, NONE, Columns
from tetris.documents import InstanceDocumentError, ReplicaEntry, instance_document, read_replicas
from tetris.pieces import RequiredPieces
from tetris.replicas import ReplicaPolicy, jobs_without_region, replicas_document, replicate

APART = TetrisInstance(
    (
        InstanceRegion("r", 100.0, {"a": 384.0}),
        InstanceRegion("s", 100.0, {"a": 240.0}),
        InstanceRegion("t", 100.0, {"b": 24.0}),
    ),
    (PlacedTable("x", 10.0, "r"), PlacedTable("y", 10.0, "s"), PlacedTable("z", 10.0, "t", ("r",))),
    (
        RecurringJob("both", "ml", ("x", "y"), 2, gpu_type="a", gpu_hours=48.0),
        RecurringJob("here", "ml", ("x",), 5, gpu_type="a", gpu_hours=8.0),
        RecurringJob("kept", "ml", ("z",), 1, gpu_type="a", gpu_hours=8.0),
        RecurringJob("never", "ml", ("x",), 3, gpu_type="c", gpu_hours=8.0),
        RecurringJob("report", "spark", ("x", "y"), 1),
    ),
)
"""`both` has its tables in two regions; no region has the GPU type that `never` requests."""


def copy(table: str, region: str, *partitions: str) -> ReplicaEntry:
    """Returns a replica of some partitions or of the whole table."""
    return ReplicaEntry(table=table, region=region, part=0.2 if partitions else 1.0, partitions=[*partitions] or None)


def test_a_workload_whose_data_is_apart_is_counted_and_waits() -> None:
    """Without a replica, no region has both tables of `both`, so it waits and counts as non-colocated.

    A job whose GPU type exists in no region does not count as non-colocated.
    """
    columns = Columns.of(APART)
    run, seen = happenings(day_of(columns, placement_of(columns, columns.home, None)))
    assert where(seen) == {"here": "r", "kept": "r"}
    outcome = run.to_json()["run"]
    assert {level: count for level, count in outcome["non_colocated"].items() if count} == {"2": 1, "all": 1}
    assert outcome["arrived"]["all"] == 4 and outcome["fit_nowhere"] == ["never"]
    assert outcome["non_colocated_rate"]["all"] == 0.25 and outcome["non_colocated_rate"]["4"] is None


def test_a_replica_lets_it_run() -> None:
    """With a copy of one table next to the other, the job runs there; the partitions that it reads are enough."""
    columns = Columns.of(APART)
    reads = Reads({"y/1": 1.0, "y/2": 1.0, "z/1": 1.0}, {"both": ("y/1", "y/2"), "kept": ("z/1",)})
    needed = RequiredPieces.of(columns, reads)
    for replica in (copy("y", "r"), copy("y", "r", "y/1", "y/2")):
        placement = placement_of(columns, columns.home, [replica, copy("z", "r")], needed)
        run, seen = happenings(day_of(columns, placement))
        assert where(seen) == {"here": "r", "kept": "r", "both": "r"}
        assert run.to_json()["run"]["non_colocated"]["all"] == 0
    part = placement_of(columns, columns.home, [copy("y", "r", "y/1"), copy("z", "r", "z/1")], needed)
    assert where(happenings(day_of(columns, part))[1]) == {"here": "r", "kept": "r"}
    with pytest.raises(ValueError, match=r"replicas\.0\.partitions: 'y/1' is read by no job"):
        placement_of(columns, columns.home, [copy("y", "r", "y/1")])


def test_replicas_replace_those_that_were() -> None:
    """The given replicas replace all others, and a home that moves away leaves no copy."""
    columns = Columns.of(APART)
    only = placement_of(columns, columns.home, [])
    assert only.held.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    moved = placement_of(columns, columns.homes_of({"x": "s"}), None)
    assert moved.held.tolist() == [[0, 1, 0], [0, 1, 0], [1, 0, 1]]


def test_each_days_work_is_that_of_the_jobs() -> None:
    """Every ML job with GPUs arrives once a day with its GPU hours; each region has the supply of a day.

    A workload runs for a day at most.
    """
    columns = generate(60, 5, seed=2)
    scene = day_of(columns, placement_of(columns, columns.home, None), seed=4, days=2)
    mine = np.flatnonzero((columns.kind == ML) & (columns.gpu_type != NONE) & (columns.gpu_h > 0))
    hours = {columns.job_names[j]: float(columns.gpu_h[j]) for j in mine}
    assert Counter(w.id.partition("~")[0] for w in scene.workloads) == dict.fromkeys(hours, 2)
    for w in scene.workloads:
        assert w.gpus * w.duration_s / 3600 == pytest.approx(hours[w.id.partition("~")[0]])
        assert w.duration_s <= 86400
        assert (w.submit_s >= 86400) == ("~" in w.id) and w.submit_s < 2 * 86400
    for r, region in enumerate(columns.regions):
        slots = Counter[str]()
        for machine in scene.machines[region]:
            slots[str(machine.gpu_type)] += machine.gpus
        supply = {g: round(float(h) / 24) for g, h in zip(columns.gpu_types, columns.supply_h[:, r], strict=True) if h}
        assert slots == supply


def test_the_scheduler_finds_what_replicas_are_for() -> None:
    """On an instance like MAST's, replicas let all jobs run, in regions with their data and hardware.

    Without replicas, some jobs have no region.
    """
    columns = generate(30, 4, seed=1)
    columns.capacity_bytes[:] *= 4.0
    home = np.random.default_rng(1).integers(4, size=30).astype(np.int32)
    found = replicate(columns, home, ReplicaPolicy())
    document = json.dumps(replicas_document(columns, found))
    known = {"table": columns.table_names, "region": columns.regions, "job": columns.job_names}
    placement = placement_of(columns, home, read_replicas(document, known))
    assert np.array_equal(placement.held, found.held)
    with_replicas, seen = happenings(day_of(columns, placement))
    assert with_replicas.to_json()["run"]["non_colocated"]["all"] == 0
    number = {name: j for j, name in enumerate(columns.job_names)}
    for workload, region in where(seen).items():
        edges = slice(columns.job_start[number[workload]], columns.job_start[number[workload] + 1])
        assert (found.held[columns.job_table[edges], columns.regions.index(region)] == 1).all()
    homes = placement_of(columns, home, [])
    without, unseen = happenings(day_of(columns, homes))
    # Some gangs are also too large for the region that has their data.
    assert without.to_json()["run"]["non_colocated"]["all"] >= len(jobs_without_region(columns, homes.held)) > 0
    assert len(when(unseen, "started")) < len(when(seen, "started"))


def test_simulate_takes_an_instance_with_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mizzen simulate --instance` runs a day on a plan and replicas, and rejects options that exclude each other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "instance.json").write_text(json.dumps(instance_document(APART)))
    (tmp_path / "plan.json").write_text('{"version": 1, "homes": {"z": "s"}}')
    (tmp_path / "replicas.json").write_text(
        '{"version": 1, "replicas": [{"table": "x", "region": "s"}], "unplaced": []}'
    )
    base = ["simulate", "--instance", "instance.json", "--json", "out.json"]

    def counted(*more: str) -> int:
        assert run([*base, *more]) == 0
        return int(json.loads((tmp_path / "out.json").read_text())["run"]["non_colocated"]["all"])

    assert counted() == 1
    assert counted("--replicas", "replicas.json") == 1
    assert counted("--plan", "plan.json", "--replicas", "replicas.json") == 0
    (tmp_path / "reads.json").write_text(
        '{"version": 1, "partitions": {"x/1": 2}, "reads": [{"job": "both", "partitions": ["x/1"]}]}'
    )
    (tmp_path / "parts.json").write_text(
        '{"version": 1, "replicas": [{"table": "x", "region": "s", "part": 0.2, "partitions": ["x/1"]}]}'
    )
    assert counted("--plan", "plan.json", "--replicas", "parts.json", "--reads", "reads.json") == 0
    for wrong in (
        ["--replicas", "parts.json"],
        ["--fleet", "fleet.yaml"],
        ["--plan", "none.json"],
    ):
        assert run([*base, *wrong]) == 2
    assert run(["simulate", "--fleet", "f.yaml", "--trace", "t.csv", "--plan", "plan.json"]) == 2


def run(arguments: list[str]) -> int:
    """Returns the exit code of a command."""
    try:
        return mizzen(arguments)
    except SystemExit as left:
        return int(left.code or 0)


def test_replicas_of_something_else_are_named() -> None:
    """An unknown name in a replicas document is reported together with the existing names."""
    known = {"table": ("x",), "region": ("r",), "job": ("j",)}
    text = '{"version": 1, "replicas": [{"table": "x", "region": "q"}, {"table": "w", "region": "r", "part": 2}]}'
    with pytest.raises(InstanceDocumentError, match=r"replicas\.1\.part: 2: .*must be at most 1"):
        read_replicas(text, known)
    some = '{"version": 1, "replicas": [{"table": "x", "region": "r", "part": 0.5}, '
    some += '{"table": "x", "region": "r", "partitions": ["y/1"]}]}'
    with pytest.raises(
        InstanceDocumentError, match=r"0\.partitions: null: .*\n.*1\.partitions: 'y/1' is not a partition of table 'x'"
    ):
        read_replicas(some, known)
    with pytest.raises(
        InstanceDocumentError, match=r"replicas\.0\.region: 'q' is not a region .* it has r\n.*'w' is not a"
    ):
        read_replicas(text.replace(', "part": 2', ""), known)
