"""Replicas of tables are completed partition by partition, verified, and resumed after an interrupted copy."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.testing import ActivityEnvironment

from activities.data import partitions, replicas
from activities.data.copies import CopyActivities
from domain.protocol.data import NIGHTLY, ReplicateTable
from infra.copies import copy, open_copy_store
from infra.copies.manifest import checksummed, declared_checksum, listed, pack, unpack
from infra.db.tables import Partition, Replica, ReplicaPartition, Table
from mizzen.environment import local_path
from tests.activities.replicas import REQUEST, add_table, append, complete, held, keys
from tests.activities.world import World

DAYS = ("ds=1", "ds=2", "ds=3")


@pytest.fixture
def fleet(world: World) -> World:
    """A table of three days with its home in `east`, and an empty replica in `west`."""
    for region in ("east", "north", "west"):
        world.region(region)
    add_table(world, *DAYS)
    with world.session() as session:
        session.add(Replica(data_table="words", region="west", state="copying", requested_by="wl-9"))
    return world


def replica(world: World, region: str = "west") -> Replica:
    """Returns a replica's row."""
    with world.session() as session:
        return session.get_one(Replica, ("words", region))


def test_a_replica_is_completed_and_published_once(fleet: World) -> None:
    """A replica with all partitions becomes ready, with one event and one requested scan, even if copied twice."""
    fleet.bucket("east").put("tables/words-2/part-0", b"another table")
    fleet.bucket("east").put("tables/words/ds=4/a", b"not appended yet")
    for _ in range(2):
        assert complete(fleet) == 300
    (event,) = fleet.events(kind="replica.ready")
    assert event["detail"] == {"table": "words", "source": "east", "bytes": 300, "requested_by": "wl-9"}
    assert fleet.put_out("wake") == 1
    row = replica(fleet)
    assert (row.state, row.done_bytes) == ("ready", 300) and row.ready_at is not None
    assert keys(fleet) == {f"tables/words/{day}/{part}" for day in DAYS for part in "ab"}
    assert held(fleet) == list(DAYS)


