"""Adds the change log, from which schedulers update their columns instead of reading queue and fleet for each decision.

Revision ID: 0002
Revises: 0001
"""

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_TXID = sa.text("(pg_current_xact_id()::text::bigint)")
_WATCHED = ("workload", "attempt", "allocation", "machine")


def upgrade() -> None:
    """Applies this revision."""
    op.create_table(
        "change",
        sa.Column("txid", sa.BigInteger(), server_default=_TXID, nullable=False),
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=True),
        sa.Column("region", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("txid", "id"),
        prefixes=["UNLOGGED"],
    )
    op.create_table(
        "change_epoch",
        sa.Column("one", sa.Boolean(), sa.CheckConstraint("one"), server_default=sa.text("true"), nullable=False),
        sa.Column("epoch", sa.Text(), server_default=sa.text("gen_random_uuid()::text"), nullable=False),
        sa.Column("forgotten_txid", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("one"),
        prefixes=["UNLOGGED"],
    )
    op.add_column("attempt", sa.Column("rank", sa.BigInteger(), server_default="7", nullable=False))
    op.execute("update attempt set rank = (plan ->> 'rank')::bigint where plan ->> 'rank' is not null")
    op.execute((Path(__file__).parent.parent / "0002_change_log.sql").read_text())
    op.add_column("publication", sa.Column("columns", sa.LargeBinary(), nullable=True))
    op.execute("alter table publication alter column columns set storage external")
    live = sa.text("finished_at is null")
    op.drop_index("workload_live", table_name="workload", postgresql_where=live)
    op.create_index("workload_live", "workload", ["id"], postgresql_where=live)
    # A lower fill factor leaves space for a row's next version on the same page (HOT updates). These rows change often,
    # in columns without an index.
    op.execute("alter table workload set (fillfactor = 80)")
    op.execute("alter table machine set (fillfactor = 50)")
    op.drop_table("region_bid")
    op.create_table(
        "region_bid",
        sa.Column("scan", sa.BigInteger(), nullable=False),
        sa.Column("first", sa.BigInteger(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("bids", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("scan", "first", "region"),
        prefixes=["UNLOGGED"],
    )
    op.create_table(
        "scan_batch",
        sa.Column("scan", sa.BigInteger(), nullable=False),
        sa.Column("first", sa.BigInteger(), nullable=False),
        sa.Column("entries", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("scan", "first"),
        prefixes=["UNLOGGED"],
    )


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_table("scan_batch")
    op.drop_table("region_bid")
    op.create_table(
        "region_bid",
        sa.Column("scan", sa.BigInteger(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("body", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("scan", "region", "workload"),
        prefixes=["UNLOGGED"],
    )
    op.execute("alter table machine reset (fillfactor)")
    op.execute("alter table workload reset (fillfactor)")
    live = sa.text("finished_at is null")
    op.drop_index("workload_live", table_name="workload", postgresql_where=live)
    op.create_index("workload_live", "workload", ["phase"], postgresql_where=live)
    op.drop_column("publication", "columns")
    op.execute("drop trigger allocation_guard on allocation")
    op.execute("drop trigger allocation_guard_inserted on allocation")
    op.execute("drop function allocation_guard_inserted")
    op.execute(
        "create trigger allocation_guard after insert or update or delete on allocation"
        " for each row execute function allocation_guard()"
    )
    for table in _WATCHED:
        for what in ("came", "went", "changed", "emptied"):
            op.execute(f"drop trigger {table}_{what} on {table}")
        op.execute(f"drop function {table}_changed")
    for table in ("tenant", "region"):
        op.execute(f"drop trigger {table}_changed on {table}")
        op.execute(f"drop trigger {table}_emptied on {table}")
    op.execute("drop function named_changed, all_went, rows_came, rows_went")
    op.drop_column("workload", "ask")
    op.execute("drop function workload_ask")
    op.drop_column("attempt", "rank")
    op.drop_table("change_epoch")
    op.drop_table("change")
