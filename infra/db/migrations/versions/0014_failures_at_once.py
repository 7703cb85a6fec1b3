"""Adds the time of a machine's last counted failure, so that workloads that fail together count as one failure.

Revision ID: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("machine", sa.Column("failed_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("machine", "failed_at")
