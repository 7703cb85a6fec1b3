"""Replicas and their objects."""

from collections.abc import Callable
from dataclasses import replace

from sqlalchemy import select
from temporalio.testing import ActivityEnvironment

from activities.data.copies import CopyActivities
from domain.protocol.data import ReplicateTable
from infra.db.tables import Partition, Replica, ReplicaPartition, Table
from tests.activities.world import World

REQUEST = ReplicateTable("words", "east", "west")


def append(world: World, day: str, size_bytes: int = 100, checksum: str | None = None, home: str = "east") -> None:
    """Appends a partition of two objects at the home."""
    location = f"tables/words/{day}/"
    for part in "ab":
        world.bucket(home).put(f"{location}{part}", part.encode() * (size_bytes // 2))
    with world.session() as session:
        session.add(
            Partition(data_table="words", name=day, location=location, size_bytes=size_bytes, checksum=checksum)
        )


def add_table(world: World, *days: str) -> None:
    """Adds the table `words` of these partitions, with its home in `east`."""
    with world.session() as session:
        session.add(Table(name="words", home_region="east"))
        session.flush()
        session.add(Replica(data_table="words", region="east", state="ready"))
    for day in days:
        append(world, day)


def held(world: World, region: str = "west") -> list[str]:
    """Returns the partitions that a replica has completely."""
    with world.session() as session:
        own = ReplicaPartition.region == region, ReplicaPartition.ready_at.is_not(None)
        return sorted(session.scalars(select(ReplicaPartition.partition).where(*own)))


def keys(world: World, region: str = "west") -> set[str]:
    """Returns the keys of all objects in a region's bucket."""
    return {info.key for info in world.bucket(region).list("")}


def complete(
    world: World, request: ReplicateTable = REQUEST, attempt: int = 1, at_beat: Callable[..., None] | None = None
) -> int:
    """Runs the copy once; returns the bytes of the replica."""
    environment = ActivityEnvironment()
    environment.info = replace(environment.info, attempt=attempt)
    environment.on_heartbeat = at_beat or environment.on_heartbeat
    return environment.run(CopyActivities(world.engine, world.settings).copy_table, request)
