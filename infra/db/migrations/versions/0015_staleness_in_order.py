"""Makes an append wait for concurrent completions of partitions in a replica, so that `stale_since` stays correct.

Revision ID: 0015
Revises: 0014
"""

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_APPENDED = """
create or replace function replicas_lack_what_came() returns trigger language plpgsql as $$
begin
    {lock}
    update replica as r set stale_since = came.at
    from (select data_table, min(created_at) as at from moved_rows group by data_table) as came
        join data_table as t on t.name = came.data_table
    where r.data_table = came.data_table and r.region <> t.home_region and r.whole and r.state <> 'copying'
        and r.ready_at is not null and r.stale_since is null;
    return null;
end $$
"""
# A concurrent transaction may be setting a replica's `stale_since` to null, because its last missing partition has
# arrived. Without this lock, the update would skip that replica, because the column is not null before the commit. With
# the lock the update waits, and then runs with a new snapshot.
_LOCK = """
    perform from replica as r where r.data_table in (select data_table from moved_rows) and r.stale_since is not null
    order by r.data_table, r.region for no key update;
"""
_LOST = """
update replica as r set stale_since = lacking.since from (
    select h.data_table, h.region, min(p.created_at) as since
    from replica as h join data_table as t on t.name = h.data_table and t.home_region <> h.region
        join data_partition as p on p.data_table = h.data_table
    where h.whole and h.state <> 'copying' and h.ready_at is not null and h.stale_since is null and not exists (
        select from replica_partition as q
        where q.data_table = p.data_table and q.partition = p.name and q.region = h.region and q.ready_at is not null)
    group by h.data_table, h.region
) as lacking where r.data_table = lacking.data_table and r.region = lacking.region
"""


def upgrade() -> None:
    """Applies this revision."""
    op.execute(_APPENDED.format(lock=_LOCK))
    op.execute(_LOST)


def downgrade() -> None:
    """Undoes this revision."""
    op.execute(_APPENDED.format(lock=""))
