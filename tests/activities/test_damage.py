"""Damaged copies are found, never used as good copies, repaired, and never cause the deletion of a good copy."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import select
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.data.removal import RemovalActivities
from activities.data.scrub import ScrubActivities
from domain.protocol import ReplicateTable, Scrub, StageRequest
from infra.db.catalogue import ready_replicas
from infra.db.tables import PartitionManifest, Replica, ReplicaPartition
from mizzen.objects.store import ObjectStore
from tests.activities.damages import DAMAGES, delete, flip
from tests.activities.nights import DAYS, NightWorld, body, home
from tests.activities.world import World, job

KEY = "tables/a/ds=1/part-0"
BODY = body("a", "ds=1")


Damage = Callable[[ObjectStore, str], None]


@pytest.fixture
def nights(world: World) -> NightWorld:
    """A table with its home in east and a replica in west, both verified."""
    made = NightWorld(world, grace_s=0.0)
    for region in ("east", "west"):
        made.region(region)
    made.table("a", "east", "west")
    for region in ("east", "west"):
        scrub(made, region)
    assert state(made) == {"east": ("ready", None), "west": ("ready", None)}
    return made


def scrub(nights: NightWorld, region: str) -> None:
    """Reads everything that is due in a region."""
    ActivityEnvironment().run(ScrubActivities(nights.world.engine, nights.world.settings).scrub, Scrub(region))


def verify_again(nights: NightWorld, region: str) -> None:
    """Requests a verification, as an operator does, and runs it."""
    with nights.world.session() as session:
        for row in session.scalars(select(Replica).where(Replica.region == region)):
            row.verify_asked_at = datetime.now(UTC)
    scrub(nights, region)


def repair(nights: NightWorld, region: str) -> None:
    """Runs the repair that a finding requested."""
    assert nights.world.put_out("replicate"), "no repair was requested"
    request = ReplicateTable("a", "east", region)
    ActivityEnvironment().run(nights.copies.copy_table, request)


async def remove(nights: NightWorld, client: Client) -> None:
    """Runs one round of housekeeping's deletions."""
    await ActivityEnvironment().run(RemovalActivities(nights.world.engine, client).remove)


def state(nights: NightWorld) -> dict[str, tuple[str, str | None]]:
    """Returns the state of the replica in each region, and what is wrong with it."""
    with nights.world.session() as session:
        wrong = {
            row.region: row.wrong
            for row in session.scalars(select(ReplicaPartition).where(ReplicaPartition.wrong.is_not(None)))
        }
        rows = session.scalars(select(Replica).where(Replica.data_table == "a").order_by(Replica.region)).all()
        for row in rows:
            assert (row.wrong_since is not None) == (row.region in wrong)
        return {row.region: (row.state, wrong.get(row.region)) for row in rows}


def whole(nights: NightWorld, region: str) -> bool:
    """Returns whether a bucket holds the whole table, byte for byte."""
    store = nights.world.bucket(region)
    return all(
        store.size(key) is not None and store.get(key) == body("a", day)
        for day in DAYS
        for key in (f"tables/a/{day}/part-0",)
    )


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_home_never_moves_onto_a_damaged_replica(nights: NightWorld, client: Client, damage: Damage) -> None:
    """The target copy is read and repaired before the home moves; only then the grace of the old copy starts."""
    damage(nights.world.bucket("west"), KEY)
    nights.night(home("a", "east", "west"))
    order = nights.next()
    assert not nights.finish(order), "the copy has not been read since the move began"
    assert nights.homes()["a"] == "east"
    nights.copy(order)
    assert nights.finish(order)
    assert nights.homes()["a"] == "west" and whole(nights, "west")
    await remove(nights, client)
    assert nights.replicas("a") == {"west": "ready"}
    assert whole(nights, "west") and not list(nights.world.bucket("east").list("tables/"))


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_good_copy_stays_while_the_home_is_damaged(nights: NightWorld, client: Client, damage: Damage) -> None:
    """At the end of its grace, a deletion reads the home first; damage there is repaired from the copy that stays."""
    nights.night({**home("a", "east", "west"), "kind": "drop"})
    assert nights.next().over and nights.replicas("a")["west"] == "deleting"
    damage(nights.world.bucket("east"), KEY)
    for _ in range(2):
        await remove(nights, client)
    assert whole(nights, "west"), "the last good copy must stay"
    replica, wrong = state(nights)["east"]
    assert replica == "ready" and wrong is not None and KEY in wrong
    with nights.world.session() as session:
        kept = session.get_one(Replica, ("a", "west")).kept_because
    assert kept == "the copy in east was found wrong and is not repaired yet"
    assert len(nights.world.events(kind="replica.deletion_held")) == 1
    repair(nights, "east")
    assert whole(nights, "east") and state(nights)["east"] == ("ready", None)
    await remove(nights, client)
    assert nights.replicas("a") == {"east": "ready"} and whole(nights, "east")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("damaged", "good"), [("west", "east"), ("east", "west")])
