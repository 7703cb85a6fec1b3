"""API keys of machines; an index for the hours that a machine has given.

Revision ID: 0027
Revises: 0026
"""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

_ROLES, _WITHOUT_TENANT = "role in ({})", "tenant is not null or role in ({})"
_MACHINE = "case role when 'machine' then machine is not null and tenant is null else machine is null end"


def _replace_checks(roles: str, without_tenant: str) -> None:
    op.drop_constraint("api_key_role", "api_key")
    op.drop_constraint("api_key_tenant", "api_key")
    op.create_check_constraint("api_key_role", "api_key", _ROLES.format(roles))
    op.create_check_constraint("api_key_tenant", "api_key", _WITHOUT_TENANT.format(without_tenant))


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("api_key", sa.Column("machine", sa.Text()))
    _replace_checks("'viewer', 'submitter', 'operator', 'machine'", "'operator', 'viewer', 'machine'")
    op.create_check_constraint("api_key_machine", "api_key", _MACHINE)
    released = sa.text("released_at is not null")
    op.create_index("allocation_past", "allocation", ["machine", "released_at"], postgresql_where=released)


def downgrade() -> None:
    """Undoes this revision. Keys of machines are deleted, because earlier versions have no such role."""
    op.drop_index("allocation_past", "allocation")
    op.execute("delete from api_key where role = 'machine'")
    op.drop_constraint("api_key_machine", "api_key")
    _replace_checks("'viewer', 'submitter', 'operator'", "'operator', 'viewer'")
    op.drop_column("api_key", "machine")
