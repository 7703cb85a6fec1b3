"""Input tables with their partitions, and what of them each region has. Postgres owns these facts.

Times are `timestamptz`; sizes are bytes.
"""

from datetime import datetime

from sqlalchemy import CheckConstraint, Computed, ForeignKey, ForeignKeyConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from infra.db.base import NOW, Base


class Table(Base):
    """An input table, made of partitions. Triggers (in the migrations) keep its size, and its home complete."""

    __tablename__ = "data_table"
    name: Mapped[str] = mapped_column(primary_key=True)
    """`domain.ids.TABLE_RULE`."""
    namespace: Mapped[str] = mapped_column(Computed("table_namespace(name)", persisted=True))
    size_bytes: Mapped[int] = mapped_column(server_default="0")
    """Of all its partitions."""
    home_region: Mapped[str] = mapped_column(ForeignKey("region.name"))
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    __table_args__ = (
        CheckConstraint("name not like 'default.%'", name="data_table_name"),
        Index("data_table_namespace", "namespace", "name"),
    )


class Partition(Base):
    """A part of a table that never changes: new ones are appended, and they go only with their table."""

    __tablename__ = "data_partition"
    data_table: Mapped[str] = mapped_column(ForeignKey("data_table.name", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    location: Mapped[str]
    """The folder of its objects in the bucket of each region that has it, with `/` at its end."""
    size_bytes: Mapped[int] = mapped_column(CheckConstraint("size_bytes >= 0"))
    checksum: Mapped[str | None] = mapped_column(CheckConstraint("checksum ~ '^sha256:[0-9a-f]{64}$'"))
    """SHA-256 of the lines that `sha256sum` prints for its objects, by path; None: not given at registration."""
    created_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    """Set by the database: in the order in which the table's partitions became visible."""


class PartitionManifest(Base):
    """The objects of a partition: names, sizes and checksums, in one packed value (`mizzen.objects.manifest`)."""

    __tablename__ = "partition_manifest"
    data_table: Mapped[str] = mapped_column(primary_key=True)
    partition: Mapped[str] = mapped_column(primary_key=True)
    objects: Mapped[int]
    """How many there are."""
    body: Mapped[bytes]
    checksummed_at: Mapped[datetime | None]
    """When every object had a checksum: it never changes afterwards. None: some are still to be read."""
    __table_args__ = (
        ForeignKeyConstraint(
            ["data_table", "partition"], ["data_partition.data_table", "data_partition.name"], ondelete="CASCADE"
        ),
    )


class Replica(Base):
    """A table's copy in a region: whole, or of some of its partitions. The home's is one, too.

    One that becomes ready has every partition of that moment; of what is appended later it lacks what
    `ReplicaPartition` does not have. Triggers keep `stale_since` and `ready_at`.
    """

    __tablename__ = "replica"
    data_table: Mapped[str] = mapped_column(ForeignKey("data_table.name", ondelete="CASCADE"), primary_key=True)
    region: Mapped[str] = mapped_column(ForeignKey("region.name"), primary_key=True)
    whole: Mapped[bool] = mapped_column(server_default=text("true"))
    """Of the whole table; else of the partitions that have a row in `replica_partition`."""
    state: Mapped[str]
    delete_at: Mapped[datetime | None]
    """Of one that is being deleted: its objects stay until then, and until then it can be taken back."""
    source_region: Mapped[str | None]
    done_bytes: Mapped[int] = mapped_column(server_default="0")
    requested_by: Mapped[str | None]
    """The workload for which it is made on demand."""
    made_by: Mapped[str] = mapped_column(server_default=text("'operator'"))
    """Who had it made: `operator`, `workload` or `night`. Nights drop what they or workloads had made."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    ready_at: Mapped[datetime | None]
    """When it was complete for the first time; None: it has never been."""
    stale_since: Mapped[datetime | None]
    """When the first partition was appended that it lacks: as of before, it is complete. None: it lacks none, is of
    parts, or has never been complete."""
    topping_up: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether what it lacks is being copied on demand."""
    topped_up_for: Mapped[str | None]
    """The workload for which that was, or is, the last time."""
    wrong_since: Mapped[datetime | None]
    """When the first of its partitions was found wrong that has not been repaired: no job starts on it."""
    verify_asked_at: Mapped[datetime | None]
    """When an operator last asked for all of it to be verified."""
    removal_began_at: Mapped[datetime | None]
    """When its deletion began, after the grace: its objects go once the home is verified as of later than that."""
    kept_because: Mapped[str | None]
    """Why its objects are still there although its grace is over, in a sentence."""
    __table_args__ = (
        CheckConstraint("state in ('copying', 'ready', 'deleting')", name="replica_state"),
        CheckConstraint("(state = 'deleting') = (delete_at is not null)", name="replica_delete_at"),
        CheckConstraint("made_by in ('operator', 'workload', 'night')", name="replica_made_by"),
        CheckConstraint("stale_since is null or whole and state <> 'copying'", name="replica_stale"),
        CheckConstraint("not topping_up or stale_since is not null", name="replica_topping_up"),
    )


class ReplicaPartition(Base):
    """A partition that a replica has, or is to have."""

    __tablename__ = "replica_partition"
    data_table: Mapped[str] = mapped_column(primary_key=True)
    partition: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    datacenter: Mapped[str | None]
    ready_at: Mapped[datetime | None]
    """When it was there and verified; None: it is being copied."""
    verified_at: Mapped[datetime | None]
    """All of its content was read, from this moment on, and had the checksums of the manifest; None: not yet."""
    check_began_at: Mapped[datetime | None]
    checked_to: Mapped[str | None]
    """Of a check that is under way: when it began, and the last path up to which the content was right."""
    wrong_at: Mapped[datetime | None]
    wrong: Mapped[str | None]
    """When it was found not to be what the manifest says, and the difference; None: it was not, or it was repaired."""
    __table_args__ = (
        CheckConstraint("(wrong is null) = (wrong_at is null)", name="replica_partition_wrong"),
        Index("replica_partition_verified", "region", "verified_at"),
        ForeignKeyConstraint(["data_table", "region"], ["replica.data_table", "replica.region"], ondelete="CASCADE"),
        ForeignKeyConstraint(
            ["data_table", "partition"], ["data_partition.data_table", "data_partition.name"], ondelete="CASCADE"
        ),
        ForeignKeyConstraint(["region", "datacenter"], ["datacenter.region", "datacenter.name"]),
    )
