"""Copies between regions: complete and fenced checkpoints, resumption after a kill, and heartbeats."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities import heartbeat
from activities.data import partitions
from activities.data.copies import CopyActivities
from domain.protocol.data import NIGHTLY, ON_DEMAND, ReplicateTable
from domain.protocol.workloads import CheckpointCopy
from infra.config.data import CopySettings
from infra.copies import open_copy_store
from infra.copies.bandwidth import Bandwidth
from infra.db.tables import Replica
from mizzen.checkpoint import Checkpointer, Manifest, StaleAttemptError, list_committed
from mizzen.checkpoint.log import Log
from mizzen.objects.store import ObjectStore
from tests.activities.world import World

PREFIX = "checkpoints/wl-1/"


@pytest.fixture
def fleet(world: World) -> World:
    """Two regions without machines."""
    world.region("east")
    world.region("west")
    return world


def _objects(store: ObjectStore, prefix: str = "") -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list(prefix)}


def _copy(world: World, attempt: int = 2, beats: list[Any] | None = None) -> int:
    environment = ActivityEnvironment()
    environment.on_heartbeat = lambda *details: beats.append(details) if beats is not None else None
    request = CheckpointCopy("wl-1", attempt, "east", "west")
    return int(environment.run(CopyActivities(world.engine, world.settings).copy_checkpoint, request))


def _root(store: ObjectStore) -> ObjectStore:
    return open_copy_store(store.uri(PREFIX))


def _checkpoints(store: ObjectStore) -> list[Manifest]:
    """Writes checkpoints and returns the two committed ones, of two parts each.

    There are also parts of an uncommitted checkpoint, and a checkpoint of another workload.
    """
    other = Checkpointer(store.uri("checkpoints/wl-10/"), attempt=1)
    other.save(1, {"0": b"other"})
    checkpointer = Checkpointer(store.uri(PREFIX), attempt=1)
    for step in (10, 20):
        checkpointer.save(step, {"0": b"%d 0" % step, "1": b"%d 1" % step})
    store.put(f"{PREFIX}parts/a0001/step-0000000030.r0000.00000000/part-0.bin", b"half")
    return list_committed(_root(store))


def test_only_committed_checkpoints_move(fleet: World) -> None:
    """Uncommitted parts, claims and other workloads' objects are not copied."""
    source, target = fleet.bucket("east"), fleet.bucket("west")
    committed = _checkpoints(source)
    assert _copy(fleet) == sum(manifest.size_bytes for manifest in committed)
    assert list_committed(_root(target), verify=True) == committed
    keys = {info.key.removeprefix(PREFIX) for info in target.list("")}
    parts = {key for manifest in committed for key in manifest.keys}
    assert keys == parts | {"log/0000000001.json", "log/0000000002.json"}
    assert _copy(fleet) == sum(manifest.size_bytes for manifest in committed), "a second copy changes nothing"
    assert {info.key.removeprefix(PREFIX) for info in target.list("")} == keys


def test_the_source_is_fenced_before_anything_is_copied(fleet: World) -> None:
    """Attempts older than the moving one can no longer commit at the source, and the fence never goes back."""
    source = fleet.bucket("east")
    zombie = Checkpointer(source.uri(PREFIX), attempt=1)
    zombie.save(10, {"0": b"first"})
    refused: list[str] = []

    def late(*_: object) -> None:
        with pytest.raises(StaleAttemptError) as caught:
            zombie.save(11, {"0": b"late"})
        refused.append(str(caught.value))

    environment = ActivityEnvironment()
    environment.on_heartbeat = late
    environment.run(
        CopyActivities(fleet.engine, fleet.settings).copy_checkpoint, CheckpointCopy("wl-1", 3, "east", "west")
    )
    assert refused and all("claimed by attempt 3" in message for message in refused)
    _copy(fleet, attempt=2)
    with pytest.raises(StaleAttemptError, match="claimed by attempt 3"):
        Checkpointer(source.uri(PREFIX), attempt=2)
    found = Checkpointer(fleet.bucket("west").uri(PREFIX), attempt=3).load_latest()
    assert found is not None and found.step == 10


@pytest.mark.parametrize("rubbish", [b"", b"[]", b"{}", b'{"attempt": null}', b"\xff"])
def test_a_log_that_a_task_has_spoilt_stops_no_move(fleet: World, rubbish: bytes) -> None:
    """An invalid record in a checkpoint log does not stop the move, and the source is fenced."""
    source = fleet.bucket("east")
    source.put(f"{PREFIX}log/0000000001.json", rubbish)
    assert _copy(fleet) == 0
    with pytest.raises(StaleAttemptError, match="claimed by attempt 2"):
        Checkpointer(source.uri(PREFIX), attempt=1).save(1, {"0": b"late"})