def test_what_is_appended_meanwhile_is_copied_too(fleet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that is appended during the copy is copied before the replica is ready."""
    bring = replicas.bring

    def grows(*args: Any, **options: Any) -> None:
        bring(*args, **options)
        if len(held(fleet)) == 2:
            append(fleet, "ds=4")

    monkeypatch.setattr(replicas, "bring", grows)
    assert complete(fleet) == 400
    assert held(fleet) == [*DAYS, "ds=4"]


def test_each_partition_comes_from_the_home_of_its_moment(fleet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the home moves during the copy, the remaining partitions come from the new home."""
    with fleet.session() as session:
        session.add(Replica(data_table="words", region="north", state="copying"))
    complete(fleet, ReplicateTable("words", "east", "north"))
    sources: list[str] = []
    bring = replicas.bring

    def moves(source: partitions.Bucket, *args: Any, **options: Any) -> None:
        sources.append(source.region)
        bring(source, *args, **options)
        fleet.alter(Table, "words", home_region="north")

    monkeypatch.setattr(replicas, "bring", moves)
    assert complete(fleet) == 300
    assert sources == ["east", "north", "north"]
    assert replica(fleet).source_region == "north"


def test_a_replica_of_parts_gets_those(fleet: World) -> None:
    """A partial replica gets only its own partitions and is then ready."""
    with fleet.session() as session:
        session.get_one(Replica, ("words", "west")).whole = False
        session.add(ReplicaPartition(data_table="words", partition="ds=2", region="west"))
    assert complete(fleet) == 100
    assert (held(fleet), replica(fleet).state) == (["ds=2"], "ready")
    assert keys(fleet) == {"tables/words/ds=2/a", "tables/words/ds=2/b"}


_KILLED = """
import os, signal, sys
from temporalio.testing import ActivityEnvironment
from activities.data.copies import CopyActivities
from domain.protocol.data import NIGHTLY, ReplicateTable
from infra.config.settings import Settings
from infra.db.session import open_engine

beats = 0
def beat(*told):
    global beats
    beats += bool(told)
    if beats == 3:
        os.kill(os.getpid(), signal.SIGKILL)

environment = ActivityEnvironment()
environment.on_heartbeat = beat
activities = CopyActivities(open_engine(sys.argv[1]), Settings())
environment.run(activities.copy_table, ReplicateTable("words", "east", "west"))
"""


def test_a_copy_that_was_killed_goes_on_at_its_partition(fleet: World, database_url: str, checkout: Path) -> None:
    """After a SIGKILL recorded partitions are complete and no replica is ready; the next try copies only the rest."""
    done = subprocess.run([sys.executable, "-c", _KILLED, database_url], cwd=checkout, env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (held(fleet), replica(fleet).state) == (["ds=1"], "copying")
    before = {info.key: info.tag for info in fleet.bucket("west").list("")}
    assert 3 <= len(before) <= 4, "one partition of two objects, and concurrently copied objects of the next one"
    assert complete(fleet) == 300
    after = {info.key: info.tag for info in fleet.bucket("west").list("")}
    assert len(after) == 6 and all(after[key] == tag for key, tag in before.items())


def test_a_cancelled_copy_stops_at_the_end_of_a_part(fleet: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled copy keeps the finished parts for the next try and completes no partition."""
    monkeypatch.setattr(copy, "PART_BYTES", 10)
    environment = ActivityEnvironment()
    environment.on_heartbeat = lambda *told: environment.cancel() if told else None
    with pytest.raises(CancelledError):
        environment.run(CopyActivities(fleet.engine, fleet.settings).copy_table, REQUEST)
    assert (held(fleet), replica(fleet).state) == ([], "copying")
    assert keys(fleet) <= {"tables/words/ds=1/a", "tables/words/ds=1/b"}
    assert complete(fleet) == 300


@pytest.mark.parametrize("how", ["gone", "deleting", "forgotten"])
def test_a_replica_that_nobody_wants_any_more(fleet: World, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """If its replica or table is deleted meanwhile, a copy ends without an error, and no replica becomes ready."""
    bring = replicas.bring

    def goes(*args: Any, **options: Any) -> None:
        bring(*args, **options)
        with fleet.session() as session:
            if how == "deleting":
                session.execute(text("update replica set state = 'deleting', delete_at = now() where region = 'west'"))
            else:
                gone = (Table, "words") if how == "forgotten" else (Replica, ("words", "west"))
                session.delete(session.get_one(*gone))

    monkeypatch.setattr(replicas, "bring", goes)
    for _ in range(2):
        assert complete(fleet) == 0
    assert (held(fleet), fleet.events(kind="replica.ready")) == ([], [])


# ------------------------------------------------------------------------------------------------------ verification


def _declared(folder: Path) -> str:
    """Returns the checksum that the command in `docs/data.md` computes."""
    command = r"find . -type f -printf '%P\n' | LC_ALL=C sort | xargs -d '\n' sha256sum | sha256sum"
    return "sha256:" + subprocess.check_output(command, shell=True, cwd=folder, text=True).split()[0]


def test_checksums_are_those_of_the_documented_command(fleet: World, tmp_path: Path) -> None:
    """Checksums of stored objects equal those of the documented shell command, for all file names."""
    folder = tmp_path / "ds=1"
    for name in ("b", "B", "a/x", "a-x", "a b", "ä", "back\\slash", "empty"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 7 if name != "empty" else b"")
    store = open_copy_store(tmp_path.as_uri())
    found = checksummed(store, "ds=1/", listed(store, "ds=1/"), "sha256")
    assert declared_checksum(unpack(pack(found))) == _declared(folder)


def _folder(world: World, region: str, day: str) -> Path:
    return local_path(world.bucket(region).uri(f"tables/words/{day}"))


def test_a_declared_checksum_is_compared_with_what_is_there(fleet: World) -> None:
    """A partition whose objects differ from its declared checksum is not copied; the retryable error has both."""
    append(fleet, "ds=4", checksum="sha256:" + "0" * 64)
    found = _declared(_folder(fleet, "east", "ds=4"))
    expected = f"table words, partition ds=4: checksum {found} in east, should be sha256:{'0' * 64}"
    with pytest.raises(ApplicationError) as caught:
        complete(fleet)
    assert (caught.value.message, caught.value.non_retryable) == (expected, False)
    assert (held(fleet), replica(fleet).state) == (list(DAYS), "copying")
    assert not any(key.startswith("tables/words/ds=4/") for key in keys(fleet))
    with fleet.session() as session:
        session.execute(text("alter table data_partition disable trigger partition_updated"))
        session.get_one(Partition, ("words", "ds=4")).checksum = found
    assert complete(fleet) == 400


def test_what_stays_wrong_is_shown_to_operators(fleet: World) -> None:
    """From the third failure on there is an event and the next try is delayed; a placement run gives its copy up."""
    (_folder(fleet, "east", "ds=2") / "a").unlink()
    delays = []
    for attempt in (1, 2, 3):
        with pytest.raises(ApplicationError, match=r"words, partition ds=2: 50 bytes in east, should be 100") as caught:
            complete(fleet, attempt=attempt)
        delays.append(caught.value.next_retry_delay)
    assert delays == [None, None, replicas._WRONG_AGAIN]
    (event,) = fleet.events(kind="replica.failed")
    with pytest.raises(ApplicationError) as given_up:
        complete(fleet, replace(REQUEST, share=NIGHTLY), attempt=3)
    assert given_up.value.non_retryable, "the placement run continues without this table"
    assert (event["region"], event["detail"]["partition"], event["detail"]["source"]) == ("west", "ds=2", "east")
    assert event["detail"]["error"] == str(caught.value.message)
    assert held(fleet) == ["ds=1", "ds=3"], "other partitions are copied"


def test_objects_that_are_not_the_partitions(fleet: World) -> None:
    """If the target folder holds an object that is not in the partition, the error names the object."""
    fleet.bucket("west").put("tables/words/ds=1/c", b"strange")
    strange = r"107 bytes in west, should be 100; size of tables/words/ds=1/c: 7, in east None"
    with pytest.raises(ApplicationError, match=strange):
        complete(fleet)
    assert held(fleet) == ["ds=2", "ds=3"]
