"""Limits the immunity of evictors against their victims: it ends when the queue changes from outside.

Revision ID: 0016
Revises: 0015
"""

from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

# A sequence needs no lock, so submissions do not wait for each other. It also counts transactions that are rolled back,
# and counts before the commit. So an immunity may end early or late by one change.
_CHANGES = """
create sequence outside_change;
create function newest_outside_change() returns bigint language sql stable as
    'select last_value from outside_change';
create function changed_outside() returns trigger language plpgsql as $$
begin
    perform nextval('outside_change');
    return null;
end $$;
create trigger workload_submitted after insert on workload for each statement execute function changed_outside();
create trigger workload_ended after update of finished_at on workload for each row
    when (old.finished_at is distinct from new.finished_at) execute function changed_outside();
create trigger workload_has_another_level after update of level on workload for each row
    when (old.level is distinct from new.level) execute function changed_outside();
create trigger tenant_has_another_quota after update of level, quota_gpus, quota_cpus_milli on tenant for each row
    when ((old.level, old.quota_gpus, old.quota_cpus_milli) is distinct from
          (new.level, new.quota_gpus, new.quota_cpus_milli)) execute function changed_outside();
"""
_UNDO = """
drop trigger workload_submitted on workload;
drop trigger workload_ended on workload;
drop trigger workload_has_another_level on workload;
drop trigger tenant_has_another_quota on tenant;
drop function changed_outside, newest_outside_change;
drop sequence outside_change
"""
_FOR_EVER = "where e.evictor = v.victim and e.victim = wish.workload)"
_UNTIL_A_CHANGE = "where e.evictor = v.victim and e.victim = wish.workload and e.change = newest_outside_change())"


def _award(immunity: str) -> str:
    """Returns the award function of revision 0003 with the condition `immunity`."""
    sql = (Path(__file__).parent.parent / "0003_award.sql").read_text()
    function = sql[sql.index("create function award_plans") :]
    assert function.count(_FOR_EVER) == 1
    return function.replace("create function", "create or replace function", 1).replace(_FOR_EVER, immunity)


def upgrade() -> None:
    """Applies this revision."""
    op.execute(_CHANGES)
    # Existing evictions happened before the first counted change, so they give no immunity any more.
    op.execute("select nextval('outside_change'), nextval('outside_change')")
    op.add_column("eviction", sa.Column("change", sa.BigInteger(), server_default="0", nullable=False))
    op.alter_column("eviction", "change", server_default=sa.text("newest_outside_change()"))
    op.create_index("eviction_change", "eviction", ["change"])
    op.execute(_award(_UNTIL_A_CHANGE))


def downgrade() -> None:
    """Undoes this revision."""
    op.execute(_award(_FOR_EVER))
    op.drop_index("eviction_change", table_name="eviction")
    op.drop_column("eviction", "change")
    op.execute(_UNDO)
