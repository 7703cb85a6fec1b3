"""Moves of a placement run: their order, when they may begin, and the switch of a table's home."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from domain.placement_runs import PlacementRunRef
from infra.db.catalogue import want_replica
from infra.db.models import Region, Workload
from infra.db.placement_runs import PlacementPause, PlacementRun
from infra.db.tables import Replica
from tests.activities.placement_runs import PLACEMENT_RUN, PlacementWorld, body, home
from tests.activities.world import World


@pytest.fixture
def placement_runs(world: World) -> PlacementWorld:
    """Two regions, with three tables in the first."""
    made = PlacementWorld(world)
    for region in ("east", "west"):
        made.region(region)
    for table in ("a", "b", "c"):
        made.table(table, "east")
    return made


def test_a_home_moves_with_its_copy_in_grace(placement_runs: PlacementWorld) -> None:
    """The home is switched when the copy is complete; the old copy stays for its grace."""
    placement_runs.placement_run(home("a", "east", "west"))
    order = placement_runs.next()
    assert (order.table, order.source_region, order.target_region) == ("a", "east", "west")
    assert placement_runs.replicas("a") == {"east": "ready", "west": "copying"}
    assert not placement_runs.finish(order)  # nothing has been copied yet
    assert placement_runs.homes()["a"] == "east"
    placement_runs.copy(order)
    assert placement_runs.finish(order)
    assert placement_runs.finish(order)  # repeated after a crash
    assert placement_runs.homes() == {"a": "west", "b": "east", "c": "east"}
    assert placement_runs.replicas("a") == {"east": "deleting", "west": "ready"}
    left = placement_runs.delete_at("a", "east")
    assert left is not None and timedelta(minutes=59) < left - datetime.now(UTC) < timedelta(minutes=61)
    assert placement_runs.world.bucket("west").get("tables/a/ds=1/part-0") == body("a", "ds=1")
    assert placement_runs.states() == ["done"]
    assert [e["region"] for e in placement_runs.world.events(kind="table.moved")] == ["west"]
    assert placement_runs.next().over


def test_an_old_home_that_is_wanted_stays_as_a_replica(placement_runs: PlacementWorld) -> None:
    """If the plan keeps the source, it stays as a replica that a later plan may drop."""
    placement_runs.placement_run(home("a", "east", "west", keeps_source=True))
    order = placement_runs.next()
    placement_runs.copy(order)
    assert placement_runs.finish(order)
    assert placement_runs.replicas("a") == {"east": "ready", "west": "ready"}
    with placement_runs.world.session() as session:
        assert session.get_one(Replica, ("a", "east")).made_by == "placement_run"


def test_what_was_appended_meanwhile_is_copied_before_the_switch(placement_runs: PlacementWorld) -> None:
    """Partitions that are appended during a move are copied before the switch."""
    placement_runs.placement_run(home("a", "east", "west"))
    order = placement_runs.next()
    placement_runs.copy(order)
    placement_runs.append("a", "ds=3")
    assert not placement_runs.finish(order)
    assert placement_runs.homes()["a"] == "east"
    placement_runs.copy(order)
    assert placement_runs.finish(order)
    assert placement_runs.world.bucket("west").get("tables/a/ds=3/part-0") == body("a", "ds=3")


def test_lanes_share_the_moves_and_keep_their_own(placement_runs: PlacementWorld) -> None:
    """Each lane gets a different move; a lane that has not finished its move gets the same one again."""
    placement_runs.placement_run(*(home(table, "east", "west") for table in "abc"))
    assert [placement_runs.next(lane).table for lane in (0, 1)] == ["a", "b"]
    assert [placement_runs.next(lane).table for lane in (0, 1, 0)] == ["a", "b", "a"]
    order = placement_runs.next(1)
    placement_runs.copy(order)
    placement_runs.finish(order)
    assert [placement_runs.next(lane).table for lane in (1, 0)] == ["c", "a"]
    assert placement_runs.states() == ["copying", "done", "copying"]


def test_a_pause_and_the_deadline(placement_runs: PlacementWorld) -> None:
    """While moves are paused none continues; after the deadline none begins, but moves that have begun continue."""
    placement_runs.placement_run(home("a", "east", "west"), home("b", "east", "west"))
    begun = placement_runs.next()
    with placement_runs.world.session() as session:
        session.add(PlacementPause(by="ops"))
    assert (
        placement_runs.next().paused
        and placement_runs.next(1).paused
        and placement_runs.placement_runs.placement_paused()
    )
    with placement_runs.world.session() as session:
        session.delete(session.get_one(PlacementPause, True))
    placement_runs.world.alter(PlacementRun, PLACEMENT_RUN, deadline_at=datetime.now(UTC) - timedelta(seconds=1))
    assert placement_runs.next() == begun
    assert placement_runs.next(1).over


def test_moves_that_cannot_begin_are_left_with_the_reason(placement_runs: PlacementWorld) -> None:
    """If a move's table is gone or has moved, or its target is full or gone, it is left out with the reason."""
    placement_runs.world.alter(Region, "west", storage_bytes=3 * len(body("a", "ds=1")))
    placement_runs.placement_run(
        home("gone", "east", "west"),
        home("a", "west", "east"),
        home("a", "east", "moon"),
        home("b", "east", "west"),
        home("c", "east", "west"),
    )
    order = placement_runs.next()
    assert order.table == "b"
    placement_runs.copy(order)
    placement_runs.finish(order)
    assert placement_runs.next().over
    full = "west would hold {0:,} bytes more than its storage: it stores {1:,} of {2:,}, and {1:,} would be added"
    over = 4 * len(body("a", "ds=1")) - 3 * len(body("a", "ds=1"))
    assert placement_runs.states() == [
        "left: the table does not exist any more",
        "left: the table's home is now east",
        "left: the region does not exist any more",
        "done",
        f"left: {full.format(over, 2 * over, 3 * over)}",
    ]


