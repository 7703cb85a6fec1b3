"""Stores why tasks share the temporary folders of a machine.

Revision ID: 0037
Revises: 0036
"""

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("machine", sa.Column("shared_tmp", sa.Text(), nullable=True))


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("machine", "shared_tmp")
