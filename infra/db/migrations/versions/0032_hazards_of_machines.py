"""Stores how often each lent machine is expected to depart, and the counts of departures with notice.

Revision ID: 0032
Revises: 0031
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column(
        "site_hazard", sa.Column("machines", postgresql.JSONB(), server_default=sa.text("'{}'"), nullable=False)
    )
    op.add_column("site_hazard", sa.Column("noticed", postgresql.JSONB(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("site_hazard", "noticed")
    op.drop_column("site_hazard", "machines")
