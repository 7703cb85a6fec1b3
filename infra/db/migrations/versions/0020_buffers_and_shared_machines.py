"""Adds buffers of idle machines to pools, and allows several workloads to wait for one machine.

Revision ID: 0020
Revises: 0019
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_LIVE = sa.text("gone_at is null")


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("pool", sa.Column("buffer", sa.BigInteger(), server_default="0", nullable=False))
    op.create_check_constraint("pool_buffer", "pool", "buffer >= 0")
    op.drop_index("instance_wanted_by", "instance")
    op.alter_column(
        "instance",
        "wanted_by",
        type_=postgresql.JSONB(),
        postgresql_using="'{}'::jsonb",  # The next round of the capacity keeper writes it again.
        server_default=sa.text("'{}'"),
        nullable=False,
    )
    op.create_index("instance_wanted_by", "instance", ["wanted_by"], postgresql_using="gin", postgresql_where=_LIVE)


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_index("instance_wanted_by", "instance")
    op.alter_column("instance", "wanted_by", server_default=None, nullable=True)
    op.alter_column("instance", "wanted_by", type_=sa.Text(), postgresql_using="null")
    op.create_index("instance_wanted_by", "instance", ["wanted_by"], postgresql_where=_LIVE)
    op.drop_column("pool", "buffer")
