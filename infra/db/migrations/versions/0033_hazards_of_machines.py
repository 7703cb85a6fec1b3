"""Stores how often each lent machine is expected to depart, for the choice among the machines of a cluster.

Revision ID: 0033
Revises: 0032
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column(
        "site_hazard", sa.Column("machines", postgresql.JSONB(), server_default=sa.text("'{}'"), nullable=False)
    )


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("site_hazard", "machines")
