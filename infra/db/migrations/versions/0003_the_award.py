"""Makes the award one function call, and derives the slots of tasks from the attempt's plan and its allocations.

Revision ID: 0003
Revises: 0002
"""

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.drop_column("allocation", "tasks")
    op.execute((Path(__file__).parent.parent / "0003_award.sql").read_text())


def downgrade() -> None:
    """Undoes this revision."""
    op.execute("drop function award_plans, lowest_bits")
    op.execute(
        "create trigger allocation_came after insert on allocation referencing new table as moved_rows"
        " for each statement execute function rows_came()"
    )
    op.add_column("allocation", sa.Column("tasks", postgresql.JSONB(), nullable=True))
    op.execute(_TASKS)
    op.alter_column("allocation", "tasks", nullable=False)


# As in `domain.slots`: tasks are numbered in the plan's order, and get their machine's slots in ascending order.
_TASKS = """
    with task as (
        select a.workload, a.attempt, place.machine, job.place as job_place, job.plan ->> 'job' as job,
               (spec.spec -> 'resources' ->> 'gpus')::int as gpus,
               row_number() over (partition by a.workload, a.attempt, job.place order by place.place, copy) - 1 as task
        from attempt as a join workload as w on w.id = a.workload,
             jsonb_array_elements(a.plan -> 'jobs') with ordinality as job (plan, place),
             jsonb_array_elements(w.spec -> 'jobs') with ordinality as spec (spec, place),
             jsonb_array_elements(job.plan -> 'machines') with ordinality as listed (pair, place),
             lateral (select pair ->> 0 as machine, listed.place) as place,
             generate_series(1, (pair ->> 1)::int) as copy
        where spec.place = job.place
    ), numbered as (
        select *, sum(gpus) over (
            partition by workload, attempt, machine order by job_place, task) as upto from task
    ), described as (
        select n.workload, n.attempt, n.machine, jsonb_agg(
            jsonb_build_object('job', n.job, 'task', n.task, 'slots', array(
                select slot from (
                    select slot, row_number() over (order by slot) as place
                    from generate_series(0, 61) as slot where (l.slots | l.awaited) >> slot & 1 = 1) as own
                where place > upto - gpus and place <= upto order by slot))
            order by job_place, task) as tasks
        from numbered as n join allocation as l using (workload, attempt, machine)
        group by n.workload, n.attempt, n.machine
    )
    update allocation set tasks = jsonb_build_object('tasks', coalesce(d.tasks, '[]'))
    from allocation as l left join described as d using (workload, attempt, machine)
    where (allocation.workload, allocation.attempt, allocation.machine) = (l.workload, l.attempt, l.machine)
"""