def test_what_is_found_wrong_is_repaired(nights: NightWorld, damage: Damage, damaged: str, good: str) -> None:
    """A scrub finds a damaged home or replica, closes it to jobs, and has it copied from the good copy."""
    damage(nights.world.bucket(damaged), KEY)
    verify_again(nights, damaged)
    with nights.world.session() as session:
        assert ready_replicas(session, ["a"]) == {"a": {good: None}}
    (event,) = nights.world.events(kind="replica.wrong")
    assert (event["region"], event["detail"]["partition"]) == (damaged, "ds=1") and KEY in event["detail"]["found"]
    repair(nights, damaged)
    assert whole(nights, damaged) and whole(nights, good)
    assert len(nights.world.events(kind="replica.repaired")) == 1
    with nights.world.session() as session:
        assert ready_replicas(session, ["a"]) == {"a": {"east": None, "west": None}}


def test_no_job_starts_on_a_replica_that_is_known_to_be_wrong(nights: NightWorld) -> None:
    """No job is placed on a damaged replica, and a job that was placed before the damage was found does not start."""
    nights.world.machine("west/c/m")
    placed = nights.world.submit(job(), tables=("a",))
    nights.world.tick()
    assert nights.world.workload(placed).region == "west"
    delete(nights.world.bucket("west"), KEY)
    verify_again(nights, "west")
    with pytest.raises(ApplicationError, match="the replica of table a in west was found wrong"):
        nights.world.launch.stage(StageRequest(placed, nights.world.workload(placed).attempt))
    waits = nights.world.submit(tables=("a",))
    nights.world.tick()
    assert "data_not_here west" in nights.world.waiting(waits)
    repair(nights, "west")
    nights.world.launch.stage(StageRequest(placed, nights.world.workload(placed).attempt))


def test_a_damaged_source_is_not_copied(nights: NightWorld) -> None:
    """Content of the right size with a wrong checksum is never copied; the copy comes from another region instead."""
    nights.region("north")
    flip(nights.world.bucket("east"), KEY)
    with nights.world.session() as session:
        session.add(Replica(data_table="a", region="north", state="copying"))
    request = ReplicateTable("a", "east", "north")
    assert ActivityEnvironment().run(nights.copies.copy_table, request) > 0
    assert whole(nights, "north")
    assert state(nights)["east"][1] is not None, "the copy found the damage"


def test_what_is_wrong_everywhere_is_told_and_kept(nights: NightWorld) -> None:
    """Without a good copy the repair fails with its finding; it succeeds once the owner has restored an object."""
    for region in ("east", "west"):
        flip(nights.world.bucket(region), KEY)
        verify_again(nights, region)
    with pytest.raises(ApplicationError, match=r"tables/a/ds=1/part-0 is xxh3_128:\w+, expected xxh3_128:"):
        repair(nights, "west")
    assert set(nights.homes().values()) == {"east"}
    nights.world.bucket("east").put(KEY, BODY)
    repair(nights, "west")
    assert state(nights) == {"east": ("ready", None), "west": ("ready", None)}
    assert whole(nights, "east") and whole(nights, "west")


async def test_nothing_is_deleted_without_checksums(nights: NightWorld, client: Client) -> None:
    """A table without checksums keeps all its copies until it has been scrubbed."""
    with nights.world.session() as session:
        for row in session.scalars(select(PartitionManifest)):
            session.delete(row)
        row = session.get_one(Replica, ("a", "west"))
        row.state, row.delete_at = "deleting", datetime.now(UTC) - timedelta(hours=1)
    await remove(nights, client)
    assert whole(nights, "west") and nights.replicas("a") == {"east": "ready", "west": "deleting"}
    verify_again(nights, "east")
    await remove(nights, client)
    assert nights.replicas("a") == {"east": "ready"}


def test_a_wrong_copy_stops_drops_of_good_ones(nights: NightWorld) -> None:
    """While one replica is damaged, a night drops none."""
    nights.region("north")
    nights.table("b", "east")
    delete(nights.world.bucket("east"), KEY)
    verify_again(nights, "east")
    nights.night({**home("a", "east", "west"), "kind": "drop"})
    assert nights.next().over
    assert nights.states() == ["left: the copy in east was found wrong; no replica is dropped until it is repaired"]
    assert nights.replicas("a")["west"] == "ready"
