"""Moves of a night: their order, when they may begin, and the switch of a table's home."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from domain.nights import NightRef
from infra.db.catalogue import want_replica
from infra.db.models import Region, Workload
from infra.db.nights import Night, NightPause
from infra.db.tables import Replica
from tests.activities.nights import NIGHT, NightWorld, body, home
from tests.activities.world import World


@pytest.fixture
def nights(world: World) -> NightWorld:
    """Two regions, with three tables in the first."""
    made = NightWorld(world)
    for region in ("east", "west"):
        made.region(region)
    for table in ("a", "b", "c"):
        made.table(table, "east")
    return made


def test_a_home_moves_with_its_copy_in_grace(nights: NightWorld) -> None:
    """The home is switched when the copy is complete; the old copy stays for its grace."""
    nights.night(home("a", "east", "west"))
    order = nights.next()
    assert (order.table, order.source_region, order.target_region) == ("a", "east", "west")
    assert nights.replicas("a") == {"east": "ready", "west": "copying"}
    assert not nights.finish(order)  # nothing has been copied yet
    assert nights.homes()["a"] == "east"
    nights.copy(order)
    assert nights.finish(order)
    assert nights.finish(order)  # repeated after a crash
    assert nights.homes() == {"a": "west", "b": "east", "c": "east"}
    assert nights.replicas("a") == {"east": "deleting", "west": "ready"}
    left = nights.delete_at("a", "east")
    assert left is not None and timedelta(minutes=59) < left - datetime.now(UTC) < timedelta(minutes=61)
    assert nights.world.bucket("west").get("tables/a/ds=1/part-0") == body("a", "ds=1")
    assert nights.states() == ["done"]
    assert [e["region"] for e in nights.world.events(kind="table.moved")] == ["west"]
    assert nights.next().over


def test_an_old_home_that_is_wanted_stays_as_a_replica(nights: NightWorld) -> None:
    """If the plan keeps the source, it stays as a replica that a later plan may drop."""
    nights.night(home("a", "east", "west", keeps_source=True))
    order = nights.next()
    nights.copy(order)
    assert nights.finish(order)
    assert nights.replicas("a") == {"east": "ready", "west": "ready"}
    with nights.world.session() as session:
        assert session.get_one(Replica, ("a", "east")).made_by == "night"


def test_what_was_appended_meanwhile_is_copied_before_the_switch(nights: NightWorld) -> None:
    """Partitions that are appended during a move are copied before the switch."""
    nights.night(home("a", "east", "west"))
    order = nights.next()
    nights.copy(order)
    nights.append("a", "ds=3")
    assert not nights.finish(order)
    assert nights.homes()["a"] == "east"
    nights.copy(order)
    assert nights.finish(order)
    assert nights.world.bucket("west").get("tables/a/ds=3/part-0") == body("a", "ds=3")


def test_lanes_share_the_moves_and_keep_their_own(nights: NightWorld) -> None:
    """Each lane gets a different move; a lane that has not finished its move gets the same one again."""
    nights.night(*(home(table, "east", "west") for table in "abc"))
    assert [nights.next(lane).table for lane in (0, 1)] == ["a", "b"]
    assert [nights.next(lane).table for lane in (0, 1, 0)] == ["a", "b", "a"]
    order = nights.next(1)
    nights.copy(order)
    nights.finish(order)
    assert [nights.next(lane).table for lane in (1, 0)] == ["c", "a"]
    assert nights.states() == ["copying", "done", "copying"]


def test_a_pause_and_the_deadline(nights: NightWorld) -> None:
    """While moves are paused none continues; after the deadline none begins, but moves that have begun continue."""
    nights.night(home("a", "east", "west"), home("b", "east", "west"))
    begun = nights.next()
    with nights.world.session() as session:
        session.add(NightPause(by="ops"))
    assert nights.next().paused and nights.next(1).paused and nights.nights.nights_paused()
    with nights.world.session() as session:
        session.delete(session.get_one(NightPause, True))
    nights.world.alter(Night, NIGHT, deadline_at=datetime.now(UTC) - timedelta(seconds=1))
    assert nights.next() == begun
    assert nights.next(1).over


def test_moves_that_cannot_begin_are_left_with_the_reason(nights: NightWorld) -> None:
    """If a move's table is gone or has moved, or its target is full or gone, it is left out with the reason."""
    nights.world.alter(Region, "west", storage_bytes=3 * len(body("a", "ds=1")))
    nights.night(
        home("gone", "east", "west"),
        home("a", "west", "east"),
        home("a", "east", "moon"),
        home("b", "east", "west"),
        home("c", "east", "west"),
    )
    order = nights.next()
    assert order.table == "b"
    nights.copy(order)
    nights.finish(order)
    assert nights.next().over
    full = "west would hold {0:,} bytes more than its storage: it stores {1:,} of {2:,}, and {1:,} would be added"
    over = 4 * len(body("a", "ds=1")) - 3 * len(body("a", "ds=1"))
    assert nights.states() == [
        "left: the table does not exist any more",
        "left: the table's home is now east",
        "left: the region does not exist any more",
        "done",
        f"left: {full.format(over, 2 * over, 3 * over)}",
    ]


