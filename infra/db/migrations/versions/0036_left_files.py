"""Stores which files the tasks of an attempt have left on their machines.

Revision ID: 0036
Revises: 0033
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0036"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("attempt", sa.Column("left_files", postgresql.JSONB(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("attempt", "left_files")
