"""Creates the first schema.

Revision: 0001, after .
"""

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Applies this revision."""
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("detail", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(op.f("ix_audit_at"), "audit", ["at"], unique=False)
    op.create_table(
        "event",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column(
            "txid", sa.BigInteger(), server_default=sa.text("(pg_current_xact_id()::text::bigint)"), nullable=False
        ),
        sa.Column(
            "at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("workload", sa.Text(), nullable=True),
        sa.Column("attempt", sa.BigInteger(), nullable=True),
        sa.Column("region", sa.Text(), nullable=True),
        sa.Column("machine", sa.Text(), nullable=True),
        sa.Column("reason", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("detail", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("dedup", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("workload", "dedup", name="event_once"),
    )
    op.create_index("event_order", "event", ["txid", "id"], unique=False)
    op.create_index("event_workload", "event", ["workload", "txid", "id"], unique=False)
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("workload", sa.Text(), nullable=True),
        sa.Column("body", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("delivered_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("outbox_due", "outbox", ["id"], unique=False, postgresql_where=sa.text("delivered_at is null"))
    op.create_table(
        "publication",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("body", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "region",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("bucket_url", sa.Text(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "region_bid",
        sa.Column("scan", sa.BigInteger(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("body", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("scan", "region", "workload"),
        prefixes=["UNLOGGED"],
    )
    op.create_table(
        "tenant",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("level", sa.BigInteger(), nullable=False),
        sa.Column(
            "quota_gpus", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False
        ),
        sa.Column("quota_cpus_milli", sa.BigInteger(), nullable=True),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "api_key",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=True),
        sa.Column("label", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("revoked_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("tenant is not null or role in ('operator', 'viewer')", name="api_key_tenant"),
        sa.ForeignKeyConstraint(
            ["tenant"],
            ["tenant.name"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("sha256"),
    )
    op.create_table(
        "archive",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant"],
            ["tenant.name"],
        ),
        sa.PrimaryKeyConstraint("tenant", "sha256"),
    )
    op.create_table(
        "cluster",
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("manager", sa.Text(), server_default="agent", nullable=False),
        sa.ForeignKeyConstraint(
            ["region"],
            ["region.name"],
        ),
        sa.PrimaryKeyConstraint("region", "name"),
    )
    op.create_table(
        "data_table",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("home_region", sa.Text(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["home_region"],
            ["region.name"],
        ),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "secret",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("box", sa.LargeBinary(), nullable=False),
        sa.Column("updated_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant"],
            ["tenant.name"],
        ),
        sa.PrimaryKeyConstraint("tenant", "name"),
    )
    op.create_table(
        "workload",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("labels", postgresql.JSONB(astext_type=sa.Text()), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("spec", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("phase", sa.Text(), server_default="pending", nullable=False),
        sa.Column("reason", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("attempt", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("level", sa.BigInteger(), nullable=True),
        sa.Column("held_by", sa.Text(), nullable=True),
        sa.Column("submitted_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("finished_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("region", sa.Text(), nullable=True),
        sa.Column("checkpoint_region", sa.Text(), nullable=True),
        sa.Column("submitted_by", sa.Text(), server_default="", nullable=False),
        sa.Column("expired_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant"],
            ["tenant.name"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("workload_labels", "workload", ["labels"], unique=False, postgresql_using="gin")
    op.create_index(
        "workload_live", "workload", ["phase"], unique=False, postgresql_where=sa.text("finished_at is null")
    )
    op.create_index("workload_tenant", "workload", ["tenant", "id"], unique=False)
    op.create_table(
        "attempt",
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("plan", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("awarded_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ready_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("started_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("evicting_since", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("evictor", sa.Text(), nullable=True),
        sa.Column("released_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("outcome", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("resumed_step", sa.BigInteger(), nullable=True),
        sa.Column("last_step", sa.BigInteger(), nullable=True),
        sa.Column("checkpoint_step", sa.BigInteger(), nullable=True),
        sa.Column("checkpoint_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("checkpoint_bytes", sa.BigInteger(), nullable=True),
        sa.Column("checkpoint_s", sa.Double(), nullable=True),
        sa.Column("gpu_types", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("cpus_milli", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["workload"], ["workload.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("workload", "attempt"),
    )
    op.create_index(
        "attempt_live", "attempt", ["workload"], unique=True, postgresql_where=sa.text("released_at is null")
    )
    op.create_index("attempt_window", "attempt", ["released_at"], unique=False)
    op.create_table(
        "eviction",
        sa.Column("evictor", sa.Text(), nullable=False),
        sa.Column("evictor_attempt", sa.BigInteger(), nullable=False),
        sa.Column("victim", sa.Text(), nullable=False),
        sa.Column("victim_attempt", sa.BigInteger(), nullable=False),
        sa.Column("at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["evictor"], ["workload.id"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["victim"], ["workload.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("evictor", "evictor_attempt", "victim"),
    )
    op.create_index("eviction_victim", "eviction", ["victim"], unique=False)
    op.create_table(
        "idempotency",
        sa.Column("api_key", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("body_sha256", sa.Text(), nullable=False),
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["workload"], ["workload.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("api_key", "key"),
    )
    op.create_table(
        "machine",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("rack", sa.Text(), nullable=False),
        sa.Column("gpu_type", sa.Text(), nullable=True),
        sa.Column("gpus", sa.BigInteger(), nullable=False),
        sa.Column("cpus_milli", sa.BigInteger(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("held", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("promised", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("free_cpus_milli", sa.BigInteger(), nullable=False),
        sa.Column("free_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("cordon", postgresql.JSONB(none_as_null=True, astext_type=sa.Text()), nullable=True),
        sa.Column("draining", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("failed_gangs", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=False),
        sa.Column("public_key", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column(
            "registered_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False
        ),
        sa.Column("lost_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("free_cpus_milli between 0 and cpus_milli", name="machine_cpus"),
        sa.CheckConstraint("free_memory_bytes between 0 and memory_bytes", name="machine_memory"),
        sa.CheckConstraint("held >= 0 and held < (1::bigint << gpus::int)", name="machine_held"),
        sa.ForeignKeyConstraint(
            ["region", "cluster"],
            ["cluster.region", "cluster.name"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("machine_region", "machine", ["region"], unique=False)
    op.create_table(
        "replica",
        sa.Column("data_table", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("source_region", sa.Text(), nullable=True),
        sa.Column("done_bytes", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("requested_by", sa.Text(), nullable=True),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("ready_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["data_table"], ["data_table.name"], ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["region"],
            ["region.name"],
        ),
        sa.PrimaryKeyConstraint("data_table", "region"),
    )
    op.create_table(
        "waiting",
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("reasons", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.ForeignKeyConstraint(["workload"], ["workload.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("workload"),
    )
    op.create_table(
        "allocation",
        sa.Column("workload", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("machine", sa.Text(), nullable=False),
        sa.Column("slots", sa.BigInteger(), nullable=False),
        sa.Column("awaited", sa.BigInteger(), nullable=False),
        sa.Column("cpus_milli", sa.BigInteger(), nullable=False),
        sa.Column("awaited_cpus_milli", sa.BigInteger(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("awaited_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("tasks", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("awarded_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("held_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("released_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.Column("stopped_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint(
            "awaited_cpus_milli between 0 and cpus_milli and awaited_memory_bytes between 0 and memory_bytes",
            name="allocation_awaited",
        ),
        sa.CheckConstraint("slots & awaited = 0", name="allocation_disjoint"),
        sa.ForeignKeyConstraint(
            ["machine"],
            ["machine.id"],
        ),
        sa.ForeignKeyConstraint(["workload", "attempt"], ["attempt.workload", "attempt.attempt"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("workload", "attempt", "machine"),
    )
    op.create_index(
        "allocation_live", "allocation", ["machine"], unique=False, postgresql_where=sa.text("released_at is null")
    )
    op.create_index(
        "allocation_unconfirmed",
        "allocation",
        ["machine"],
        unique=False,
        postgresql_where=sa.text("released_at is not null and stopped_at is null"),
    )
    op.execute("create sequence scan_number")
    op.execute((Path(__file__).parent.parent / "0001_allocation_guard.sql").read_text())


def downgrade() -> None:
    """Undoes this revision."""
    op.execute("drop table allocation, machine cascade")
    op.execute("drop function allocation_guard, machine_promises")
    op.execute("drop sequence scan_number")
    op.drop_table("waiting")
    op.drop_table("replica")
    op.drop_table("idempotency")
    op.drop_index("eviction_victim", table_name="eviction")
    op.drop_table("eviction")
    op.drop_index("attempt_window", table_name="attempt")
    op.drop_index("attempt_live", table_name="attempt", postgresql_where=sa.text("released_at is null"))
    op.drop_table("attempt")
    op.drop_index("workload_tenant", table_name="workload")
    op.drop_index("workload_live", table_name="workload", postgresql_where=sa.text("finished_at is null"))
    op.drop_index("workload_labels", table_name="workload", postgresql_using="gin")
    op.drop_table("workload")
    op.drop_table("secret")
    op.drop_table("data_table")
    op.drop_table("cluster")
    op.drop_table("archive")
    op.drop_table("api_key")
    op.drop_table("tenant")
    op.drop_table("region_bid")
    op.drop_table("region")
    op.drop_table("publication")
    op.drop_index("outbox_due", table_name="outbox", postgresql_where=sa.text("delivered_at is null"))
    op.drop_table("outbox")
    op.drop_index("event_workload", table_name="event")
    op.drop_index("event_order", table_name="event")
    op.drop_table("event")
    op.drop_index(op.f("ix_audit_at"), table_name="audit")
    op.drop_table("audit")
