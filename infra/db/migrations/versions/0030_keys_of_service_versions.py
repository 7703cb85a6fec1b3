"""Stores the idempotency keys of requests that create and update services.

Revision ID: 0030
Revises: 0029
"""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("service_version", sa.Column("idempotency_key", sa.Text(), nullable=True))
    op.add_column("service_version", sa.Column("request_sha256", sa.Text(), nullable=True))
    op.create_index(
        "service_version_key",
        "service_version",
        ["created_by", "idempotency_key"],
        unique=True,
        postgresql_where=sa.text("idempotency_key is not null"),
    )


def downgrade() -> None:
    """Undoes this revision."""
    op.drop_index("service_version_key", table_name="service_version")
    op.drop_column("service_version", "request_sha256")
    op.drop_column("service_version", "idempotency_key")
