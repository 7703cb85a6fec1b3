"""The ledger of capacity: pools, the instances that were asked of providers, and what providers refused.

A row is committed before anything is asked of a provider, and its id is the provider's client token and tag. So what a
provider has can always be compared with what it was asked for, whatever was lost in between.
"""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.types import Text

from domain.capacity import CapacityKind
from infra.db.base import NOW, Base, Json
from lifecycle.instances import InstancePhase

_KINDS = f"kind in ({', '.join(repr(kind.value) for kind in CapacityKind)})"
IDLE_S = 600.0
_NONE = text("'{}'")


class PoolRow(Base):
    """A pool of a region (`capacity.pools.Pool`)."""

    __tablename__ = "pool"
    region: Mapped[str] = mapped_column(ForeignKey("region.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    size: Mapped[int] = mapped_column(CheckConstraint("size >= 0", name="pool_size"), server_default="0")
    providers: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=_NONE)
    zones: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=_NONE)
    kinds: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=_NONE)
    machine_types: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=_NONE)
    max_usd_per_h: Mapped[float | None]
    max_size: Mapped[int | None] = mapped_column(CheckConstraint("max_size >= size", name="pool_max_size"))
    """Up to so many it grows for what waits; None: it does not."""
    idle_s: Mapped[float] = mapped_column(
        CheckConstraint("idle_s >= 0", name="pool_idle"), server_default=text(str(IDLE_S))
    )
    """A machine above `size` that has had no work for so long is ended."""
    buffer: Mapped[int] = mapped_column(CheckConstraint("buffer >= 0", name="pool_buffer"), server_default="0")
    """Of a pool that grows: so many machines without work there are to be for what comes next."""
    reason: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Why it has fewer machines than its size or buffer, and none is being launched; None: nothing is missing."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class InstanceRow(Base):
    """One machine that was asked of a provider. Kept when it is gone: it is the history."""

    __tablename__ = "instance"
    id: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str]
    pool: Mapped[str]
    """Not a foreign key: the history outlives the pool."""
    cluster: Mapped[str]
    provider: Mapped[str]
    zone: Mapped[str]
    kind: Mapped[str]
    machine_type: Mapped[str]
    gpus: Mapped[int]
    gpu_type: Mapped[str | None]
    cpus_milli: Mapped[int]
    memory_bytes: Mapped[int]
    usd_per_h: Mapped[float]
    """When it was asked for."""
    phase: Mapped[str] = mapped_column(server_default=InstancePhase.REQUESTED.value)
    reason: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Why it is in this phase."""
    ending: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Why it is to end; None: it is not."""
    native_id: Mapped[str | None]
    """As the provider calls it."""
    wanted_by: Mapped[dict[str, list[int]]] = mapped_column(JSONB, server_default=text("'{}'"))
    """The workloads that wait for it, while it is on its way or idle, with how many tasks of each job are for it."""
    idle_since: Mapped[datetime | None]
    """From when on it has had no work, as the keeper saw it; None: it has, or is not ready."""
    machine: Mapped[str | None]
    """The machine that its agent announced; None: it has not done so."""
    requested_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expected_at: Mapped[datetime | None]
    """When its agent was expected to be there, by the offer."""
    launched_at: Mapped[datetime | None]
    ready_at: Mapped[datetime | None]
    """When its machine first took work."""
    lost_at: Mapped[datetime | None]
    """When it was found that the provider does not have it, or that its agent was away for too long."""
    gone_at: Mapped[datetime | None]
    __table_args__ = (
        CheckConstraint(f"phase in ({', '.join(repr(p.value) for p in InstancePhase)})", name="instance_phase"),
        CheckConstraint(_KINDS, name="instance_kind"),
        CheckConstraint("(phase = 'gone') = (gone_at is not null)", name="instance_gone"),
        Index("instance_live", "region", "pool", postgresql_where=text("gone_at is null")),
        Index("instance_machine", "machine"),
        Index("instance_wanted_by", "wanted_by", postgresql_using="gin", postgresql_where=text("gone_at is null")),
    )


class LaunchRefusal(Base):
    """A fact with a time: what a provider refused to launch."""

    __tablename__ = "launch_refusal"
    instance: Mapped[str] = mapped_column(ForeignKey("instance.id", ondelete="CASCADE"), primary_key=True)
    provider: Mapped[str]
    region: Mapped[str]
    zone: Mapped[str]
    kind: Mapped[str]
    machine_type: Mapped[str]
    refusal: Mapped[str] = mapped_column(
        CheckConstraint("refusal in ('capacity', 'quota', 'request')", name="launch_refusal_refusal")
    )
    words: Mapped[str]
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    __table_args__ = (CheckConstraint(_KINDS, name="launch_refusal_kind"), Index("launch_refusal_at", "at"))
