"""The background verification of copies: first checksums, due copies, interruptions, and the whole loop."""

import time
from datetime import datetime

import pytest
from sqlalchemy import select
from temporalio.client import Client
from temporalio.testing import ActivityEnvironment

from activities.data import scrub
from activities.data.scrub import ScrubActivities
from activities.data.verification import OutOfTime, Reading, Verifier
from domain.protocol.data import Scrub
from infra.config.data import CopySettings
from infra.copies import manifest
from infra.db import integrity, outbox
from infra.db.tables import Partition, PartitionManifest, Replica, ReplicaPartition
from mizzen.objects.files import FileStore
from tests.activities.damages import flip
from tests.activities.placement_runs import PlacementWorld, body
from tests.activities.temporal import until
from tests.activities.world import World

KEY = "tables/a/ds=1/part-0"


@pytest.fixture
def placement_runs(world: World) -> PlacementWorld:
    """A table with its home in east and a replica in west, neither of them verified."""
    made = PlacementWorld(world)
    for region in ("east", "west"):
        made.region(region)
    made.table("a", "east", "west")
    return made


def _scrub(placement_runs: PlacementWorld, region: str) -> int:
    activities = ScrubActivities(placement_runs.world.engine, placement_runs.world.settings)
    return ActivityEnvironment().run(activities.scrub, Scrub(region))


def _verified(placement_runs: PlacementWorld, region: str) -> list[datetime | None]:
    with placement_runs.world.session() as session:
        rows = session.scalars(select(ReplicaPartition).order_by(ReplicaPartition.partition))
        return [row.verified_at for row in rows if row.region == region]


def test_checksums_come_from_the_home_first(placement_runs: PlacementWorld) -> None:
    """A replica waits for the manifest from the home; then each copy is read once, and again when it is due."""
    _scrub(placement_runs, "west")
    assert _verified(placement_runs, "west") == [None, None]
    _scrub(placement_runs, "east")
    _scrub(placement_runs, "west")
    first = [*_verified(placement_runs, "east"), *_verified(placement_runs, "west")]
    assert None not in first
    with placement_runs.world.session() as session:
        rows = session.scalars(select(PartitionManifest)).all()
        assert [(row.objects, row.checksummed_at is not None) for row in rows] == [(1, True)] * 2
    _scrub(placement_runs, "west")
    assert _verified(placement_runs, "west") == first[2:], "no copy is due"
    copies = CopySettings(scrub_every_s=0.001, scrub_bytes_per_s=None)
    placement_runs.world.settings = placement_runs.world.settings.model_copy(update={"copies": copies})
    time.sleep(0.01)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scrub, "_ROUND_S", -1.0)
        assert _scrub(placement_runs, "west") == 0, "the rest is read in the next round"
    assert _verified(placement_runs, "west")[0] == first[2], "the interrupted check is not recorded"
    with placement_runs.world.session() as session:
        held = session.get_one(ReplicaPartition, ("a", "ds=1", "west"))
        assert held.checked_to == "part-0", "the next check continues after this object"


def test_a_check_that_was_interrupted_goes_on(placement_runs: PlacementWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted check does not read objects again that it has already verified, for manifest and check."""
    monkeypatch.setattr(manifest, "_BATCH", 1)
    store = placement_runs.world.bucket("east")
    for number in range(4):
        store.put(f"tables/a/ds=3/part-{number}", b"x" * number)
    with placement_runs.world.session() as session:
        session.add(Partition(data_table="a", name="ds=3", location="tables/a/ds=3/", size_bytes=6))
    with placement_runs.world.session() as session:
        partition = session.get_one(Partition, ("a", "ds=3"))
    read: list[str] = []
    opened = FileStore.opened
    monkeypatch.setattr(FileStore, "opened", lambda self, key: (read.append(key[-1]), opened(self, key))[1])
    verifier = Verifier(placement_runs.world.engine)
    for _ in range(3):
        with pytest.raises(OutOfTime):
            verifier.check(partition, "east", Reading(until_s=time.monotonic()))
    with pytest.raises(OutOfTime):
        verifier.check(partition, "east", Reading(until_s=time.monotonic()))
    assert read == ["0", "1", "2", "3"]
    while True:
        try:
            assert verifier.check(partition, "east", Reading(until_s=time.monotonic())) is None
            break
        except OutOfTime:
            continue
    assert read == ["0", "1", "2", "3"] * 2
    with placement_runs.world.session() as session:
        assert session.get_one(ReplicaPartition, ("a", "ds=3", "east")).verified_at is not None


def test_a_wrong_copy_is_not_read_over_and_over(placement_runs: PlacementWorld) -> None:
    """A damaged copy is not read again before its repair; a request to verify repeats neither event nor repair."""
    for region in ("east", "west"):
        _scrub(placement_runs, region)
    flip(placement_runs.world.bucket("west"), KEY)
    for _ in range(2):
        with placement_runs.world.session() as session:
            session.get_one(Replica, ("a", "west")).verify_asked_at = integrity.clock(session)
        _scrub(placement_runs, "west")
        _scrub(placement_runs, "west")
    assert len(placement_runs.world.events(kind="replica.wrong")) == 1
    assert placement_runs.world.put_out("replicate") == 1


def _ask(placement_runs: PlacementWorld) -> None:
    with placement_runs.world.session() as session:
        for region in ("east", "west"):
            session.get_one(Replica, ("a", region)).verify_asked_at = integrity.clock(session)
            outbox.scrub(session, region)


async def test_damage_is_found_and_repaired_by_itself(placement_runs: PlacementWorld, running: Client) -> None:
    """On request, each region's workflow verifies its copies; damaged ones are copied again from the other region."""
    _ask(placement_runs)
    await until(
        lambda: None not in [*_verified(placement_runs, "east"), *_verified(placement_runs, "west")],
        "all copies are verified",
    )
    for region in ("west", "east"):
        flip(placement_runs.world.bucket(region), KEY)
        _ask(placement_runs)
        await until(
            lambda region=region: placement_runs.world.bucket(region).get(KEY) == body("a", "ds=1"),
            "the object is repaired",
        )
        await until(lambda: len(placement_runs.world.events(kind="replica.wrong")) == len(
            placement_runs.world.events(kind="replica.repaired")), "the repair is recorded")  # fmt: skip
    assert [e["region"] for e in placement_runs.world.events(kind="replica.repaired")] == ["west", "east"]
