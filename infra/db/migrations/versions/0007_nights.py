"""Adds nightly runs of Tetris, their moves, and the pause of moves.

Revision ID: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_TIME = postgresql.TIMESTAMP(timezone=True)
_JSON = postgresql.JSONB(astext_type=sa.Text())


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("replica", sa.Column("made_by", sa.Text(), server_default="operator", nullable=False))
    op.execute("update replica set made_by = 'workload' where requested_by is not null")
    op.create_check_constraint("replica_made_by", "replica", "made_by in ('operator', 'workload', 'night')")
    op.create_table(
        "night",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("dry_run", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("started_at", _TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column("planned_at", _TIME, nullable=True),
        sa.Column("deadline_at", _TIME, nullable=False),
        sa.Column("ended_at", _TIME, nullable=True),
        sa.Column("artifact_url", sa.Text(), nullable=True),
        sa.Column("report", _JSON, nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.CheckConstraint("state in ('planning', 'moving', 'ended', 'failed')", name="night_state"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        "night_open",
        "night",
        [sa.text("(true)")],
        unique=True,
        postgresql_where=sa.text("state in ('planning', 'moving')"),
    )
    op.create_index("night_started", "night", ["started_at"])
    op.create_table(
        "night_move",
        sa.Column("night", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("data_table", sa.Text(), nullable=False),
        sa.Column("source_region", sa.Text(), nullable=False),
        sa.Column("target_region", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("partitions", postgresql.ARRAY(sa.Text()), nullable=True),
        sa.Column("keeps_source", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("why", _JSON, server_default=sa.text("'{}'"), nullable=False),
        sa.Column("state", sa.Text(), server_default="waiting", nullable=False),
        sa.Column("lane", sa.BigInteger(), nullable=True),
        sa.Column("left_because", sa.Text(), nullable=True),
        sa.Column("begun_at", _TIME, nullable=True),
        sa.Column("ended_at", _TIME, nullable=True),
        sa.CheckConstraint("kind in ('home', 'replica', 'refresh', 'drop')", name="night_move_kind"),
        sa.CheckConstraint("state in ('waiting', 'copying', 'done', 'left')", name="night_move_state"),
        sa.ForeignKeyConstraint(["night"], ["night.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("night", "number"),
        sa.UniqueConstraint("night", "kind", "data_table", "target_region"),
    )
    op.create_index("night_move_begun", "night_move", ["begun_at"])
    op.create_index(
        "night_move_open",
        "night_move",
        ["night", "number"],
        postgresql_where=sa.text("state in ('waiting', 'copying')"),
    )
    op.create_table(
        "night_pause",
        sa.Column("one", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("since", _TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), server_default="", nullable=False),
        sa.CheckConstraint("one"),
        sa.PrimaryKeyConstraint("one"),
    )


def downgrade() -> None:
    """Undoes this revision. Executed moves stay in effect, but the records of nightly runs are lost."""
    op.drop_table("night_pause")
    op.drop_table("night_move")
    op.drop_table("night")
    op.drop_column("replica", "made_by")
