"""Stores how often owners of lent machines take them back.

Revision ID: 0025
Revises: 0024
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.create_table(
        "site_hazard",
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("counts", postgresql.JSONB(), nullable=False),
        sa.Column("seen", sa.Text(), nullable=False),
        sa.Column("lent", postgresql.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.PrimaryKeyConstraint("region", name="pk_site_hazard"),
        sa.ForeignKeyConstraint(["region"], ["region.name"], name="fk_site_hazard_region_region", ondelete="CASCADE"),
    )


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_table("site_hazard")
