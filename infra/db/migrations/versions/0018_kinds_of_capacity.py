"""Adds the capacity kinds that a workload may run on, and logs changes of clusters in the change log.

Revision ID: 0018
Revises: 0017
"""

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

# The stored `workload.ask` of existing workloads stays valid, because none of them specifies a capacity kind.
_ASK = """
create or replace function workload_ask(spec jsonb) returns text language sql immutable parallel safe as $$
    select jsonb_strip_nulls(jsonb_build_object(
        'jobs', (
            select jsonb_agg(jsonb_build_array(
                job -> 'name', job -> 'tasks', job -> 'resources' -> 'gpus', job -> 'resources' -> 'gpu_types',
                job -> 'resources' -> 'cpus_milli', job -> 'resources' -> 'memory_bytes',
                coalesce(job -> 'span_clusters', 'false')) order by place)
            from jsonb_array_elements(spec -> 'jobs') with ordinality as listed (job, place)),
        'tables', nullif(spec -> 'tables', '[]'),
        'allowed', spec -> 'regions_allowed',
        'excluded', nullif(spec -> 'regions_excluded', '[]'),
        'capacity', spec -> 'capacity',
        'max_runtime_s', spec -> 'limits' -> 'max_runtime_s'))::text
$$;
"""
_ASK_BEFORE = _ASK.replace("        'capacity', spec -> 'capacity',\n", "")
_CHANGED = """
create function cluster_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key, region)
    select 'machine', id, region from machine where region = new.region and cluster = new.name;
    return null;
end $$;
create trigger cluster_changed after update of capacity, prices on cluster for each row
    when ((old.capacity, old.prices) is distinct from (new.capacity, new.prices)) execute function cluster_changed();
"""


def upgrade() -> None:
    """Applies this revision."""
    op.execute(_ASK)
    op.execute(_CHANGED)


def downgrade() -> None:
    """Undoes this revision."""
    op.execute("drop trigger cluster_changed on cluster; drop function cluster_changed")
    op.execute(_ASK_BEFORE)
    # Earlier versions reject a specification with an unknown field.
    op.execute("update workload set spec = spec - 'capacity' where jsonb_exists(spec, 'capacity')")
