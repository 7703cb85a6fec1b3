"""Adds tasks' reports about checkpoints, the lost work of attempts, and platform notices.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# Decisions depend on the work that an eviction would lose, so these changes are logged, including the first report of a
# resumed attempt.
_CHANGED = """
    create trigger attempt_changed after update on attempt for each row when (
        (new.region, new.awarded_at, new.released_at, new.gpu_types, new.cpus_milli)
        is distinct from
        (old.region, old.awarded_at, old.released_at, old.gpu_types, old.cpus_milli)
        or new.released_at is null
           and (new.rank, new.started_at, new.ready_at is null, new.evicting_since is null, new.checkpoint_at{new})
               is distinct from
               (old.rank, old.started_at, old.ready_at is null, old.evicting_since is null, old.checkpoint_at{old}))
        execute function attempt_changed()
"""
_JSON = postgresql.JSONB(none_as_null=True, astext_type=sa.Text())


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("attempt", sa.Column("checkpoint_write_s", sa.Double(), nullable=True))
    for name in ("cadence", "load", "notice"):
        op.add_column("attempt", sa.Column(name, _JSON, nullable=True))
    op.add_column("attempt", sa.Column("lost_s", sa.Double(), nullable=True))
    op.add_column("machine", sa.Column("notice", _JSON, nullable=True))
    op.execute("drop trigger attempt_changed on attempt")
    op.execute(_CHANGED.format(new=", new.resumed_step is null", old=", old.resumed_step is null"))


def downgrade() -> None:
    """Undoes this revision."""
    op.execute("drop trigger attempt_changed on attempt")
    op.execute(_CHANGED.format(new="", old=""))
    op.drop_column("machine", "notice")
    for name in ("lost_s", "notice", "load", "cadence", "checkpoint_write_s"):
        op.drop_column("attempt", name)
