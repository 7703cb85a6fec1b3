"""Replicas whose grace is over are deleted with exactly their objects, and never while a workload reads them."""

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy import text
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.data import removal
from activities.data.removal import RemovalActivities
from activities.data.scrub import ScrubActivities
from domain.ids import CONTROL_QUEUE, replica_workflow_id
from domain.phases import Phase
from domain.protocol.data import ReplicateTable, Scrub
from infra.db.rounds import loop_states
from infra.db.tables import Replica, ReplicaPartition
from mizzen.objects.files import FileStore
from mizzen.objects.store import ObjectStore
from tests.activities.replicas import add_table, append, complete, held, keys
from tests.activities.world import World, job

DAYS = ("ds=1", "ds=2")
OBJECTS = {f"tables/words/{day}/{part}" for day in DAYS for part in "ab"}


@pytest.fixture
def fleet(world: World) -> World:
    """A table of two days with its home in `east` and a replica in `west`, which has a machine."""
    for region in ("east", "west"):
        world.region(region)
    world.machine("west/c/m")
    add_table(world, *DAYS)
    with world.session() as session:
        session.add(Replica(data_table="words", region="west", state="copying"))
    assert complete(world) == 200 and keys(world) == OBJECTS
    return world


def _drop(world: World, grace_s: float = 0.0) -> None:
    with world.session() as session:
        session.execute(
            text(
                "update replica set state = 'deleting', delete_at = now() + make_interval(secs => :s)"
                " where region = 'west'"
            ),
            {"s": grace_s},
        )


async def _remove(world: World, client: Client) -> None:
    await ActivityEnvironment().run(RemovalActivities(world.engine, client).remove)


def verify(world: World, region: str) -> None:
    """Reads everything that is due in a region."""
    ActivityEnvironment().run(ScrubActivities(world.engine, world.settings).scrub, Scrub(region))


def _gone(world: World) -> bool:
    with world.session() as session:
        return session.get(Replica, ("words", "west")) is None


async def test_what_is_dropped_goes_with_its_objects(fleet: World, client: Client) -> None:
    """All objects of the table's partitions are deleted; folders that belong to no partition stay."""
    append(fleet, "ds=3")
    for key in ("tables/words/ds=3/a", "tables/words/ds=4/a", "tables/words-2/ds=1/a"):
        fleet.bucket("west").put(key, b"x")
    _drop(fleet)
    verify(fleet, "east")
    home, wakes = keys(fleet, "east"), fleet.put_out("wake")
    await _remove(fleet, client)
    assert _gone(fleet) and held(fleet) == []
    assert keys(fleet) == {"tables/words/ds=4/a", "tables/words-2/ds=1/a"}
    assert keys(fleet, "east") == home
    (event,) = fleet.events(kind="replica.deleted")
    assert (event["region"], event["detail"], fleet.put_out("wake")) == ("west", {"table": "words"}, wakes + 1)


async def test_a_replica_of_parts_goes_with_those(fleet: World, client: Client) -> None:
    """For a partial replica only its own partitions are deleted, because other folders may belong to someone else."""
    with fleet.session() as session:
        session.delete(session.get_one(ReplicaPartition, ("words", "ds=2", "west")))
        session.flush()
        row = session.get_one(Replica, ("words", "west"))
        row.whole, row.stale_since = False, None
    _drop(fleet)
    await _remove(fleet, client)
    assert _gone(fleet) and keys(fleet) == {"tables/words/ds=2/a", "tables/words/ds=2/b"}


async def test_a_table_of_one_partition_goes_whole(fleet: World, client: Client) -> None:
    """If the table is everything in its folder, all objects in the folder are deleted."""
    fleet.table("images", 2, "east", "west")
    for region in ("east", "west"):
        for key in ("tables/images/a", "tables/images/b/c"):
            fleet.bucket(region).put(key, b"x")
    verify(fleet, "east")
    with fleet.session() as session:
        session.execute(text("update replica set state = 'deleting', delete_at = now()"
                             " where region = 'west' and data_table = 'images'"))  # fmt: skip
    await _remove(fleet, client)
    assert keys(fleet) == OBJECTS


