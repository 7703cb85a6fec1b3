"""Adds the workloads that failed on each machine, pinned machine keys, tenants' numbers, and the paths in archives.

Revision ID: 0012
Revises: 0011
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    empty = sa.text("'[]'")
    op.add_column("machine", sa.Column("failed_workloads", postgresql.JSONB(), server_default=empty, nullable=False))
    op.add_column("machine", sa.Column("offered_key", sa.Text(), nullable=True))
    op.add_column("machine", sa.Column("offered_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("tenant", sa.Column("number", sa.BigInteger(), sa.Identity(always=True), nullable=False))
    op.create_unique_constraint("tenant_number", "tenant", ["number"])
    op.add_column("archive", sa.Column("paths", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("archive", "paths")
    op.drop_constraint("tenant_number", "tenant")
    op.drop_column("tenant", "number")
    for name in ("offered_at", "offered_key", "failed_workloads"):
        op.drop_column("machine", name)
