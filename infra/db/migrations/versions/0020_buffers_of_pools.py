"""Machines without work that a pool keeps for what comes next.

Revision ID: 0020
Revises: 0019
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("pool", sa.Column("buffer", sa.BigInteger(), server_default="0", nullable=False))
    op.create_check_constraint("pool_buffer", "pool", "buffer >= 0")


def downgrade() -> None:
    """Takes this revision back."""
    op.drop_column("pool", "buffer")
