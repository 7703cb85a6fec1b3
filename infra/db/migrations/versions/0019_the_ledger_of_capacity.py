"""Adds pools, the instances that were requested from providers, and refused launches.

Revision ID: 0019
Revises: 0018
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_KINDS = "kind in ('reserved', 'on_demand', 'spot', 'voluntary')"
_PHASES = "phase in ('requested', 'launching', 'joining', 'ready', 'draining', 'gone')"


def _texts(name: str) -> sa.Column[list[str]]:
    return sa.Column(name, postgresql.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False)


def _time(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True))


def _now(name: str) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False)


def upgrade() -> None:
    """Applies this revision."""
    op.create_table(
        "pool",
        sa.Column("region", sa.Text(), sa.ForeignKey("region.name"), primary_key=True),
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("size", sa.BigInteger(), server_default="0", nullable=False),
        *(_texts(name) for name in ("providers", "zones", "kinds", "machine_types")),
        sa.Column("max_usd_per_h", sa.Float()),
        sa.Column("max_size", sa.BigInteger()),
        sa.Column("idle_s", sa.Float(), server_default="600.0", nullable=False),
        sa.Column("reason", postgresql.JSONB()),
        _now("created_at"),
        sa.CheckConstraint("size >= 0", name="pool_size"),
        sa.CheckConstraint("max_size >= size", name="pool_max_size"),
        sa.CheckConstraint("idle_s >= 0", name="pool_idle"),
    )
    op.create_table(
        "instance",
        sa.Column("id", sa.Text(), primary_key=True),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("region", "pool", "cluster", "provider", "zone", "kind", "machine_type")
        ),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("gpu_type", sa.Text()),
        sa.Column("cpus_milli", sa.BigInteger(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("usd_per_h", sa.Float(), nullable=False),
        sa.Column("phase", sa.Text(), server_default="requested", nullable=False),
        sa.Column("reason", postgresql.JSONB()),
        sa.Column("ending", postgresql.JSONB()),
        sa.Column("native_id", sa.Text()),
        sa.Column("wanted_by", sa.Text()),
        sa.Column("machine", sa.Text()),
        _now("requested_at"),
        *(_time(name) for name in ("idle_since", "expected_at", "launched_at", "ready_at", "lost_at", "gone_at")),
        sa.CheckConstraint(_PHASES, name="instance_phase"),
        sa.CheckConstraint(_KINDS, name="instance_kind"),
        sa.CheckConstraint("(phase = 'gone') = (gone_at is not null)", name="instance_gone"),
    )
    live = sa.text("gone_at is null")
    op.create_index("instance_live", "instance", ["region", "pool"], postgresql_where=live)
    op.create_index("instance_machine", "instance", ["machine"])
    op.create_index("instance_wanted_by", "instance", ["wanted_by"], postgresql_where=live)
    op.create_table(
        "launch_refusal",
        sa.Column("instance", sa.Text(), sa.ForeignKey("instance.id", ondelete="CASCADE"), primary_key=True),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("provider", "region", "zone", "kind", "machine_type", "refusal", "words")
        ),
        _now("at"),
        sa.CheckConstraint("refusal in ('capacity', 'quota', 'request')", name="launch_refusal_refusal"),
        sa.CheckConstraint(_KINDS, name="launch_refusal_kind"),
    )
    op.create_index("launch_refusal_at", "launch_refusal", ["at"])


def downgrade() -> None:
    """Undoes this revision."""
    for name in ("launch_refusal", "instance", "pool"):
        op.drop_table(name)
