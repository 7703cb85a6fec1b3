"""Skips the check of the whole table when a partition in the table's home only changes its datacenter.

Without this, a change of all partitions would check the table once for each partition.

Revision ID: 0008
Revises: 0007
"""

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_TRIGGER = """
    create constraint trigger home_partition_changed after {events} on replica_partition
        deferrable initially deferred for each row when (old.ready_at is not null)
        execute function home_replica_stays()
"""
_ANY = "update or delete"
_WHAT_MATTERS = "update of data_table, partition, region, ready_at or delete"


def upgrade() -> None:
    """Applies this revision."""
    _replace(_WHAT_MATTERS)


def downgrade() -> None:
    """Undoes this revision."""
    _replace(_ANY)


def _replace(events: str) -> None:
    op.execute("drop trigger home_partition_changed on replica_partition")
    op.execute(_TRIGGER.format(events=events))
