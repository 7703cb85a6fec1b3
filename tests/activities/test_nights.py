"""A night's plan: its inputs, its rows and objects, and the moves that are left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.data.night_moves import moves_of, tidy
from activities.data.nights import forget_nights
from domain.nights import NightRef
from infra.db.models import Datacenter, Region
from infra.db.nights import Night, NightMove, begin_night
from infra.db.tables import Replica, ReplicaPartition
from tests.activities.nights import NIGHT, NightWorld, body
from tests.activities.world import World
from tetris.documents import read_plan
from tetris.folders import read_folder
from tetris.report import Summary


@pytest.fixture
def nights(world: World) -> NightWorld:
    """East has GPUs and no tables; its jobs read tables in west."""
    made = NightWorld(world, daily_quota_bytes=10**6)
    for region in ("east", "west"):
        made.region(region)
    world.machine("east/c/m", 4)
    for table in ("a", "b"):
        made.table(table, "west")
        made.usage(f"job-{table}", table)
    return made


def _plan(nights: NightWorld) -> None:
    ActivityEnvironment().run(nights.nights.plan_night, NightRef(NIGHT))


def _night(nights: NightWorld) -> Night:
    with nights.world.session() as session:
        found: Night = session.get_one(Night, NIGHT)
        return found


def _moves(nights: NightWorld) -> list[tuple[str, str, str, str]]:
    with nights.world.session() as session:
        rows = session.scalars(select(NightMove).order_by(NightMove.number))
        return [(row.kind, row.data_table, row.target_region, row.state) for row in rows]


def test_a_plan_is_published_with_all_that_it_rests_on(nights: NightWorld, tmp_path: Path) -> None:
    """Instance, plan, replicas and moves are stored as objects, moves and report as rows; a repetition adds nothing."""
    ticket = nights.nights.open_night(NightRef(NIGHT))
    assert (ticket.state, ticket.lanes) == ("planning", 4)
    _plan(nights)
    night = _night(nights)
    assert (night.state, night.problem) == ("moving", None) and night.planned_at is not None
    assert _moves(nights)[:2] == [("home", "a", "east", "waiting"), ("home", "b", "east", "waiting")]
    assert night.report is not None
    summary = Summary.of(night.report["summary"])
    assert (summary.tables, summary.moved_tables) == (2, 2) and summary.after.total < summary.before.total
    bucket = nights.world.bucket("east")
    assert night.artifact_url == bucket.uri(f"tetris/nights/{NIGHT}/")
    kept = {info.key.removeprefix(f"tetris/nights/{NIGHT}/"): info.key for info in bucket.list("tetris/nights/")}
    for name, key in kept.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bucket.get(key))
    plan = read_plan((tmp_path / "plan.json").read_bytes(), ["a", "b"], ["east", "west"])
    assert plan == {"a": "east", "b": "east"}
    instance = read_folder(tmp_path / "instance").to_instance()
    assert [table.home for table in instance.tables] == ["west", "west"] and instance.move_quota_bytes == 10**6
    assert instance.weights.by_priority == {1: 4.0, 2: 2.0}
    _plan(nights)
    assert nights.nights.open_night(NightRef(NIGHT)).state == "moving"
    assert nights.nights.open_night(NightRef("another")).state == "skipped"
    nights.nights.end_night(NightRef(NIGHT))
    assert {state for *_, state in _moves(nights)} == {"left"} and _night(nights).state == "ended"
    assert nights.nights.open_night(NightRef("another")).state == "planning"


def test_a_catalogue_that_does_not_suffice_fails_the_night(nights: NightWorld) -> None:
    """A night that lacks a catalogue value fails and names it; the next night may begin."""
    nights.world.alter(Region, "west", storage_bytes=None)
    nights.nights.open_night(NightRef(NIGHT))
    with pytest.raises(ApplicationError, match="storage_bytes of region west: is not set") as refused:
        _plan(nights)
    assert refused.value.non_retryable
    nights.nights.end_night(NightRef(NIGHT, str(refused.value)))
    night = _night(nights)
    assert night.state == "failed" and "region west" in str(night.problem)


def test_a_dry_run_moves_nothing(nights: NightWorld) -> None:
    """A dry run has moves but begins none, and does not give up copies of earlier nights."""
    with nights.world.session() as session:
        begin_night(session, NIGHT, 3600.0, dry_run=True)
        session.add(Replica(data_table="a", region="east", state="copying", made_by="night"))
    _plan(nights)
    assert nights.next().over
    nights.nights.end_night(NightRef(NIGHT))
    assert nights.states() == ["left: the night was a dry run"] * len(nights.states()) and nights.states()
    assert nights.replicas("a") == {"east": "copying", "west": "ready"}


def _decided(tmp_path: Path, moves: list[dict[str, Any]], wanted: list[tuple[str, str]]) -> Path:
    (tmp_path / "moves.jsonl").write_text("".join(json.dumps(move) + "\n" for move in moves))
    (tmp_path / "replicas.json").write_text(
        json.dumps({"replicas": [{"table": table, "region": region} for table, region in wanted]})
    )
    return tmp_path


def _move(kind: str, table: str, source: str, target: str, size: int = 10) -> dict[str, Any]:
    return {"kind": kind, "table": table, "source": source, "target": target, "size_bytes": size, "why": {}}


def test_what_is_dropped_refreshed_and_over_the_quota(nights: NightWorld, tmp_path: Path) -> None:
    """Unwanted replicas of nights and workloads are dropped; wanted and operators' replicas are kept and refreshed."""
    for table, owner in (("night", {"made_by": "night"}), ("job", {"made_by": "workload"}), ("ops", {})):
        nights.table(table, "west", "east")
        nights.world.alter(Replica, (table, "east"), **owner)
        nights.append(table, "ds=3")
    moves = [_move("home", "a", "west", "east"), _move("replica", "b", "west", "east", 1000)]
    folder = _decided(tmp_path, moves, [("job", "east"), ("a", "west")])
    with nights.world.session() as session:
        rows = list(moves_of(session, folder, 800.0))
    told = [(r["kind"], r["data_table"], r["target_region"], r["state"], r["keeps_source"]) for r in rows]
    assert told == [
        ("drop", "night", "east", "waiting", False),
        ("home", "a", "east", "waiting", True),
        ("refresh", "job", "east", "waiting", False),
        ("refresh", "ops", "east", "waiting", False),
        ("replica", "b", "east", "left", False),
    ]
    assert rows[-1]["left_because"] == "the daily quota of moved bytes is used up"


