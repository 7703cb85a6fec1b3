"""Stores the bandwidth that the machines of an attempt have measured.

Revision ID: 0029
Revises: 0028
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("attempt", sa.Column("bandwidth", postgresql.JSONB(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("attempt", "bandwidth")
