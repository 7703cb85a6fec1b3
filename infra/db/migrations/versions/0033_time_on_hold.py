"""Stores the time that a workload was on hold, which does not count as waiting.

Revision ID: 0033
Revises: 0032
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None

_HELD = """
    update workload as w
    set held_at = coalesce(
        (select max(e.at) from event as e where e.workload = w.id and e.kind = 'workload.held'), w.submitted_at)
    where w.held_by is not null and w.finished_at is null
"""
_FUNCTION = """
create or replace function workload_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key)
    values (case when {same} then 'workload' else 'moved' end, new.id);
    return null;
end $$;
"""
_SAME, _SAME_BEFORE = "(new.submitted_at, new.paused_s) = (old.submitted_at, old.paused_s)", "new.submitted_at = old.submitted_at"
_TRIGGER = """
    create trigger workload_changed after update on workload for each row when (
        (new.tenant, new.level, new.held_by is null, new.submitted_at, new.ask,
         new.phase in ('pending', 'preempted') and new.finished_at is null{new})
        is distinct from
        (old.tenant, old.level, old.held_by is null, old.submitted_at, old.ask,
         old.phase in ('pending', 'preempted') and old.finished_at is null{old}))
        execute function workload_changed()
"""


def upgrade() -> None:
    """Applies this revision."""
    for name in ("held_at", "unheld_at"):
        op.add_column("workload", sa.Column(name, postgresql.TIMESTAMP(timezone=True), nullable=True))
    op.add_column("workload", sa.Column("paused_s", sa.Double(), server_default="0", nullable=False))
    op.execute(_HELD)
    op.execute(_FUNCTION.format(same=_SAME))
    op.execute("drop trigger workload_changed on workload")
    op.execute(_TRIGGER.format(new=", new.paused_s", old=", old.paused_s"))


def downgrade() -> None:
    """Undoes this revision."""
    op.execute("drop trigger workload_changed on workload")
    op.execute(_TRIGGER.format(new="", old=""))
    op.execute(_FUNCTION.format(same=_SAME_BEFORE))
    for name in ("paused_s", "unheld_at", "held_at"):
        op.drop_column("workload", name)
