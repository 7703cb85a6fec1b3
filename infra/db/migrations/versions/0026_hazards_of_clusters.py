"""Plans prefer clusters whose owners take machines back less often: the hazard of each cluster.

Revision ID: 0026
Revises: 0025
"""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_TRIGGER = """
create trigger cluster_changed after update of {columns} on cluster for each row
    when (({old}) is distinct from ({new})) execute function cluster_changed()
"""


def _follow(*columns: str) -> None:
    """Lets changes of these columns of a cluster enter the change log."""
    op.execute("drop trigger cluster_changed on cluster")
    old, new = (", ".join(f"{row}.{column}" for column in columns) for row in ("old", "new"))
    op.execute(_TRIGGER.format(columns=", ".join(columns), old=old, new=new))


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("cluster", sa.Column("departures_per_h", sa.Double(), server_default="0", nullable=False))
    op.create_check_constraint("cluster_departures", "cluster", "departures_per_h >= 0")
    _follow("capacity", "prices", "departures_per_h")


def downgrade() -> None:
    """Undoes this revision."""
    _follow("capacity", "prices")
    op.drop_constraint("cluster_departures", "cluster")
    op.drop_column("cluster", "departures_per_h")
