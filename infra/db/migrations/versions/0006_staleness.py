"""Adds the staleness of replicas as a column, top-ups of stale replicas, and the stale tables that attempts read.

Revision ID: 0006
Revises: 0005
"""

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_TIME = postgresql.TIMESTAMP(timezone=True)
_READY_AT = "update replica set ready_at = case when state <> 'copying' then coalesce(ready_at, created_at) end"
_STALE_SINCE = """
    update replica as r set stale_since = (
        select min(p.created_at) from data_partition as p
        where p.data_table = r.data_table and not exists (
            select from replica_partition as h
            where h.data_table = p.data_table and h.partition = p.name and h.region = r.region
                and h.ready_at is not null))
    where r.whole and r.state <> 'copying'
"""


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("replica", sa.Column("stale_since", _TIME, nullable=True))
    op.add_column("replica", sa.Column("topping_up", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("replica", sa.Column("topped_up_for", sa.Text(), nullable=True))
    op.add_column("attempt", sa.Column("stale_tables", postgresql.JSONB(astext_type=sa.Text()), nullable=True))
    op.execute(_READY_AT)
    op.execute(_STALE_SINCE)
    op.create_check_constraint("replica_stale", "replica", "stale_since is null or whole and state <> 'copying'")
    op.create_check_constraint("replica_topping_up", "replica", "not topping_up or stale_since is not null")
    op.execute((Path(__file__).parent.parent / "0006_staleness.sql").read_text())


def downgrade() -> None:
    """Undoes this revision."""
    op.execute("drop trigger replica_is_ready on replica")
    op.execute("drop trigger replicas_lack_what_came on data_partition")
    for trigger in ("replica_partition_came", "replica_partition_changed", "replica_partition_went"):
        op.execute(f"drop trigger {trigger} on replica_partition")
    op.execute("drop function replica_is_ready, replicas_lack_what_came, replica_partition_changed")
    op.drop_constraint("replica_topping_up", "replica")
    op.drop_constraint("replica_stale", "replica")
    op.drop_column("attempt", "stale_tables")
    op.drop_column("replica", "topped_up_for")
    op.drop_column("replica", "topping_up")
    op.drop_column("replica", "stale_since")
