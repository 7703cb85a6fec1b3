"""A placement run's plan: its inputs, its rows and objects, and the moves that are left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.data.placement_moves import moves_of, tidy
from activities.lifecycle.housekeeping import HousekeepingActivities
from domain.placement_runs import PlacementRunRef
from infra.db.models import Datacenter, Region
from infra.db.placement_runs import PlacementMove, PlacementRun, begin_placement_run
from infra.db.tables import Replica, ReplicaPartition
from research.tetris.instances import to_instance
from tests.activities.placement_runs import PLACEMENT_RUN, PlacementWorld, body
from tests.activities.world import World
from tetris.documents import read_plan
from tetris.folders import read_folder
from tetris.report import Summary


@pytest.fixture
def placement_runs(world: World) -> PlacementWorld:
    """East has GPUs and no tables; its jobs read tables in west."""
    made = PlacementWorld(world, daily_quota_bytes=10**6)
    for region in ("east", "west"):
        made.region(region)
    world.machine("east/c/m", 4)
    for table in ("a", "b"):
        made.table(table, "west")
        made.usage(f"job-{table}", table)
    return made


def _plan(placement_runs: PlacementWorld) -> None:
    ActivityEnvironment().run(placement_runs.placement_runs.plan_placement_run, PlacementRunRef(PLACEMENT_RUN))


def _placement_run(placement_runs: PlacementWorld) -> PlacementRun:
    with placement_runs.world.session() as session:
        found: PlacementRun = session.get_one(PlacementRun, PLACEMENT_RUN)
        return found


def _moves(placement_runs: PlacementWorld) -> list[tuple[str, str, str, str]]:
    with placement_runs.world.session() as session:
        rows = session.scalars(select(PlacementMove).order_by(PlacementMove.number))
        return [(row.kind, row.data_table, row.target_region, row.state) for row in rows]


@pytest.mark.rotating
def test_a_plan_is_published_with_all_that_it_rests_on(placement_runs: PlacementWorld, tmp_path: Path) -> None:
    """Instance, plan, replicas and moves are stored as objects, moves and report as rows; a repetition adds nothing."""
    ticket = placement_runs.placement_runs.open_placement_run(PlacementRunRef(PLACEMENT_RUN))
    assert (ticket.state, ticket.lanes) == ("planning", 4)
    _plan(placement_runs)
    placement_run = _placement_run(placement_runs)
    assert (placement_run.state, placement_run.problem) == ("moving", None) and placement_run.planned_at is not None
    assert _moves(placement_runs)[:2] == [("home", "a", "east", "waiting"), ("home", "b", "east", "waiting")]
    assert placement_run.report is not None
    summary = Summary.of(placement_run.report["summary"])
    assert (summary.tables, summary.moved_tables) == (2, 2) and summary.after.total < summary.before.total
    bucket = placement_runs.world.bucket("east")
    assert placement_run.artifact_url == bucket.uri(f"tetris/placement-runs/{PLACEMENT_RUN}/")
    kept = {
        info.key.removeprefix(f"tetris/placement-runs/{PLACEMENT_RUN}/"): info.key
        for info in bucket.list("tetris/placement-runs/")
    }
    for name, key in kept.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bucket.get(key))
    plan = read_plan((tmp_path / "plan.json").read_bytes(), ["a", "b"], ["east", "west"])
    assert plan == {"a": "east", "b": "east"}
    instance = to_instance(read_folder(tmp_path / "instance"))
    assert [table.home for table in instance.tables] == ["west", "west"] and instance.move_quota_bytes == 10**6
    assert instance.weights.by_priority == {1: 4.0, 2: 2.0}
    _plan(placement_runs)
    assert placement_runs.placement_runs.open_placement_run(PlacementRunRef(PLACEMENT_RUN)).state == "moving"
    assert placement_runs.placement_runs.open_placement_run(PlacementRunRef("another")).state == "skipped"
    placement_runs.placement_runs.end_placement_run(PlacementRunRef(PLACEMENT_RUN))
    assert {state for *_, state in _moves(placement_runs)} == {"left"} and _placement_run(
        placement_runs
    ).state == "ended"
    assert placement_runs.placement_runs.open_placement_run(PlacementRunRef("another")).state == "planning"


def test_an_insufficient_catalogue_fails_the_placement_run(placement_runs: PlacementWorld) -> None:
    """A placement run that lacks a catalogue value fails and names it; the next placement run may begin."""
    placement_runs.world.alter(Region, "west", storage_bytes=None)
    placement_runs.placement_runs.open_placement_run(PlacementRunRef(PLACEMENT_RUN))
    with pytest.raises(ApplicationError, match="storage_bytes of region west: is not set") as refused:
        _plan(placement_runs)
    assert refused.value.non_retryable
    placement_runs.placement_runs.end_placement_run(PlacementRunRef(PLACEMENT_RUN, str(refused.value)))
    placement_run = _placement_run(placement_runs)
    assert placement_run.state == "failed" and "region west" in str(placement_run.problem)


@pytest.mark.rotating
def test_a_dry_run_moves_nothing(placement_runs: PlacementWorld) -> None:
    """A dry run has moves but begins none, and does not give up copies of earlier placement runs."""
    with placement_runs.world.session() as session:
        begin_placement_run(session, PLACEMENT_RUN, 3600.0, dry_run=True)
        session.add(Replica(data_table="a", region="east", state="copying", made_by="placement_run"))
    _plan(placement_runs)
    assert placement_runs.next().over
    placement_runs.placement_runs.end_placement_run(PlacementRunRef(PLACEMENT_RUN))
    assert (
        placement_runs.states() == ["left: the placement run was a dry run"] * len(placement_runs.states())
        and placement_runs.states()
    )
    assert placement_runs.replicas("a") == {"east": "copying", "west": "ready"}


def _decided(tmp_path: Path, moves: list[dict[str, Any]], wanted: list[tuple[str, str]]) -> Path:
    (tmp_path / "moves.jsonl").write_text("".join(json.dumps(move) + "\n" for move in moves))
    (tmp_path / "replicas.json").write_text(
        json.dumps({"replicas": [{"table": table, "region": region} for table, region in wanted]})
    )
    return tmp_path


def _move(kind: str, table: str, source: str, target: str, size: int = 10) -> dict[str, Any]:
    return {"kind": kind, "table": table, "source": source, "target": target, "size_bytes": size, "why": {}}


def test_what_is_dropped_refreshed_and_over_the_quota(placement_runs: PlacementWorld, tmp_path: Path) -> None:
    """Unwanted replicas of placement runs and workloads are dropped; wanted and operators' replicas are kept and
    refreshed.
    """
    for table, owner in (
        ("placement_run", {"made_by": "placement_run"}),
        ("job", {"made_by": "workload"}),
        ("ops", {}),
    ):
        placement_runs.table(table, "west", "east")
        placement_runs.world.alter(Replica, (table, "east"), **owner)
        placement_runs.append(table, "ds=3")
    moves = [_move("home", "a", "west", "east"), _move("replica", "b", "west", "east", 1000)]
    folder = _decided(tmp_path, moves, [("job", "east"), ("a", "west")])
    with placement_runs.world.session() as session:
        rows = list(moves_of(session, folder, 800.0))
    told = [(r["kind"], r["data_table"], r["target_region"], r["state"], r["keeps_source"]) for r in rows]
    assert told == [
        ("drop", "placement_run", "east", "waiting", False),
        ("home", "a", "east", "waiting", True),
        ("refresh", "job", "east", "waiting", False),
        ("refresh", "ops", "east", "waiting", False),
        ("replica", "b", "east", "left", False),
    ]
    assert rows[-1]["left_because"] == "the daily quota of moved bytes is used up"


def test_the_quota_is_of_the_day(placement_runs: PlacementWorld) -> None:
    """The quota counts the bytes that all placement runs moved on this day; moves of earlier days do not count."""
    from infra.db.placement_runs import quota_left_bytes

    nightly = placement_runs.world.settings.tetris.nightly
    placement_runs.placement_runs.open_placement_run(PlacementRunRef(PLACEMENT_RUN))
    way = {"placement_run": PLACEMENT_RUN, "kind": "home", "source_region": "west", "target_region": "east"}
    with placement_runs.world.session() as session:
        for number, (size, at) in enumerate(((300, func.now()), (500, func.now() - func.make_interval(0, 0, 0, 1))), 1):
            session.add(PlacementMove(number=number, data_table=f"t{number}", size_bytes=size, begun_at=at, **way))
        session.flush()
        assert quota_left_bytes(session, nightly) == 10**6 - 300


def test_copies_that_no_placement_run_continues_are_dropped(placement_runs: PlacementWorld) -> None:
    """Copies of an earlier placement run are given up unless this placement run or a workload wants them."""
    for table, owner in (("a", None), ("b", None), ("c", "wl-1")):
        if table == "c":
            placement_runs.table("c", "west")
        with placement_runs.world.session() as session:
            session.add(
                Replica(data_table=table, region="east", state="copying", made_by="placement_run", requested_by=owner)
            )  # fmt: skip
    placement_runs.placement_run({**_row("a")})
    with placement_runs.world.session() as session:
        tidy(session, PLACEMENT_RUN, 0.0)
    assert [placement_runs.replicas(table)["east"] for table in "abc"] == ["copying", "deleting", "copying"]


def _row(table: str) -> dict[str, Any]:
    return {"kind": "home", "data_table": table, "source_region": "west", "target_region": "east", "size_bytes": 1}


def test_old_placement_runs_are_deleted_with_their_objects(placement_runs: PlacementWorld) -> None:
    """Old placement runs are deleted with their objects after the retention time."""
    bucket = placement_runs.world.bucket("east")
    for name in ("old", "new"):
        placement_runs.placement_run(_row("a"), placement_run=name)
        bucket.put(f"tetris/placement-runs/{name}/plan.json", b"{}")
        placement_runs.placement_runs.end_placement_run(PlacementRunRef(name))
        placement_runs.world.alter(PlacementRun, name, artifact_url=bucket.uri(f"tetris/placement-runs/{name}/"))
    placement_runs.world.alter(PlacementRun, "old", ended_at=func.now() - func.make_interval(0, 0, 0, 91))
    ActivityEnvironment().run(HousekeepingActivities(placement_runs.world.engine, placement_runs.world.settings).expire)
    assert [info.key for info in bucket.list("tetris/placement-runs/")] == ["tetris/placement-runs/new/plan.json"]
    with placement_runs.world.session() as session:
        assert session.scalars(select(PlacementRun.id)).all() == ["new"]


@pytest.mark.rotating
def test_partitions_go_to_datacenters_after_the_moves(placement_runs: PlacementWorld) -> None:
    """Each partition in a region with datacenters is assigned to one; a region without sizes gets an event."""
    with placement_runs.world.session() as session:
        session.add(Datacenter(region="west", name="one", storage_bytes=10**6))
        session.add(Datacenter(region="west", name="two", storage_bytes=10**6))
        session.add(Datacenter(region="east", name="only"))
    placement_runs.placement_run()
    ActivityEnvironment().run(placement_runs.placement_runs.assign_partitions, PlacementRunRef(PLACEMENT_RUN))
    with placement_runs.world.session() as session:
        rows = session.execute(select(ReplicaPartition.region, ReplicaPartition.datacenter)).all()
    assert len(rows) == 4 and {region for region, _ in rows} == {"west"}
    assert {datacenter for _, datacenter in rows} <= {"one", "two"}
    told = [(e["region"], e["detail"]["problem"]) for e in placement_runs.world.events(kind="datacenters.left")]
    assert [region for region, _ in told] == ["east"]
    assert "storage_bytes of datacenter only of east: is not set" in told[0][1]
    assert placement_runs.world.bucket("east").size(f"tetris/placement-runs/{PLACEMENT_RUN}/datacenters/west/plan.json")


@pytest.mark.rotating
def test_only_the_partitions_that_a_job_reads_are_moved(placement_runs: PlacementWorld) -> None:
    """If a job reads one day of a table, only that day is replicated. (The quota is too small for a home.)"""
    placement_runs = PlacementWorld(placement_runs.world, daily_quota_bytes=len(body("a", "ds=1")))
    placement_runs.region("south")
    placement_runs.world.machine("south/c/m", 4, gpu_type="h100")
    placement_runs.table("wide", "west")
    for number in range(3):
        placement_runs.usage(f"west-{number}", "wide", "a", hours=200.0)
    placement_runs.usage("some", "wide/ds=1", gpu_type="h100", hours=1.0, priority=7)
    placement_runs.placement_runs.open_placement_run(PlacementRunRef(PLACEMENT_RUN))
    _plan(placement_runs)
    with placement_runs.world.session() as session:
        moves = session.scalars(
            select(PlacementMove).where(PlacementMove.data_table == "wide", PlacementMove.kind == "replica")
        )
        found = [(m.target_region, m.partitions, m.size_bytes, m.why.get("job")) for m in moves]
    assert ("south", ["ds=1"], len(body("wide", "ds=1")), "ml/some") in found


@pytest.mark.long
def test_replicas_that_may_be_dropped_make_no_room(placement_runs: PlacementWorld) -> None:
    """A region full of droppable replicas gets no more homes than its storage allows."""
    size = sum(len(body("a", day)) for day in ("ds=1", "ds=2"))
    placement_runs.world.alter(Region, "east", storage_bytes=size + 1)
    for table in ("a", "b", "c", "d"):
        if table in "cd":
            placement_runs.table(table, "west")
            placement_runs.usage(f"job-{table}", table)
        with placement_runs.world.session() as session:
            session.add(Replica(data_table=table, region="east", state="ready", made_by="placement_run"))
    placement_runs.placement_runs.open_placement_run(PlacementRunRef(PLACEMENT_RUN))
    _plan(placement_runs)
    homes = [move for move in _moves(placement_runs) if move[0] == "home"]
    assert len(homes) == 1 and homes[0][2] == "east"


@pytest.mark.long
def test_replicas_that_stay_take_room(placement_runs: PlacementWorld) -> None:
    """Storage that an operator's replica uses is not available to moves."""
    placement_runs.world.alter(Region, "east", storage_bytes=len(body("a", "ds=1")) * 2 + 1)
    placement_runs.table("kept", "west", "east")
    placement_runs.placement_runs.open_placement_run(PlacementRunRef(PLACEMENT_RUN))
    _plan(placement_runs)
    assert [move for move in _moves(placement_runs) if move[2] == "east"] == []
