"""Adds an optional expiry to API keys.

Revision ID: 0010
Revises: 0009
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("api_key", sa.Column("expires_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("api_key", "expires_at")
