"""Adds zone, capacity kind and prices of clusters, and the history of prices.

Revision ID: 0017
Revises: 0016
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_KINDS = "capacity in ('reserved', 'on_demand', 'spot', 'voluntary')"
_PRICED = """
create function cluster_priced() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into cluster_price (region, cluster, since, capacity, prices)
        values (new.region, new.name, '-infinity', new.capacity, '{}') on conflict do nothing;
        if found and new.prices = '{}' then
            return null;
        end if;
    end if;
    insert into cluster_price (region, cluster, since, capacity, prices)
    values (new.region, new.name, clock_timestamp(), new.capacity, new.prices)
    on conflict (region, cluster, since) do update set capacity = excluded.capacity, prices = excluded.prices;
    return null;
end $$;
create trigger cluster_is_made after insert on cluster for each row execute function cluster_priced();
create trigger cluster_has_other_prices after update of capacity, prices on cluster for each row
    when ((old.capacity, old.prices) is distinct from (new.capacity, new.prices)) execute function cluster_priced();
insert into cluster_price (region, cluster, since, capacity, prices)
    select region, name, '-infinity', 'reserved', '{}' from cluster;
"""
_UNDO = """
drop trigger cluster_has_other_prices on cluster;
drop trigger cluster_is_made on cluster;
drop function cluster_priced;
"""


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("cluster", sa.Column("zone", sa.Text(), nullable=True))
    op.add_column("cluster", sa.Column("capacity", sa.Text(), server_default="reserved", nullable=False))
    op.create_check_constraint("cluster_capacity", "cluster", _KINDS)
    none = sa.text("'{}'")
    op.add_column("cluster", sa.Column("prices", postgresql.JSONB(), server_default=none, nullable=False))
    op.create_table(
        "cluster_price",
        sa.Column("region", sa.Text(), primary_key=True),
        sa.Column("cluster", sa.Text(), primary_key=True),
        sa.Column("since", sa.DateTime(timezone=True), primary_key=True),
        sa.Column("capacity", sa.Text(), nullable=False),
        sa.Column("prices", postgresql.JSONB(), nullable=False),
        sa.CheckConstraint(_KINDS, name="cluster_price_capacity"),
    )
    op.execute(_PRICED)


def downgrade() -> None:
    """Undoes this revision."""
    op.execute(_UNDO)
    op.drop_table("cluster_price")
    op.drop_constraint("cluster_capacity", "cluster", type_="check")
    for name in ("prices", "capacity", "zone"):
        op.drop_column("cluster", name)
