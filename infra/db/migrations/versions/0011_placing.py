"""Adds the time of bids, allows the removal of machines, and restricts phases to a closed list.

Revision ID: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_PHASES = (
    "pending", "placing", "migrating", "provisioning", "running", "checkpointing", "preempted", "succeeded", "failed",
    "cancelled",
)  # fmt: skip


def upgrade() -> None:
    """Applies this revision."""
    at = sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False)
    op.add_column("region_bid", at)
    # Allocations are kept as history after a machine is removed. The guard rejects live ones without a machine.
    op.drop_constraint("allocation_machine_fkey", "allocation", type_="foreignkey")
    where = sa.text("finished_at is null and spec -> 'limits' ->> 'max_pending_s' is not null")
    op.create_index("workload_expiring", "workload", ["id"], postgresql_where=where)
    op.create_check_constraint("workload_phase", "workload", sa.column("phase").in_(_PHASES))


def downgrade() -> None:
    """Undoes this revision. Allocations of removed machines are deleted."""
    op.drop_constraint("workload_phase", "workload", type_="check")
    op.drop_index("workload_expiring", "workload")
    op.execute("delete from allocation where machine not in (select id from machine)")
    op.create_foreign_key("allocation_machine_fkey", "allocation", "machine", ["machine"], ["id"])
    op.drop_column("region_bid", "at")
