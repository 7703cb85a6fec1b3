"""Adds CHECK constraints that the models always had, but that were missing in the first schema.

Revision ID: 0013
Revises: 0012
"""

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_LEFT_OUT = (
    ("tenant_level", "tenant", "level between 1 and 7"),
    ("api_key_role", "api_key", "role in ('viewer', 'submitter', 'operator')"),
    ("machine_gpus", "machine", "gpus between 0 and 62"),
    ("machine_state", "machine", "state in ('joining', 'ready', 'lost')"),
)


def upgrade() -> None:
    """Applies this revision."""
    for name, table, condition in _LEFT_OUT:
        op.create_check_constraint(name, table, condition)


def downgrade() -> None:
    """Undoes this revision."""
    for name, table, _ in _LEFT_OUT:
        op.drop_constraint(name, table, type_="check")