async def test_what_is_in_its_grace_or_read_stays(fleet: World, client: Client) -> None:
    """A replica stays during its grace, and while an attempt in the region reads the table."""
    workload = fleet.running(job(), tables=("words",))
    assert fleet.workload(workload).region == "west"
    _drop(fleet, grace_s=60)
    await _remove(fleet, client)
    _drop(fleet)
    await _remove(fleet, client)
    assert not _gone(fleet) and keys(fleet) == OBJECTS
    fleet.release(workload, Phase.SUCCEEDED)
    fleet.running(job())
    await _remove(fleet, client)
    assert _gone(fleet) and keys(fleet) == set()


async def test_a_deletion_that_stopped_goes_on(fleet: World, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-deleted replica keeps its row, so the next round deletes the rest."""
    monkeypatch.setattr(removal, "_AT_ONCE", 1)
    _drop(fleet)
    delete = FileStore.delete

    def refuse(store: ObjectStore, key: str) -> None:
        if key.startswith("tables/words/ds=2"):
            raise OSError("read-only")
        delete(store, key)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "delete", refuse)
        await _remove(fleet, client)
    assert not _gone(fleet) and keys(fleet) == {"tables/words/ds=2/a", "tables/words/ds=2/b"}
    await _remove(fleet, client)
    assert _gone(fleet) and keys(fleet) == set()


async def test_what_takes_long_is_done_in_rounds(fleet: World, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a round's time is over, the next round deletes the rest."""
    _drop(fleet)
    with monkeypatch.context() as patched:
        patched.setattr(removal, "_MOST_S", -1.0)
        await _remove(fleet, client)
    assert not _gone(fleet) and keys(fleet) == OBJECTS
    await _remove(fleet, client)
    assert _gone(fleet)


async def test_a_store_that_hangs_ends_no_other_deletion(
    fleet: World, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round ends although a store hangs. Replicas that failed come last. They are deleted when the store responds."""
    fleet.region("south")
    fleet.table("images", 2, "east", "south")
    for region in ("east", "south"):
        fleet.bucket(region).put("tables/images/a", b"x")
        fleet.bucket(region).put("tables/images/b/c", b"x")
    verify(fleet, "east")
    answers, delete = threading.Event(), FileStore.delete

    def hang(store: ObjectStore, key: str) -> None:
        if key.startswith("tables/words/"):
            answers.wait(60)
        delete(store, key)  # type: ignore[arg-type]

    monkeypatch.setattr(FileStore, "delete", hang)
    monkeypatch.setattr(removal, "_MOST_S", 2.0)
    monkeypatch.setattr(removal, "_HANGS_S", 0.1)
    _drop(fleet)
    removals = RemovalActivities(fleet.engine, client)
    try:
        await ActivityEnvironment().run(removals.remove)
        with fleet.session() as session:
            session.execute(text("update replica set state = 'deleting', delete_at = now() where region = 'south'"))
            because = session.get_one(Replica, ("words", "west")).kept_because
        assert because == "its deletion fails: the bucket of west does not respond"
        assert removals._due() == [("images", "south"), ("words", "west")]
        await ActivityEnvironment().run(removals.remove)
        assert keys(fleet, "south") == set() and not _gone(fleet)
        with fleet.session() as session:
            loop = loop_states(session)[0]["deletion of replicas"]
        assert (loop.failures, loop.succeeded_at_s) == (2, None)
        assert loop.began_at_s is not None and loop.judge(loop.began_at_s + 3601) == "late"
    finally:
        answers.set()
    await asyncio.wait(removals._hanging.values())
    await ActivityEnvironment().run(removals.remove)
    assert _gone(fleet) and keys(fleet) == set()


async def test_a_copy_ends_before_its_replica_goes(fleet: World, client: Client) -> None:
    """A running copy is cancelled and must end before its replica is deleted: it could write objects later."""
    _drop(fleet)
    id_ = replica_workflow_id("words", "west")
    request = ReplicateTable("words", "east", "west")
    handle = await client.start_workflow("ReplicaWorkflow", request, id=id_, task_queue=CONTROL_QUEUE)
    await _remove(fleet, client)
    assert not _gone(fleet) and keys(fleet) == OBJECTS
    events: list[Any] = [event async for event in handle.fetch_history_events()]
    assert any(event.HasField("workflow_execution_cancel_requested_event_attributes") for event in events)
    await handle.terminate()
    await _remove(fleet, client)
    assert _gone(fleet)
