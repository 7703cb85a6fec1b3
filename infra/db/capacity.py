"""The ledger of capacity: pools, the instances that were requested from providers, and refused launches.

An instance's row is committed before the request to the provider. Its id is the request's client token and the
instance's tag, so the provider's list of instances can be compared with the requests even if responses are lost.
"""

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, Index, text
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import Mapped, mapped_column
from sqlalchemy.types import Text

from domain.capacity import CapacityKind
from domain.lifecycle.instances import InstancePhase
from infra.db.base import NOW, Base, Json

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
    """Number of machines up to which the pool grows for waiting workloads. None: it does not grow."""
    idle_s: Mapped[float] = mapped_column(
        CheckConstraint("idle_s >= 0", name="pool_idle"), server_default=text(str(IDLE_S))
    )
    """Time without work, in seconds, after which a machine beyond `size` is terminated."""
    buffer: Mapped[int] = mapped_column(CheckConstraint("buffer >= 0", name="pool_buffer"), server_default="0")
    """Number of idle machines that a growing pool keeps ready for new workloads."""
    tenants: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=_NONE)
    """The tenants whose workloads are the only ones on the pool's machines; empty: those of any tenant."""
    gpus: Mapped[dict[str, int]] = mapped_column(JSONB, server_default=_NONE)
    """Intended number of GPUs by type, for plans of pools (`ras.intents.Intent`, like the next three columns)."""
    failure_buffer: Mapped[float] = mapped_column(
        CheckConstraint("failure_buffer between 0 and 1", name="pool_failure_buffer"), server_default="0"
    )
    survives_loss: Mapped[bool] = mapped_column(server_default=text("true"))
    max_share: Mapped[float] = mapped_column(
        CheckConstraint("max_share > 0 and max_share <= 1", name="pool_max_share"), server_default="1"
    )
    reason: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Why the pool has fewer machines than `size` or `buffer` requires and launches none. None if none is missing."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)


class InstanceRow(Base):
    """One machine that was requested from a provider. The row is kept as history after the machine is gone."""

    __tablename__ = "instance"
    id: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str]
    pool: Mapped[str]
    """Name of the pool, or id of the service, that the instance was launched for. Not a foreign key, because the row
    is kept after the pool is deleted."""
    workload: Mapped[str | None]
    """The workload of the service's replica that the instance was launched for; None: it was launched for a pool."""
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
    """Price in US dollars per hour at the time of the request."""
    phase: Mapped[str] = mapped_column(server_default=InstancePhase.REQUESTED.value)
    reason: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Why the instance is in this phase."""
    ending: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Why the instance is to be terminated; None if it is not."""
    native_id: Mapped[str | None]
    """The provider's id of the instance."""
    wanted_by: Mapped[dict[str, list[int]]] = mapped_column(JSONB, server_default=text("'{}'"))
    """The workloads that wait for this instance while it is being launched or idle, each with the number of tasks of
    each job that are planned for it."""
    idle_since: Mapped[datetime | None]
    """Since when the instance has had no work, as the capacity keeper observed. None if it has work or is not ready."""
    machine: Mapped[str | None]
    """Id of the machine that its agent registered; None if it has not registered."""
    requested_at: Mapped[datetime] = mapped_column(server_default=NOW)
    expected_at: Mapped[datetime | None]
    """When its agent is expected to register, according to the offer."""
    launched_at: Mapped[datetime | None]
    """When the provider accepted the launch."""
    started_at: Mapped[datetime | None]
    """When the provider started the machine, as observed. None: it has not, for example because its job is queued."""
    ends_at: Mapped[datetime | None]
    """When the provider will end the machine; None: unknown."""
    ready_at: Mapped[datetime | None]
    """When its machine first became ready for work."""
    lost_at: Mapped[datetime | None]
    """When the instance was found missing at the provider, or its agent had been disconnected for too long."""
    gone_at: Mapped[datetime | None]
    __table_args__ = (
        CheckConstraint(f"phase in ({', '.join(repr(p.value) for p in InstancePhase)})", name="instance_phase"),
        CheckConstraint(_KINDS, name="instance_kind"),
        CheckConstraint("(phase = 'gone') = (gone_at is not null)", name="instance_gone"),
        Index("instance_live", "region", "pool", postgresql_where=text("gone_at is null")),
        Index("instance_machine", "machine"),
        Index("instance_workload", "workload", postgresql_where=text("workload is not null")),
        Index("instance_wanted_by", "wanted_by", postgresql_using="gin", postgresql_where=text("gone_at is null")),
    )


class LaunchRefusal(Base):
    """A provider's refusal to launch an instance, with its time."""

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