def test_a_copy_that_failed_for_good_is_given_up(placement_runs: PlacementWorld) -> None:
    """The copied objects of a failed move are marked for deletion; the table's home stays."""
    placement_runs.placement_run(home("a", "east", "west"))
    order = placement_runs.next()
    assert placement_runs.finish(order, "the checksum is another one")
    assert placement_runs.states() == ["left: the checksum is another one"]
    assert placement_runs.homes()["a"] == "east"
    assert placement_runs.replicas("a") == {"east": "ready", "west": "deleting"}


def test_a_copy_in_its_grace_is_taken_back(placement_runs: PlacementWorld) -> None:
    """If a table moves back during the grace of its old copy, only partitions appended meanwhile are copied."""
    placement_runs.placement_run(home("a", "east", "west"), home("a", "west", "east"))
    first = placement_runs.next()
    placement_runs.copy(first)
    placement_runs.finish(first)
    placement_runs.append("a", "ds=3")
    back = placement_runs.next()
    assert placement_runs.replicas("a") == {"east": "ready", "west": "ready"}
    assert not placement_runs.finish(back)
    placement_runs.copy(back)
    assert placement_runs.finish(back)
    assert placement_runs.homes()["a"] == "east"


def test_a_dropped_replica_gets_its_grace(placement_runs: PlacementWorld) -> None:
    """A drop marks a replica for deletion after its grace; it never deletes a home."""
    placement_runs.table("d", "east", "west")
    drop = {"kind": "drop", "data_table": "d", "source_region": "east", "size_bytes": 0}
    placement_runs.placement_run({**drop, "target_region": "west"}, {**drop, "target_region": "east"})
    assert placement_runs.next().over
    assert placement_runs.states() == ["done", "left: the replica to drop does not exist any more"]
    assert placement_runs.replicas("d") == {"east": "ready", "west": "deleting"}


def test_a_workload_does_not_wait_for_the_placement_run(placement_runs: PlacementWorld) -> None:
    """If a workload wants a replica that a placement run copies, the copy becomes an on-demand copy."""
    placement_runs.placement_run(home("a", "east", "west"))
    placement_runs.next()
    workload = placement_runs.world.submit(tables=("a",))
    for _ in range(2):
        with placement_runs.world.session() as session:
            want_replica(session, "a", "west", workload=session.get_one(Workload, workload))
    assert placement_runs.world.put_out("replicate") == 1
    with placement_runs.world.session() as session:
        assert session.get_one(Replica, ("a", "west")).requested_by == workload


def test_a_replica_of_some_partitions(placement_runs: PlacementWorld) -> None:
    """Only the given partitions are copied; the region keeps its others, and unknown partitions are ignored."""
    placement_runs.placement_run(_replica("a", ["ds=1", "ds=9"]), _replica("b", ["ds=1"]), home("b", "east", "west"))
    bucket = placement_runs.world.bucket("west")
    first = placement_runs.next()
    placement_runs.copy(first)
    assert placement_runs.finish(first)
    assert [info.key for info in bucket.list("tables/a/")] == ["tables/a/ds=1/part-0"]
    for _ in range(2):
        order = placement_runs.next()
        placement_runs.copy(order)
        assert placement_runs.finish(order)
    assert placement_runs.homes()["b"] == "west" and placement_runs.states() == ["done"] * 3
    placement_runs.placement_runs.end_placement_run(PlacementRunRef(PLACEMENT_RUN))
    placement_runs.placement_run(_replica("a", ["ds=2"]), placement_run="run-2")
    more = placement_runs.next(placement_run="run-2")
    assert not placement_runs.finish(more, placement_run="run-2")
    placement_runs.copy(more)
    assert placement_runs.finish(more, placement_run="run-2")
    assert [info.key for info in bucket.list("tables/a/")] == ["tables/a/ds=1/part-0", "tables/a/ds=2/part-0"]
    with placement_runs.world.session() as session:
        assert not session.get_one(Replica, ("a", "west")).whole


def _replica(table: str, partitions: list[str]) -> dict[str, Any]:
    return {**home(table, "east", "west"), "kind": "replica", "partitions": partitions}
