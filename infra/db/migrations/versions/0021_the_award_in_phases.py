"""The award keeps its state in composite types, and has numbered phases; what it does is unchanged.

Revision ID: 0021
Revises: 0020
"""

from pathlib import Path

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_SQL = Path(__file__).parent.parent
_FOR_EVER = "where e.evictor = v.victim and e.victim = wish.workload)"
_UNTIL_A_CHANGE = "where e.evictor = v.victim and e.victim = wish.workload and e.change = newest_outside_change())"
_UNDO = """
drop function award_allocate, award_victims_evictable;
drop type award_machine, award_workload, award_candidate, award_allocation, award_victim, award_request
"""


def _award_before() -> str:
    """The award as revision 0003 made it and revision 0016 changed it."""
    sql = (_SQL / "0003_award.sql").read_text()
    function = sql[sql.index("create function award_plans") :]
    assert function.count(_FOR_EVER) == 1
    return function.replace("create function", "create or replace function", 1).replace(_FOR_EVER, _UNTIL_A_CHANGE)


def upgrade() -> None:
    """Applies this revision."""
    # The signature stays: while the first worker of this version migrates, workers of the version before may still award.
    op.execute((_SQL / "0021_award.sql").read_text())


def downgrade() -> None:
    """Undoes this revision."""
    op.execute(_award_before())
    op.execute(_UNDO)
