"""Stores which saves of an attempt have failed since its last checkpoint.

Revision ID: 0042
Revises: 0041
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0042"
down_revision = "0041"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("attempt", sa.Column("failing", postgresql.JSONB(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("attempt", "failing")
