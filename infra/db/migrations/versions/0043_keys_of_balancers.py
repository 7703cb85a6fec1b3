"""API keys of balancers.

Revision ID: 0043
Revises: 0042
"""

from alembic import op

revision = "0043"
down_revision = "0042"
branch_labels = None
depends_on = None

_ROLES, _WITHOUT_TENANT = "role in ({})", "tenant is not null or role in ({})"


def _replace_checks(roles: str, without_tenant: str) -> None:
    op.drop_constraint("api_key_role", "api_key")
    op.drop_constraint("api_key_tenant", "api_key")
    op.create_check_constraint("api_key_role", "api_key", _ROLES.format(roles))
    op.create_check_constraint("api_key_tenant", "api_key", _WITHOUT_TENANT.format(without_tenant))


def upgrade() -> None:
    """Applies this revision."""
    _replace_checks(
        "'viewer', 'submitter', 'operator', 'machine', 'balancer'", "'operator', 'viewer', 'machine', 'balancer'"
    )


def downgrade() -> None:
    """Undoes this revision. Keys of balancers are deleted, because earlier versions have no such role."""
    op.execute("delete from api_key where role = 'balancer'")
    _replace_checks("'viewer', 'submitter', 'operator', 'machine'", "'operator', 'viewer', 'machine'")
