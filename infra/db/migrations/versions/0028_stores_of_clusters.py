"""Clusters with a store of their own for checkpoints, and the bandwidth of their links.

Revision ID: 0028
Revises: 0027
"""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_COLUMNS = (("cluster", "store_url"), ("workload", "checkpoint_store"), ("attempt", "store_url"))


def upgrade() -> None:
    """Applies this revision."""
    for table, column in _COLUMNS:
        op.add_column(table, sa.Column(column, sa.Text()))
    op.add_column("cluster", sa.Column("link_mbit", sa.Double()))
    op.create_check_constraint("cluster_link_mbit", "cluster", "link_mbit > 0")


def downgrade() -> None:
    """Undoes this revision. Checkpoints in stores of clusters are not found any more."""
    op.drop_column("cluster", "link_mbit")
    for table, column in _COLUMNS:
        op.drop_column(table, column)
