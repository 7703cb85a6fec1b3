"""Models of input tables, their partitions and their replicas in regions.

Times are `timestamptz`; sizes are bytes.
"""

from datetime import datetime

from sqlalchemy import CheckConstraint, Computed, ForeignKey, ForeignKeyConstraint, Index, text
from sqlalchemy.orm import Mapped, mapped_column

from infra.db.base import NOW, Base


class Table(Base):
    """An input table, which consists of partitions. Triggers update its size and enforce that its home is complete."""

    __tablename__ = "data_table"
    name: Mapped[str] = mapped_column(primary_key=True)
    """Name of the table; its form is `domain.ids.TABLE_RULE`."""
    namespace: Mapped[str] = mapped_column(Computed("table_namespace(name)", persisted=True))
    size_bytes: Mapped[int] = mapped_column(server_default="0")
    """Total size of the partitions."""
    home_region: Mapped[str] = mapped_column(ForeignKey("region.name"))
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    __table_args__ = (
        CheckConstraint("name not like 'default.%'", name="data_table_name"),
        Index("data_table_namespace", "namespace", "name"),
    )


class Partition(Base):
    """An immutable part of a table. Partitions are only appended, and are deleted only with their table."""

    __tablename__ = "data_partition"
    data_table: Mapped[str] = mapped_column(ForeignKey("data_table.name", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    location: Mapped[str]
    """Folder of the partition's objects in the bucket of each region that has it; ends with `/`."""
    size_bytes: Mapped[int] = mapped_column(CheckConstraint("size_bytes >= 0"))
    checksum: Mapped[str | None] = mapped_column(CheckConstraint("checksum ~ '^sha256:[0-9a-f]{64}$'"))
    """SHA-256 of the output of `sha256sum` for the objects, sorted by path. None if it was not given."""
    created_at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    """Set by the database. Its order is the order in which the table's partitions were committed."""


class PartitionManifest(Base):
    """Names, sizes and checksums of a partition's objects, in one packed value (`infra.copies.manifest`)."""

    __tablename__ = "partition_manifest"
    data_table: Mapped[str] = mapped_column(primary_key=True)
    partition: Mapped[str] = mapped_column(primary_key=True)
    objects: Mapped[int]
    """Number of objects."""
    body: Mapped[bytes]
    checksummed_at: Mapped[datetime | None]
    """When the manifest had a checksum for every object; it never changes afterwards. None if checksums are missing."""
    __table_args__ = (
        ForeignKeyConstraint(
            ["data_table", "partition"], ["data_partition.data_table", "data_partition.name"], ondelete="CASCADE"
        ),
    )


class Replica(Base):
    """A copy of a table, or of some of its partitions, in a region. The copy in the table's home is a replica, too.

    A replica of a whole table that becomes ready has all partitions that exist at that time. Of partitions appended
    later, it has those with a row in `ReplicaPartition`. Triggers update `stale_since` and `ready_at`.
    """

    __tablename__ = "replica"
    data_table: Mapped[str] = mapped_column(ForeignKey("data_table.name", ondelete="CASCADE"), primary_key=True)
    region: Mapped[str] = mapped_column(ForeignKey("region.name"), primary_key=True)
    whole: Mapped[bool] = mapped_column(server_default=text("true"))
    """Whether it is a replica of the whole table; otherwise, of the partitions with a row in `replica_partition`."""
    state: Mapped[str]
    delete_at: Mapped[datetime | None]
    """In state `deleting`: end of the grace, until which the objects are kept and the replica can be restored."""
    source_region: Mapped[str | None]
    done_bytes: Mapped[int] = mapped_column(server_default="0")
    requested_by: Mapped[str | None]
    """Id of the workload for which the replica is copied on demand."""
    made_by: Mapped[str] = mapped_column(server_default=text("'operator'"))
    """Who requested the replica: `operator`, `workload` or `placement_run`. Placement runs may drop the last two."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    ready_at: Mapped[datetime | None]
    """When the replica was first complete; None if it never was."""
    stale_since: Mapped[datetime | None]
    """When the first partition that is missing here was appended; the replica is complete up to that time. None if no
    partition is missing, if it is a partial replica, or if it was never complete."""
    topping_up: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether the missing partitions are being copied on demand (a top-up)."""
    topped_up_for: Mapped[str | None]
    """Id of the workload that requested the last top-up."""
    wrong_since: Mapped[datetime | None]
    """Since when the replica has had a partition that a check found wrong. While set, no job starts on the replica."""
    verify_asked_at: Mapped[datetime | None]
    """When an operator last requested a verification of the whole replica."""
    removal_began_at: Mapped[datetime | None]
    """When the deletion began, after the grace. The objects are deleted once the home is verified later than that."""
    kept_because: Mapped[str | None]
    """Why the objects still exist although the grace is over, as a sentence."""
    __table_args__ = (
        CheckConstraint("state in ('copying', 'ready', 'deleting')", name="replica_state"),
        CheckConstraint("(state = 'deleting') = (delete_at is not null)", name="replica_delete_at"),
        CheckConstraint("made_by in ('operator', 'workload', 'placement_run')", name="replica_made_by"),
        CheckConstraint("stale_since is null or whole and state <> 'copying'", name="replica_stale"),
        CheckConstraint("not topping_up or stale_since is not null", name="replica_topping_up"),
    )


class ReplicaPartition(Base):
    """The copy of one partition in a replica, complete or being copied."""

    __tablename__ = "replica_partition"
    data_table: Mapped[str] = mapped_column(primary_key=True)
    partition: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    datacenter: Mapped[str | None]
    ready_at: Mapped[datetime | None]
    """When the copy was complete and verified; None while it is being copied."""
    verified_at: Mapped[datetime | None]
    """Start of the last complete check in which all content matched the manifest; None if there was none."""
    check_began_at: Mapped[datetime | None]
    """Start of the check that is in progress."""
    checked_to: Mapped[str | None]
    """In a check that is in progress: the last path up to which the content matched the manifest."""
    wrong_at: Mapped[datetime | None]
    """When a check found that the copy differs from the manifest; None if it does not, or was repaired."""
    wrong: Mapped[str | None]
    """The difference from the manifest that the check found."""
    __table_args__ = (
        CheckConstraint("(wrong is null) = (wrong_at is null)", name="replica_partition_wrong"),
        Index("replica_partition_verified", "region", "verified_at"),
        ForeignKeyConstraint(["data_table", "region"], ["replica.data_table", "replica.region"], ondelete="CASCADE"),
        ForeignKeyConstraint(
            ["data_table", "partition"], ["data_partition.data_table", "data_partition.name"], ondelete="CASCADE"
        ),
        ForeignKeyConstraint(["region", "datacenter"], ["datacenter.region", "datacenter.name"]),
    )
