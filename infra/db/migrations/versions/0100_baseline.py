"""The schema of version 0.2.0, which `infra.db.create` creates. An empty database never runs later migrations.

Revision ID: 0100
"""

revision = "0100"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Does nothing: a database at this revision has been created with it."""


def downgrade() -> None:
    """Does nothing."""
