"""Stores how often machines of clusters are expected to depart in the next days, after the next hours.

Revision ID: 0032
Revises: 0031
"""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column(
        "cluster", sa.Column("later_departures_per_h", sa.Double(), server_default=sa.text("0"), nullable=False)
    )
    op.drop_constraint("cluster_departures", "cluster")
    op.create_check_constraint(
        "cluster_departures", "cluster", "departures_per_h >= 0 and later_departures_per_h >= 0"
    )


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_constraint("cluster_departures", "cluster")
    op.create_check_constraint("cluster_departures", "cluster", "departures_per_h >= 0")
    op.drop_column("cluster", "later_departures_per_h")
