"""Stores what the owner of a machine has said last, and when.

Revision ID: 0041
Revises: 0040
"""

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0040"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision. Machines that their owners have taken are found by the owner's notice."""
    op.add_column("machine", sa.Column("word_at_s", sa.Double(), server_default="0", nullable=False))
    op.add_column("machine", sa.Column("taken", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.execute(
        "update machine set taken = true, word_at_s = greatest(0, coalesce((notice -> 'detail' ->> 'at_s')::float8, 0))"
        " where notice -> 'detail' ->> 'platform' = 'owner'"
    )


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("machine", "taken")
    op.drop_column("machine", "word_at_s")
