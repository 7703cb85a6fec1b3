"""Adds the catalogue: namespaces, partitions, datacenters, partial replicas, and the usage of tables by jobs.

Revision ID: 0005
Revises: 0004
"""

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_TIME = postgresql.TIMESTAMP(timezone=True)
_JSON = postgresql.JSONB(astext_type=sa.Text())
# A table of an earlier version was everything below its folder. It becomes one partition.
_ONE_PARTITION = """
    insert into data_partition (data_table, name, location, size_bytes, created_at)
    select name, 'all', 'tables/' || name || '/', size_bytes, created_at from data_table
"""
_ITS_REPLICAS = """
    insert into replica_partition (data_table, partition, region, ready_at)
    select data_table, 'all', region, ready_at from replica where state = 'ready'
"""


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("region", sa.Column("storage_bytes", sa.BigInteger(), sa.CheckConstraint("storage_bytes >= 0")))
    op.add_column("region", sa.Column("cpu_hours", _JSON, server_default=sa.text("'{}'"), nullable=False))
    op.create_table(
        "datacenter",
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("storage_bytes", sa.BigInteger(), sa.CheckConstraint("storage_bytes >= 0"), nullable=True),
        sa.ForeignKeyConstraint(["region"], ["region.name"]),
        sa.PrimaryKeyConstraint("region", "name"),
    )
    op.add_column("cluster", sa.Column("datacenter", sa.Text(), nullable=True))
    op.create_foreign_key(None, "cluster", "datacenter", ["region", "datacenter"], ["region", "name"])
    op.create_table(
        "data_partition",
        sa.Column("data_table", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("location", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), sa.CheckConstraint("size_bytes >= 0"), nullable=False),
        sa.Column("checksum", sa.Text(), sa.CheckConstraint("checksum ~ '^sha256:[0-9a-f]{64}$'"), nullable=True),
        sa.Column("created_at", _TIME, server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.ForeignKeyConstraint(["data_table"], ["data_table.name"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("data_table", "name"),
    )
    op.add_column("replica", sa.Column("whole", sa.Boolean(), server_default=sa.text("true"), nullable=False))
    op.add_column("replica", sa.Column("delete_at", _TIME, nullable=True))
    op.create_check_constraint("replica_state", "replica", "state in ('copying', 'ready', 'deleting')")
    op.create_check_constraint("replica_delete_at", "replica", "(state = 'deleting') = (delete_at is not null)")
    op.create_table(
        "replica_partition",
        sa.Column("data_table", sa.Text(), nullable=False),
        sa.Column("partition", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("datacenter", sa.Text(), nullable=True),
        sa.Column("ready_at", _TIME, nullable=True),
        sa.ForeignKeyConstraint(
            ["data_table", "region"], ["replica.data_table", "replica.region"], ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["data_table", "partition"], ["data_partition.data_table", "data_partition.name"], ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["region", "datacenter"], ["datacenter.region", "datacenter.name"]),
        sa.PrimaryKeyConstraint("data_table", "partition", "region"),
    )
    op.create_table(
        "usage_run",
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), sa.CheckConstraint("kind in ('ml', 'spark', 'presto')"), nullable=False),
        sa.Column("app", sa.Text(), nullable=True),
        sa.Column("priority", sa.BigInteger(), sa.CheckConstraint("priority between 1 and 7"), nullable=False),
        sa.Column("tables", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("gpu_hours", _JSON, server_default=sa.text("'{}'"), nullable=False),
        sa.Column(
            "cpu_hours", sa.Float(), sa.CheckConstraint("cpu_hours >= 0"), server_default=sa.text("0"), nullable=False
        ),
        sa.Column("ended_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("source", "run"),
    )
    op.create_index("usage_run_window", "usage_run", ["ended_at"])
    op.execute(_ONE_PARTITION)
    op.execute(_ITS_REPLICAS)
    op.execute((Path(__file__).parent.parent / "0005_catalogue.sql").read_text())
    op.alter_column("data_table", "size_bytes", server_default="0")
    op.add_column(
        "data_table",
        sa.Column("namespace", sa.Text(), sa.Computed("table_namespace(name)", persisted=True), nullable=False),
    )
    op.create_check_constraint("data_table_name", "data_table", "name not like 'default.%'")
    op.create_index("data_table_namespace", "data_table", ["namespace", "name"])


def downgrade() -> None:
    """Undoes this revision. Partial replicas and replicas that are being deleted are lost."""
    op.execute("drop trigger data_table_came on data_table")
    op.execute("drop trigger data_table_moved on data_table")
    for trigger in ("home_replica_changed", "replica_came_ready", "replica_became_ready"):
        op.execute(f"drop trigger {trigger} on replica")
    op.drop_table("usage_run")
    op.drop_table("replica_partition")
    op.drop_table("data_partition")
    op.execute(
        "drop function data_partition_comes, data_partitions_came, data_partition_stays, replica_became_ready,"
        " data_table_has_home, home_replica_stays, check_home"
    )
    op.drop_index("data_table_namespace", table_name="data_table")
    op.drop_constraint("data_table_name", "data_table")
    op.drop_column("data_table", "namespace")
    op.execute("drop function table_namespace")
    op.alter_column("data_table", "size_bytes", server_default=None)
    op.execute("delete from replica where state = 'deleting' or not whole")
    op.drop_constraint("replica_delete_at", "replica")
    op.drop_constraint("replica_state", "replica")
    op.drop_column("replica", "delete_at")
    op.drop_column("replica", "whole")
    op.drop_constraint("cluster_region_datacenter_fkey", "cluster")
    op.drop_column("cluster", "datacenter")
    op.drop_table("datacenter")
    op.drop_column("region", "cpu_hours")
    op.drop_column("region", "storage_bytes")
