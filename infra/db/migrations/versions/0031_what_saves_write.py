"""Stores what the last saves of an attempt have written, and how long they took.

Revision ID: 0031
Revises: 0030
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("attempt", sa.Column("saves", postgresql.JSONB(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("attempt", "saves")