def test_a_copy_that_failed_for_good_is_given_up(nights: NightWorld) -> None:
    """The copied objects of a failed move are marked for deletion; the table's home stays."""
    nights.night(home("a", "east", "west"))
    order = nights.next()
    assert nights.finish(order, "the checksum is another one")
    assert nights.states() == ["left: the checksum is another one"]
    assert nights.homes()["a"] == "east"
    assert nights.replicas("a") == {"east": "ready", "west": "deleting"}


def test_a_copy_in_its_grace_is_taken_back(nights: NightWorld) -> None:
    """If a table moves back during the grace of its old copy, only partitions appended meanwhile are copied."""
    nights.night(home("a", "east", "west"), home("a", "west", "east"))
    first = nights.next()
    nights.copy(first)
    nights.finish(first)
    nights.append("a", "ds=3")
    back = nights.next()
    assert nights.replicas("a") == {"east": "ready", "west": "ready"}
    assert not nights.finish(back)
    nights.copy(back)
    assert nights.finish(back)
    assert nights.homes()["a"] == "east"


def test_a_dropped_replica_gets_its_grace(nights: NightWorld) -> None:
    """A drop marks a replica for deletion after its grace; it never deletes a home."""
    nights.table("d", "east", "west")
    drop = {"kind": "drop", "data_table": "d", "source_region": "east", "size_bytes": 0}
    nights.night({**drop, "target_region": "west"}, {**drop, "target_region": "east"})
    assert nights.next().over
    assert nights.states() == ["done", "left: the replica to drop does not exist any more"]
    assert nights.replicas("d") == {"east": "ready", "west": "deleting"}


def test_a_workload_does_not_wait_for_the_night(nights: NightWorld) -> None:
    """If a workload wants a replica that a night copies, the copy becomes an on-demand copy."""
    nights.night(home("a", "east", "west"))
    nights.next()
    workload = nights.world.submit(tables=("a",))
    for _ in range(2):
        with nights.world.session() as session:
            want_replica(session, "a", "west", workload=session.get_one(Workload, workload))
    assert nights.world.put_out("replicate") == 1
    with nights.world.session() as session:
        assert session.get_one(Replica, ("a", "west")).requested_by == workload


def test_a_replica_of_some_partitions(nights: NightWorld) -> None:
    """Only the given partitions are copied; the region keeps its others, and unknown partitions are ignored."""
    nights.night(_replica("a", ["ds=1", "ds=9"]), _replica("b", ["ds=1"]), home("b", "east", "west"))
    bucket = nights.world.bucket("west")
    first = nights.next()
    nights.copy(first)
    assert nights.finish(first)
    assert [info.key for info in bucket.list("tables/a/")] == ["tables/a/ds=1/part-0"]
    for _ in range(2):
        order = nights.next()
        nights.copy(order)
        assert nights.finish(order)
    assert nights.homes()["b"] == "west" and nights.states() == ["done"] * 3
    nights.nights.end_night(NightRef(NIGHT))
    nights.night(_replica("a", ["ds=2"]), night="night-2")
    more = nights.next(night="night-2")
    assert not nights.finish(more, night="night-2")
    nights.copy(more)
    assert nights.finish(more, night="night-2")
    assert [info.key for info in bucket.list("tables/a/")] == ["tables/a/ds=1/part-0", "tables/a/ds=2/part-0"]
    with nights.world.session() as session:
        assert not session.get_one(Replica, ("a", "west")).whole


def _replica(table: str, partitions: list[str]) -> dict[str, Any]:
    return {**home(table, "east", "west"), "kind": "replica", "partitions": partitions}