def test_the_quota_is_of_the_day(nights: NightWorld) -> None:
    """The quota counts the bytes that all nights moved on this day; moves of earlier days do not count."""
    from infra.db.nights import quota_left_bytes

    nightly = nights.world.settings.tetris.nightly
    nights.nights.open_night(NightRef(NIGHT))
    way = {"night": NIGHT, "kind": "home", "source_region": "west", "target_region": "east"}
    with nights.world.session() as session:
        for number, (size, at) in enumerate(((300, func.now()), (500, func.now() - func.make_interval(0, 0, 0, 1))), 1):
            session.add(NightMove(number=number, data_table=f"t{number}", size_bytes=size, begun_at=at, **way))
        session.flush()
        assert quota_left_bytes(session, nightly) == 10**6 - 300


def test_copies_that_no_night_goes_on_with_are_given_up(nights: NightWorld) -> None:
    """Copies of an earlier night are given up unless this night or a workload wants them."""
    for table, owner in (("a", None), ("b", None), ("c", "wl-1")):
        if table == "c":
            nights.table("c", "west")
        with nights.world.session() as session:
            session.add(
                Replica(data_table=table, region="east", state="copying", made_by="night", requested_by=owner)
            )  # fmt: skip
    nights.night({**_row("a")})
    with nights.world.session() as session:
        tidy(session, NIGHT, 0.0)
    assert [nights.replicas(table)["east"] for table in "abc"] == ["copying", "deleting", "copying"]


def _row(table: str) -> dict[str, Any]:
    return {"kind": "home", "data_table": table, "source_region": "west", "target_region": "east", "size_bytes": 1}


