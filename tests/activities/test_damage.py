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
from domain.protocol.data import ReplicateTable, Scrub
from domain.protocol.workloads import StageRequest
from infra.db.catalogue import ready_replicas
from infra.db.tables import PartitionManifest, Replica, ReplicaPartition
from mizzen.objects.store import ObjectStore
from tests.activities.damages import DAMAGES, delete, flip
from tests.activities.placement_runs import DAYS, PlacementWorld, body, home
from tests.activities.world import World, job

KEY = "tables/a/ds=1/part-0"
BODY = body("a", "ds=1")


Damage = Callable[[ObjectStore, str], None]


@pytest.fixture
def placement_runs(world: World) -> PlacementWorld:
    """A table with its home in east and a replica in west, both verified."""
    made = PlacementWorld(world, grace_s=0.0)
    for region in ("east", "west"):
        made.region(region)
    made.table("a", "east", "west")
    for region in ("east", "west"):
        scrub(made, region)
    assert state(made) == {"east": ("ready", None), "west": ("ready", None)}
    return made


def scrub(placement_runs: PlacementWorld, region: str) -> None:
    """Reads everything that is due in a region."""
    ActivityEnvironment().run(
        ScrubActivities(placement_runs.world.engine, placement_runs.world.settings).scrub, Scrub(region)
    )


def verify_again(placement_runs: PlacementWorld, region: str) -> None:
    """Requests a verification, as an operator does, and runs it."""
    with placement_runs.world.session() as session:
        for row in session.scalars(select(Replica).where(Replica.region == region)):
            row.verify_asked_at = datetime.now(UTC)
    scrub(placement_runs, region)


def repair(placement_runs: PlacementWorld, region: str) -> None:
    """Runs the repair that a finding requested."""
    assert placement_runs.world.put_out("replicate"), "no repair was requested"
    request = ReplicateTable("a", "east", region)
    ActivityEnvironment().run(placement_runs.copies.copy_table, request)


async def remove(placement_runs: PlacementWorld, client: Client) -> None:
    """Runs one round of housekeeping's deletions."""
    await ActivityEnvironment().run(RemovalActivities(placement_runs.world.engine, client).remove)


def state(placement_runs: PlacementWorld) -> dict[str, tuple[str, str | None]]:
    """Returns the state of the replica in each region, and what is wrong with it."""
    with placement_runs.world.session() as session:
        wrong = {
            row.region: row.wrong
            for row in session.scalars(select(ReplicaPartition).where(ReplicaPartition.wrong.is_not(None)))
        }
        rows = session.scalars(select(Replica).where(Replica.data_table == "a").order_by(Replica.region)).all()
        for row in rows:
            assert (row.wrong_since is not None) == (row.region in wrong)
        return {row.region: (row.state, wrong.get(row.region)) for row in rows}


def whole(placement_runs: PlacementWorld, region: str) -> bool:
    """Returns whether a bucket holds the whole table, byte for byte."""
    store = placement_runs.world.bucket(region)
    return all(
        store.size(key) is not None and store.get(key) == body("a", day)
        for day in DAYS
        for key in (f"tables/a/{day}/part-0",)
    )


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_home_never_moves_onto_a_damaged_replica(
    placement_runs: PlacementWorld, client: Client, damage: Damage
) -> None:
    """The target copy is read and repaired before the home moves; only then the grace of the old copy starts."""
    damage(placement_runs.world.bucket("west"), KEY)
    placement_runs.placement_run(home("a", "east", "west"))
    order = placement_runs.next()
    assert not placement_runs.finish(order), "the copy has not been read since the move began"
    assert placement_runs.homes()["a"] == "east"
    placement_runs.copy(order)
    assert placement_runs.finish(order)
    assert placement_runs.homes()["a"] == "west" and whole(placement_runs, "west")
    await remove(placement_runs, client)
    assert placement_runs.replicas("a") == {"west": "ready"}
    assert whole(placement_runs, "west") and not list(placement_runs.world.bucket("east").list("tables/"))


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_good_copy_stays_while_the_home_is_damaged(
    placement_runs: PlacementWorld, client: Client, damage: Damage
) -> None:
    """At the end of its grace, a deletion reads the home first; damage there is repaired from the copy that stays."""
    placement_runs.placement_run({**home("a", "east", "west"), "kind": "drop"})
    assert placement_runs.next().over and placement_runs.replicas("a")["west"] == "deleting"
    damage(placement_runs.world.bucket("east"), KEY)
    for _ in range(2):
        await remove(placement_runs, client)
    assert whole(placement_runs, "west"), "the last good copy must stay"
    replica, wrong = state(placement_runs)["east"]
    assert replica == "ready" and wrong is not None and KEY in wrong
    with placement_runs.world.session() as session:
        kept = session.get_one(Replica, ("a", "west")).kept_because
    assert kept == "the copy in east was found wrong and is not repaired yet"
    assert len(placement_runs.world.events(kind="replica.deletion_held")) == 1
    repair(placement_runs, "east")
    assert whole(placement_runs, "east") and state(placement_runs)["east"] == ("ready", None)
    await remove(placement_runs, client)
    assert placement_runs.replicas("a") == {"east": "ready"} and whole(placement_runs, "east")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("damaged", "good"), [("west", "east"), ("east", "west")])
