"""Single GPU slots of a machine can be withheld, because its owner has taken them back.

Revision ID: 0024
Revises: 0023
"""

from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

_AWARD = Path(__file__).parent.parent / "0021_award.sql"
_FREE, _FREE_WITHOUT = "- 1) & ~held end as free_slots", "- 1) & ~(held | withheld) end as free_slots"
# A withheld slot that a victim still holds is not promised to anybody: the owner gets it.
_PROMISED, _NOT_FOR_AWARDS = "(m.free_slots, m.promised,", "(m.free_slots, m.promised | m.withheld,"
_READ, _READ_WITHHELD = "select id, promised, free_cpus_milli", "select id, promised, withheld, free_cpus_milli"
_CHANGED = """
    create trigger machine_changed after update on machine for each row when (
        (new.region, new.cluster, new.rack, new.gpu_type, new.gpus, new.cpus_milli, new.memory_bytes, new.held,
         new.free_cpus_milli, new.free_memory_bytes, new.state = 'ready', new.cordon is null, new.draining{new})
        is distinct from
        (old.region, old.cluster, old.rack, old.gpu_type, old.gpus, old.cpus_milli, old.memory_bytes, old.held,
         old.free_cpus_milli, old.free_memory_bytes, old.state = 'ready', old.cordon is null, old.draining{old}))
        execute function machine_changed()
"""


def _award() -> str:
    sql = _AWARD.read_text()
    function = sql[sql.index("create or replace function award_plans") :]
    for text in (_FREE, _PROMISED, _READ):
        assert function.count(text) == 1
    return function


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("machine", sa.Column("withheld", sa.BigInteger(), server_default="0", nullable=False))
    op.create_check_constraint("machine_withheld", "machine", "withheld >= 0 and withheld < (1::bigint << gpus::int)")
    changed = {_FREE: _FREE_WITHOUT, _PROMISED: _NOT_FOR_AWARDS, _READ: _READ_WITHHELD}
    function = _award()
    for before, after in changed.items():
        function = function.replace(before, after)
    op.execute(function)
    op.execute("drop trigger machine_changed on machine")
    op.execute(_CHANGED.format(new=", new.withheld", old=", old.withheld"))


def downgrade() -> None:
    """Undoes this revision."""
    op.execute("drop trigger machine_changed on machine")
    op.execute(_CHANGED.format(new="", old=""))
    op.execute(_award())
    op.drop_constraint("machine_withheld", "machine")
    op.drop_column("machine", "withheld")