def test_old_nights_are_forgotten_with_their_objects(nights: NightWorld) -> None:
    """Old nights are deleted with their objects after the retention time."""
    bucket = nights.world.bucket("east")
    for name in ("old", "new"):
        nights.night(_row("a"), night=name)
        bucket.put(f"tetris/nights/{name}/plan.json", b"{}")
        nights.nights.end_night(NightRef(name))
        nights.world.alter(Night, name, artifact_url=bucket.uri(f"tetris/nights/{name}/"))
    nights.world.alter(Night, "old", ended_at=func.now() - func.make_interval(0, 0, 0, 9))
    forget_nights(nights.world.engine, 86400.0)
    assert [info.key for info in bucket.list("tetris/nights/")] == ["tetris/nights/new/plan.json"]
    with nights.world.session() as session:
        assert session.scalars(select(Night.id)).all() == ["new"]


def test_partitions_go_to_datacenters_after_the_moves(nights: NightWorld) -> None:
    """Each partition in a region with datacenters is assigned to one; a region without sizes gets an event."""
    with nights.world.session() as session:
        session.add(Datacenter(region="west", name="one", storage_bytes=10**6))
        session.add(Datacenter(region="west", name="two", storage_bytes=10**6))
        session.add(Datacenter(region="east", name="only"))
    nights.night()
    ActivityEnvironment().run(nights.nights.assign_partitions, NightRef(NIGHT))
    with nights.world.session() as session:
        rows = session.execute(select(ReplicaPartition.region, ReplicaPartition.datacenter)).all()
    assert len(rows) == 4 and {region for region, _ in rows} == {"west"}
    assert {datacenter for _, datacenter in rows} <= {"one", "two"}
    told = [(e["region"], e["detail"]["problem"]) for e in nights.world.events(kind="datacenters.left")]
    assert [region for region, _ in told] == ["east"]
    assert "storage_bytes of datacenter only of east: is not set" in told[0][1]
    assert nights.world.bucket("east").size(f"tetris/nights/{NIGHT}/datacenters/west/plan.json")


def test_only_the_partitions_that_a_job_reads_are_moved(nights: NightWorld) -> None:
    """If a job reads one day of a table, only that day is replicated. (The quota is too small for a home.)"""
    nights = NightWorld(nights.world, daily_quota_bytes=len(body("a", "ds=1")))
    nights.region("south")
    nights.world.machine("south/c/m", 4, gpu_type="h100")
    nights.table("wide", "west")
    for number in range(3):
        nights.usage(f"west-{number}", "wide", "a", hours=200.0)
    nights.usage("some", "wide/ds=1", gpu_type="h100", hours=1.0, priority=7)
    nights.nights.open_night(NightRef(NIGHT))
    _plan(nights)
    with nights.world.session() as session:
        moves = session.scalars(select(NightMove).where(NightMove.data_table == "wide", NightMove.kind == "replica"))
        found = [(m.target_region, m.partitions, m.size_bytes, m.why.get("job")) for m in moves]
    assert ("south", ["ds=1"], len(body("wide", "ds=1")), "ml/some") in found


def test_replicas_that_may_be_dropped_make_no_room(nights: NightWorld) -> None:
    """A region full of droppable replicas gets no more homes than its storage allows."""
    size = sum(len(body("a", day)) for day in ("ds=1", "ds=2"))
    nights.world.alter(Region, "east", storage_bytes=size + 1)
    for table in ("a", "b", "c", "d"):
        if table in "cd":
            nights.table(table, "west")
            nights.usage(f"job-{table}", table)
        with nights.world.session() as session:
            session.add(Replica(data_table=table, region="east", state="ready", made_by="night"))
    nights.nights.open_night(NightRef(NIGHT))
    _plan(nights)
    homes = [move for move in _moves(nights) if move[0] == "home"]
    assert len(homes) == 1 and homes[0][2] == "east"


def test_replicas_that_stay_take_room(nights: NightWorld) -> None:
    """Storage that an operator's replica uses is not available to moves."""
    nights.world.alter(Region, "east", storage_bytes=len(body("a", "ds=1")) * 2 + 1)
    nights.table("kept", "west", "east")
    nights.nights.open_night(NightRef(NIGHT))
    _plan(nights)
    assert [move for move in _moves(nights) if move[2] == "east"] == []
