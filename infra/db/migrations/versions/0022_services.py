"""Adds services, their versions and replicas, and the requests that balancers count; clusters of a service's own.

Revision ID: 0022
Revises: 0021
"""

from pathlib import Path

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_SQL = Path(__file__).parent.parent
_LIVE = sa.text("ended_at is null")
_NOW = sa.text("now()")
_KINDS = "kind in ('reserved', 'on_demand', 'spot', 'voluntary')"
_MODES = "mode in ('rolling', 'blue_green')"
_UNDO = """
drop trigger replica_machine_noticed on machine;
drop trigger replica_instance_changed on instance;
drop trigger replica_workload_changed on workload;
drop function replica_machine_noticed, replica_instance_changed, replica_workload_changed, service_wake
"""


def _text(name: str, nullable: bool = True) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def _number(name: str, nullable: bool = False, default: str | None = None) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable, server_default=default)


def _time(name: str, default: object = None) -> sa.Column[object]:
    return sa.Column(name, sa.DateTime(timezone=True), server_default=default, nullable=default is None)


def _json(name: str, default: str | None = None) -> sa.Column[object]:
    value = None if default is None else sa.text(default)
    return sa.Column(name, postgresql.JSONB(), server_default=value, nullable=default is None)


def _service(primary_key: bool = True) -> sa.Column[str]:
    return sa.Column("service", sa.Text(), sa.ForeignKey("service.id", ondelete="CASCADE"), primary_key=primary_key)


def upgrade() -> None:
    """Applies this revision."""
    op.add_column("cluster", _text("service"))
    op.add_column("instance", _text("workload"))
    wanted = sa.text("workload is not null")
    op.create_index("instance_workload", "instance", ["workload"], postgresql_where=wanted)
    op.create_table(
        "service",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant", sa.Text(), sa.ForeignKey("tenant.name"), nullable=False),
        _text("name", nullable=False),
        _number("version", default="1"),
        sa.Column("mode", sa.Text(), server_default="rolling", nullable=False),
        _json("state"),
        _json("zones", "'[]'"),
        _number("target", default="0"),
        _json("notes", "'[]'"),
        _number("replicas", default="0"),
        _number("counted_until", default="0"),
        _time("created_at", _NOW),
        sa.Column("created_by", sa.Text(), server_default="", nullable=False),
        _time("stopping_at"),
        _time("ended_at"),
        sa.CheckConstraint(_MODES, name="service_mode"),
    )
    op.create_index("service_name", "service", ["tenant", "name"], unique=True, postgresql_where=_LIVE)
    op.create_index("service_live", "service", ["id"], postgresql_where=_LIVE)
    op.create_table(
        "service_version",
        _service(),
        sa.Column("version", sa.BigInteger(), primary_key=True),
        sa.Column("spec", postgresql.JSONB(), nullable=False),
        _time("created_at", _NOW),
        sa.Column("created_by", sa.Text(), server_default="", nullable=False),
    )
    op.create_table(
        "service_replica",
        _service(),
        sa.Column("number", sa.BigInteger(), primary_key=True),
        _number("version"),
        sa.Column("workload", sa.Text(), nullable=False, unique=True),
        _text("kind", nullable=False),
        _text("zone"),
        _text("cluster"),
        sa.Column("usd_per_h", sa.Float()),
        sa.Column("is_base", sa.Boolean(), nullable=False),
        _number("replaces", nullable=True),
        _time("launched_at", _NOW),
        sa.Column("ready", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        _time("ready_changed_at"),
        _time("first_ready_at"),
        _text("address"),
        _number("port", nullable=True),
        _text("probe_error"),
        *(_time(name) for name in ("leaving_at", "draining_at", "ending_at")),
        _text("cause"),
        _time("ended_at"),
        sa.ForeignKeyConstraint(
            ["service", "version"], ["service_version.service", "service_version.version"], ondelete="CASCADE"
        ),
        sa.CheckConstraint(_KINDS, name="service_replica_kind"),
    )
    op.create_index("service_replica_live", "service_replica", ["service", "number"], postgresql_where=_LIVE)
    op.create_table(
        "service_requests",
        _service(),
        sa.Column("second", sa.BigInteger(), primary_key=True),
        sa.Column("balancer", sa.Text(), primary_key=True),
        *(_number(name) for name in ("requests", "failed", "cut")),
        sa.Column("p50_s", sa.Float()),
        sa.Column("p99_s", sa.Float()),
    )
    op.execute((_SQL / "0022_services.sql").read_text())


def downgrade() -> None:
    """Undoes this revision."""
    op.execute(_UNDO)
    for name in ("service_requests", "service_replica", "service_version", "service"):
        op.drop_table(name)
    op.drop_index("instance_workload", "instance")
    op.drop_column("instance", "workload")
    op.drop_column("cluster", "service")
    # Earlier versions reject a specification with an unknown field, and know no cluster in a demand.
    op.execute("delete from workload where jsonb_exists(spec, 'serving') or jsonb_exists(spec, 'cluster')")
    ask = (_SQL / "0022_services.sql").read_text().partition("create function service_wake")[0]
    case = ask[ask.index("case when spec ->> 'cluster'") : ask.index(" end,") + len(" end")]
    op.execute(ask.replace(case, "spec -> 'capacity'"))
