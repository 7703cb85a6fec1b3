"""Adds the measured cold start of an attempt that serves: the work that its eviction loses.

Revision ID: 0023
Revises: 0022
"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

# Decisions depend on the work that an eviction would lose, so changes of it are logged.
_CHANGED = """
    create trigger attempt_changed after update on attempt for each row when (
        (new.region, new.awarded_at, new.released_at, new.gpu_types, new.cpus_milli)
        is distinct from
        (old.region, old.awarded_at, old.released_at, old.gpu_types, old.cpus_milli)
        or new.released_at is null
           and (new.rank, new.started_at, new.ready_at is null, new.evicting_since is null, new.checkpoint_at,
                new.resumed_step is null{new})
               is distinct from
               (old.rank, old.started_at, old.ready_at is null, old.evicting_since is null, old.checkpoint_at,
                old.resumed_step is null{old}))
        execute function attempt_changed()
"""


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("attempt", sa.Column("cold_start_s", sa.Double(), nullable=True))
    op.execute("drop trigger attempt_changed on attempt")
    op.execute(_CHANGED.format(new=", new.cold_start_s", old=", old.cold_start_s"))


def downgrade() -> None:
    """Undoes this revision."""
    op.execute("drop trigger attempt_changed on attempt")
    op.execute(_CHANGED.format(new="", old=""))
    op.drop_column("attempt", "cold_start_s")