def test_a_record_comes_last(fleet: World) -> None:
    """At every moment of the copy, each checkpoint in the target's log has all of its parts."""
    source, target = fleet.bucket("east"), fleet.bucket("west")
    committed = _checkpoints(source)
    moments: list[int] = []

    def look(*_: object) -> None:
        log = Log(_root(target))
        log.refresh()
        moments.append(len(log.checkpoints))
        assert len(list_committed(_root(target), verify=True)) == len(log.checkpoints)

    environment = ActivityEnvironment()
    environment.on_heartbeat = look
    environment.run(
        CopyActivities(fleet.engine, fleet.settings).copy_checkpoint, CheckpointCopy("wl-1", 2, "east", "west")
    )
    assert moments == [0, 0, 1, 1]
    assert list_committed(_root(target)) == committed


_KILLED = """
import os, signal, sys
from pathlib import Path
from temporalio.testing import ActivityEnvironment
from activities.data.copies import CopyActivities
from domain.protocol.workloads import CheckpointCopy
from infra.config.settings import Settings
from infra.db.session import open_engine

beats = 0
def beat(*_):
    global beats
    beats += 1
    if beats == 3:
        os.kill(os.getpid(), signal.SIGKILL)

environment = ActivityEnvironment()
environment.on_heartbeat = beat
activities = CopyActivities(open_engine(sys.argv[1]), Settings())
environment.run(activities.copy_checkpoint, CheckpointCopy("wl-1", 2, "east", "west"))
"""


def test_a_copy_that_was_killed_goes_on_where_it_stopped(fleet: World, database_url: str, checkout: Path) -> None:
    """After a SIGKILL in the middle, the target's checkpoints are complete; the next try copies only the rest."""
    source, target = fleet.bucket("east"), fleet.bucket("west")
    _checkpoints(source)
    done = subprocess.run([sys.executable, "-c", _KILLED, database_url], cwd=checkout, env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    before = {info.key: info.tag for info in target.list("") if ".staging" not in info.key}
    assert [manifest.step for manifest in list_committed(_root(target), verify=True)] == [10]
    assert 4 <= len(before) < 8, "two parts and their record, and concurrently copied parts of the next one"
    _copy(fleet)
    after = {info.key: info.tag for info in target.list("") if ".staging" not in info.key}
    assert len(after) == 8 and all(after[key] == tag for key, tag in before.items())


def test_a_large_object_is_no_silence(fleet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one large object is copied, the activity still sends heartbeats with the last reported bytes."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT_S", 0.01)
    fleet.bucket("east").put("tables/words/0", bytes(10))
    fleet.table("words", 10, "east")
    with fleet.session() as session:
        session.add(Replica(data_table="words", region="west", state="copying", source_region="east"))
    beats: list[tuple[Any, ...]] = []
    heard = threading.Semaphore(0)

    def beat(*details: Any) -> None:
        beats.append(details)
        heard.release()

    environment = ActivityEnvironment()
    environment.on_heartbeat = beat
    copy_objects = partitions.copy_objects

    def slowly(*args: Any, **options: Any) -> int:
        for _ in range(5):
            assert heard.acquire(timeout=20)
        return copy_objects(*args, **options)

    monkeypatch.setattr(partitions, "copy_objects", slowly)
    activities = CopyActivities(fleet.engine, fleet.settings)
    assert environment.run(activities.copy_table, ReplicateTable("words", "east", "west")) == 10
    assert beats[:5] == [()] * 5 and (10, 10) in beats


def test_copies_draw_on_their_shares_of_the_link(fleet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and checkpoints share one bandwidth budget of the link; planned moves use their own share of it."""
    drawn: list[tuple[str, int]] = []
    monkeypatch.setattr(Bandwidth, "draw", lambda _, share, size_bytes: drawn.append((share, size_bytes)))
    source = fleet.bucket("east")
    committed = _checkpoints(source)
    for name, size_bytes in (("words", 300), ("images", 500)):
        source.put(f"tables/{name}/part-0", bytes(size_bytes))
        fleet.table(name, size_bytes, "east")
        with fleet.session() as session:
            session.add(Replica(data_table=name, region="west", state="copying", source_region="east"))
    settings = fleet.settings.model_copy(update={"copies": CopySettings(link_bytes_per_s=1e6)})
    environment, activities = ActivityEnvironment(), CopyActivities(fleet.engine, settings)
    for _ in range(2):
        environment.run(activities.copy_table, ReplicateTable("words", "east", "west"))
        environment.run(activities.copy_table, ReplicateTable("images", "east", "west", NIGHTLY))
        environment.run(activities.copy_checkpoint, CheckpointCopy("wl-1", 2, "east", "west"))
    checkpoint_bytes = sum(manifest.size_bytes for manifest in committed)
    assert sum(size for share, size in drawn if share == ON_DEMAND) == 300 + checkpoint_bytes
    assert [size for share, size in drawn if share == NIGHTLY] == [500]
