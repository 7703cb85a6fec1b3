"""Stores what launches took, the limit of launches on lent machines, and what their work has earned.

Revision ID: 0040
Revises: 0037
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0040"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision. Machines on which an attempt has made steps count as tried."""
    op.add_column("attempt", sa.Column("launch_s", sa.Double(), nullable=True))
    op.add_column("attempt", sa.Column("launch_limit_s", sa.Double(), nullable=True))
    op.add_column("attempt", sa.Column("earned", postgresql.JSONB(none_as_null=True), nullable=True))
    op.add_column("machine", sa.Column("answered_at", sa.DateTime(timezone=True), nullable=True))
    op.execute(
        "update machine as m set answered_at = now() where exists (select from allocation as l join attempt as a"
        " using (workload, attempt) where l.machine = m.id and (a.last_step > coalesce(a.resumed_step, 0)"
        " or a.outcome ->> 'code' = 'completed'))"
    )


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_column("machine", "answered_at")
    for name in ("earned", "launch_limit_s", "launch_s"):
        op.drop_column("attempt", name)
