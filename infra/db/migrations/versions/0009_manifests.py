"""Adds manifests of partitions (the list of their objects), and the results of checking each copy against them.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_TIME = postgresql.TIMESTAMP(timezone=True)
_STAYS = """
    create function partition_manifest_stays() returns trigger language plpgsql as $$
    begin
        raise exception 'the manifest of partition % of table % is complete and never changes',
            old.partition, old.data_table
            using errcode = 'check_violation', constraint = 'partition_manifest_stays';
    end $$;
    create trigger partition_manifest_stays before update on partition_manifest
        for each row when (old.checksummed_at is not null) execute function partition_manifest_stays();
"""
_OF_COPIES = (
    ("verified_at", _TIME), ("check_began_at", _TIME), ("checked_to", sa.Text()), ("wrong_at", _TIME),
    ("wrong", sa.Text()),
)
_OF_REPLICAS = (
    ("wrong_since", _TIME), ("verify_asked_at", _TIME), ("removal_began_at", _TIME), ("kept_because", sa.Text()),
)


def upgrade() -> None:
    """Applies this revision. Manifests of existing tables are computed later, in the background."""
    op.create_table(
        "partition_manifest",
        sa.Column("data_table", sa.Text(), nullable=False),
        sa.Column("partition", sa.Text(), nullable=False),
        sa.Column("objects", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("checksummed_at", _TIME, nullable=True),
        sa.ForeignKeyConstraint(
            ["data_table", "partition"], ["data_partition.data_table", "data_partition.name"], ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("data_table", "partition"),
    )
    op.execute(_STAYS)
    for name, kind in _OF_COPIES:
        op.add_column("replica_partition", sa.Column(name, kind, nullable=True))
    for name, kind in _OF_REPLICAS:
        op.add_column("replica", sa.Column(name, kind, nullable=True))
    op.create_check_constraint("replica_partition_wrong", "replica_partition", "(wrong is null) = (wrong_at is null)")
    op.create_index("replica_partition_verified", "replica_partition", ["region", "verified_at"])


def downgrade() -> None:
    """Undoes this revision. Computed checksums are lost."""
    op.drop_index("replica_partition_verified", "replica_partition")
    op.drop_constraint("replica_partition_wrong", "replica_partition")
    for name, _ in _OF_REPLICAS:
        op.drop_column("replica", name)
    for name, _ in _OF_COPIES:
        op.drop_column("replica_partition", name)
    op.drop_table("partition_manifest")
    op.execute("drop function partition_manifest_stays")