def test_what_is_found_wrong_is_repaired(
    placement_runs: PlacementWorld, damage: Damage, damaged: str, good: str
) -> None:
    """A scrub finds a damaged home or replica, closes it to jobs, and has it copied from the good copy."""
    damage(placement_runs.world.bucket(damaged), KEY)
    verify_again(placement_runs, damaged)
    with placement_runs.world.session() as session:
        assert ready_replicas(session, ["a"]) == {"a": {good: None}}
    (event,) = placement_runs.world.events(kind="replica.wrong")
    assert (event["region"], event["detail"]["partition"]) == (damaged, "ds=1") and KEY in event["detail"]["found"]
    repair(placement_runs, damaged)
    assert whole(placement_runs, damaged) and whole(placement_runs, good)
    assert len(placement_runs.world.events(kind="replica.repaired")) == 1
    with placement_runs.world.session() as session:
        assert ready_replicas(session, ["a"]) == {"a": {"east": None, "west": None}}


def test_no_job_starts_on_a_replica_that_is_known_to_be_wrong(placement_runs: PlacementWorld) -> None:
    """No job is placed on a damaged replica, and a job that was placed before the damage was found does not start."""
    placement_runs.world.machine("west/c/m")
    placed = placement_runs.world.submit(job(), tables=("a",))
    placement_runs.world.tick()
    assert placement_runs.world.workload(placed).region == "west"
    delete(placement_runs.world.bucket("west"), KEY)
    verify_again(placement_runs, "west")
    with pytest.raises(ApplicationError, match="the replica of table a in west was found wrong"):
        placement_runs.world.launch.stage(StageRequest(placed, placement_runs.world.workload(placed).attempt))
    waits = placement_runs.world.submit(tables=("a",))
    placement_runs.world.tick()
    assert "data_not_here west" in placement_runs.world.waiting(waits)
    repair(placement_runs, "west")
    placement_runs.world.launch.stage(StageRequest(placed, placement_runs.world.workload(placed).attempt))


def test_a_damaged_source_is_not_copied(placement_runs: PlacementWorld) -> None:
    """Content of the right size with a wrong checksum is never copied; the copy comes from another region instead."""
    placement_runs.region("north")
    flip(placement_runs.world.bucket("east"), KEY)
    with placement_runs.world.session() as session:
        session.add(Replica(data_table="a", region="north", state="copying"))
    request = ReplicateTable("a", "east", "north")
    assert ActivityEnvironment().run(placement_runs.copies.copy_table, request) > 0
    assert whole(placement_runs, "north")
    assert state(placement_runs)["east"][1] is not None, "the copy found the damage"


def test_what_is_wrong_everywhere_is_told_and_kept(placement_runs: PlacementWorld) -> None:
    """Without a good copy the repair fails with its finding; it succeeds once the owner has restored an object."""
    for region in ("east", "west"):
        flip(placement_runs.world.bucket(region), KEY)
        verify_again(placement_runs, region)
    with pytest.raises(ApplicationError, match=r"tables/a/ds=1/part-0 is xxh3_128:\w+, expected xxh3_128:"):
        repair(placement_runs, "west")
    assert set(placement_runs.homes().values()) == {"east"}
    placement_runs.world.bucket("east").put(KEY, BODY)
    repair(placement_runs, "west")
    assert state(placement_runs) == {"east": ("ready", None), "west": ("ready", None)}
    assert whole(placement_runs, "east") and whole(placement_runs, "west")


async def test_nothing_is_deleted_without_checksums(placement_runs: PlacementWorld, client: Client) -> None:
    """A table without checksums keeps all its copies until it has been scrubbed."""
    with placement_runs.world.session() as session:
        for row in session.scalars(select(PartitionManifest)):
            session.delete(row)
        row = session.get_one(Replica, ("a", "west"))
        row.state, row.delete_at = "deleting", datetime.now(UTC) - timedelta(hours=1)
    await remove(placement_runs, client)
    assert whole(placement_runs, "west") and placement_runs.replicas("a") == {"east": "ready", "west": "deleting"}
    verify_again(placement_runs, "east")
    await remove(placement_runs, client)
    assert placement_runs.replicas("a") == {"east": "ready"}


def test_a_wrong_copy_stops_drops_of_good_ones(placement_runs: PlacementWorld) -> None:
    """While one replica is damaged, a placement run drops none."""
    placement_runs.region("north")
    placement_runs.table("b", "east")
    delete(placement_runs.world.bucket("east"), KEY)
    verify_again(placement_runs, "east")
    placement_runs.placement_run({**home("a", "east", "west"), "kind": "drop"})
    assert placement_runs.next().over
    assert placement_runs.states() == [
        "left: the copy in east was found wrong; no replica is dropped until it is repaired"
    ]
    assert placement_runs.replicas("a")["west"] == "ready"
