"""The facts: tenants, the fleet, workloads with what they hold. Postgres owns them.

Input tables are in `infra.db.tables`, what grows with time in `infra.db.logs`.

Times are `timestamptz`; CPUs are thousandths of a core; memory is bytes; a set of a machine's GPU slots is a bit mask
(bit i is slot i).
"""

from datetime import datetime

from sqlalchemy import (
    CheckConstraint,
    ColumnElement,
    Computed,
    ForeignKey,
    ForeignKeyConstraint,
    Identity,
    Index,
    UniqueConstraint,
    func,
    or_,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from domain.capacity import CapacityKind
from domain.phases import Phase
from infra.db.base import NOW, Base, Json

MAX_SLOTS = 62
"""GPU slots of one machine at most: a mask is a signed 64-bit integer."""

_CAPACITY = f"capacity in ({', '.join(repr(kind.value) for kind in CapacityKind)})"


# ---------------------------------------------------------------------------------------------------- people and keys


class Tenant(Base):
    """A team with a priority level and a quota (MAST 4.2)."""

    __tablename__ = "tenant"
    name: Mapped[str] = mapped_column(primary_key=True)
    level: Mapped[int] = mapped_column(CheckConstraint("level between 1 and 7", name="tenant_level"))
    quota_gpus: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    quota_cpus_milli: Mapped[int | None]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    number: Mapped[int] = mapped_column(Identity(always=True))
    """Never given twice: agents that run as root derive the user of the tenant's tasks from it."""
    __table_args__ = (UniqueConstraint("number", name="tenant_number"),)


class ApiKey(Base):
    """An API key, stored as a SHA-256, with a role and, unless it is an operator's, a tenant."""

    __tablename__ = "api_key"
    id: Mapped[str] = mapped_column(primary_key=True)
    sha256: Mapped[str] = mapped_column(unique=True)
    role: Mapped[str] = mapped_column(
        CheckConstraint("role in ('viewer', 'submitter', 'operator')", name="api_key_role")
    )
    tenant: Mapped[str | None] = mapped_column(ForeignKey("tenant.name"))
    label: Mapped[str] = mapped_column(server_default="")
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    revoked_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]
    """From when it is refused; None: never."""
    __table_args__ = (CheckConstraint("tenant is not null or role in ('operator', 'viewer')", name="api_key_tenant"),)

    @classmethod
    def is_good(cls) -> ColumnElement[bool]:
        """For queries: neither revoked nor expired."""
        return cls.revoked_at.is_(None) & or_(cls.expires_at.is_(None), cls.expires_at > func.now())


class Secret(Base):
    """A tenant's secret, encrypted with the installation's master key; never leaves except sealed to a machine."""

    __tablename__ = "secret"
    tenant: Mapped[str] = mapped_column(ForeignKey("tenant.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    box: Mapped[bytes]
    updated_at: Mapped[datetime] = mapped_column(server_default=NOW)


# -------------------------------------------------------------------------------------------------------------- fleet


class Region(Base):
    """A region with its bucket."""

    __tablename__ = "region"
    name: Mapped[str] = mapped_column(primary_key=True)
    bucket_url: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    storage_bytes: Mapped[int | None] = mapped_column(CheckConstraint("storage_bytes >= 0"))
    """What its bucket may hold of tables; None: nobody has said it, and Tetris cannot place anything."""
    cpu_hours: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    """App to its quota of CPU hours a day; an app that is not here has no limit."""


class Datacenter(Base):
    """A datacenter of a region, in which clusters and partitions are."""

    __tablename__ = "datacenter"
    region: Mapped[str] = mapped_column(ForeignKey("region.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    storage_bytes: Mapped[int | None] = mapped_column(CheckConstraint("storage_bytes >= 0"))


class Cluster(Base):
    """A dynamic cluster of a region."""

    __tablename__ = "cluster"
    region: Mapped[str] = mapped_column(ForeignKey("region.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    manager: Mapped[str] = mapped_column(server_default="agent")
    """Which cluster manager starts tasks there: `agent` is our own node agents."""
    datacenter: Mapped[str | None]
    zone: Mapped[str | None]
    """Where its machines are within the region, as their platform names it."""
    capacity: Mapped[str] = mapped_column(server_default=CapacityKind.RESERVED.value)
    prices: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    """US dollars an hour of a GPU by its type, and of a core (`domain.capacity.CPU`); what is not here has no price."""
    __table_args__ = (
        ForeignKeyConstraint(["region", "datacenter"], ["datacenter.region", "datacenter.name"]),
        CheckConstraint(_CAPACITY, name="cluster_capacity"),
    )


class ClusterPrice(Base):
    """What a cluster cost from a moment on, until the next row. Triggers write it; it outlives the cluster."""

    __tablename__ = "cluster_price"
    region: Mapped[str] = mapped_column(primary_key=True)
    cluster: Mapped[str] = mapped_column(primary_key=True)
    since: Mapped[datetime] = mapped_column(primary_key=True)
    """Of the first row: -infinity."""
    capacity: Mapped[str]
    prices: Mapped[Json]
    __table_args__ = (CheckConstraint(_CAPACITY, name="cluster_price_capacity"),)


class Machine(Base):
    """A machine and what of it is held or promised. The allocation guard keeps the masks and the free counts."""

    __tablename__ = "machine"
    id: Mapped[str] = mapped_column(primary_key=True)
    region: Mapped[str]
    cluster: Mapped[str]
    rack: Mapped[str]
    gpu_type: Mapped[str | None]
    gpus: Mapped[int] = mapped_column(CheckConstraint(f"gpus between 0 and {MAX_SLOTS}", name="machine_gpus"))
    cpus_milli: Mapped[int]
    memory_bytes: Mapped[int]
    held: Mapped[int] = mapped_column(server_default="0")
    """Slots that an allocation holds."""
    promised: Mapped[int] = mapped_column(server_default="0")
    """Slots, held by a victim, that have a successor."""
    free_cpus_milli: Mapped[int]
    free_memory_bytes: Mapped[int]
    state: Mapped[str] = mapped_column(CheckConstraint("state in ('joining', 'ready', 'lost')", name="machine_state"))
    cordon: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """A reason, if no new work may be placed here."""
    draining: Mapped[bool] = mapped_column(server_default=text("false"))
    failed_gangs: Mapped[int] = mapped_column(server_default="0")
    """Workloads that lost tasks or could not start them here since one succeeded: how many are in
    `failed_workloads`."""
    failed_workloads: Mapped[list[str]] = mapped_column(JSONB, server_default=text("'[]'"))
    failed_at: Mapped[datetime | None]
    """When the newest of them was counted. What was placed here before that failed together with it."""
    incarnation: Mapped[str]
    public_key: Mapped[str]
    """Pinned at the first hello: secrets are sealed to it."""
    offered_key: Mapped[str | None]
    """Another key with which the machine announced itself, and which nobody has trusted yet."""
    offered_at: Mapped[datetime | None]
    """When it did so first."""
    address: Mapped[str]
    registered_at: Mapped[datetime] = mapped_column(server_default=NOW)
    lost_at: Mapped[datetime | None]
    notice: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Why its platform takes it, until it comes back."""
    __table_args__ = (
        ForeignKeyConstraint(["region", "cluster"], ["cluster.region", "cluster.name"]),
        CheckConstraint("free_cpus_milli between 0 and cpus_milli", name="machine_cpus"),
        CheckConstraint("free_memory_bytes between 0 and memory_bytes", name="machine_memory"),
        CheckConstraint("held >= 0 and held < (1::bigint << gpus::int)", name="machine_held"),
        Index("machine_region", "region"),
    )


# ---------------------------------------------------------------------------------------------------------- workloads


class Workload(Base):
    """A submitted workload. What happens next to it is its workflow's; this is what everyone else may know of it."""

    __tablename__ = "workload"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenant.name"))
    name: Mapped[str]
    labels: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    spec: Mapped[Json]
    """`domain.spec.WorkloadSpec`."""
    ask: Mapped[str | None] = mapped_column(Computed("workload_ask(spec)", persisted=True), deferred=True)
    """What of it the schedulers look at (`domain.demand`)."""
    phase: Mapped[str] = mapped_column(server_default="pending")
    reason: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Why it is in this phase."""
    attempt: Mapped[int] = mapped_column(server_default="0")
    """Number of the newest award: the fencing number of its tasks."""
    level: Mapped[int | None]
    """The level that the user requests, lower than the tenant's; may be lowered later."""
    held_by: Mapped[str | None]
    submitted_at: Mapped[datetime] = mapped_column(server_default=NOW)
    finished_at: Mapped[datetime | None]
    region: Mapped[str | None]
    """Where it is placed now."""
    checkpoint_region: Mapped[str | None]
    """Where its newest checkpoint is."""
    submitted_by: Mapped[str] = mapped_column(server_default="")
    expired_at: Mapped[datetime | None]
    """When its logs and checkpoints were deleted."""
    __table_args__ = (
        CheckConstraint(f"phase in ({', '.join(repr(p.value) for p in Phase)})", name="workload_phase"),
        Index("workload_tenant", "tenant", "id"),
        # Not by phase: that changes often, and a change of what is in no index is cheap.
        Index("workload_live", "id", postgresql_where=text("finished_at is null")),
        Index(
            "workload_expiring",
            "id",
            postgresql_where=text("finished_at is null and spec -> 'limits' ->> 'max_pending_s' is not null"),
        ),
        Index("workload_labels", "labels", postgresql_using="gin"),
    )


class Idempotency(Base):
    """An Idempotency-Key and the answer that it got."""

    __tablename__ = "idempotency"
    api_key: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_sha256: Mapped[str]
    workload: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(server_default=NOW)


class Attempt(Base):
    """One award of a workload, from award to release."""

    __tablename__ = "attempt"
    workload: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    region: Mapped[str]
    plan: Mapped[Json]
    """Job placements, victims and quality, as awarded."""
    awarded_at: Mapped[datetime] = mapped_column(server_default=NOW)
    ready_at: Mapped[datetime | None]
    """When it held all its slots."""
    started_at: Mapped[datetime | None]
    """When its tasks ran."""
    evicting_since: Mapped[datetime | None]
    """When `evictor` told it to go. Operators, drains and stopping stacks only send mail."""
    evictor: Mapped[str | None]
    released_at: Mapped[datetime | None]
    outcome: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The reason it ended."""
    resumed_step: Mapped[int | None]
    last_step: Mapped[int | None]
    checkpoint_step: Mapped[int | None]
    checkpoint_at: Mapped[datetime | None]
    checkpoint_bytes: Mapped[int | None]
    checkpoint_s: Mapped[float | None]
    """How long the newest save held the training up."""
    checkpoint_write_s: Mapped[float | None]
    """How long it took until it was durable."""
    cadence: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """How often it saves, as last reported: `interval_s` (W), `cost_s` (C), `mtbf_s` (mu), `step_s`, `source`."""
    load: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """How loading its checkpoint went: `state`, `error`, `skipped`."""
    notice: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The last word of a platform that a task acted upon, with its `decision`."""
    lost_s: Mapped[float | None]
    """Once it is over: seconds of work that it lost (`domain.lost_work`)."""
    stale_tables: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Tables whose replica was stale when its start was prepared, each with the time before which it is complete."""
    gpu_types: Mapped[Json]
    """GPU type to slots that it holds."""
    cpus_milli: Mapped[int]
    rank: Mapped[int] = mapped_column(server_default="7")
    """By its award; a scan that finds another one writes it. Evictions go by it."""
    __table_args__ = (
        Index("attempt_live", "workload", unique=True, postgresql_where=text("released_at is null")),
        Index("attempt_window", "released_at"),
    )


class Allocation(Base):
    """What one attempt holds or was promised on one machine. Kept after the run: it is the history.

    A trigger (the allocation guard, in the migrations) keeps the machine's masks and counts and refuses overlaps.
    """

    __tablename__ = "allocation"
    workload: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    machine: Mapped[str] = mapped_column(primary_key=True)
    """Not a foreign key: the history outlives machines that are removed. The guard refuses live rows without one."""
    slots: Mapped[int]
    """Slots held."""
    awaited: Mapped[int]
    """Slots promised, which a victim still holds."""
    cpus_milli: Mapped[int]
    awaited_cpus_milli: Mapped[int]
    """Part of `cpus_milli` that victims still hold."""
    memory_bytes: Mapped[int]
    awaited_memory_bytes: Mapped[int]
    awarded_at: Mapped[datetime] = mapped_column(server_default=NOW)
    held_at: Mapped[datetime | None]
    """When nothing was awaited any more: tasks run only after."""
    released_at: Mapped[datetime | None]
    stopped_at: Mapped[datetime | None]
    """When it was known that nothing of the attempt runs on the machine, or ever will: that may be long after the
    release where its agent could not be asked. A machine is ready only when this is known of all that was released."""
    __table_args__ = (
        ForeignKeyConstraint(["workload", "attempt"], ["attempt.workload", "attempt.attempt"], ondelete="CASCADE"),
        CheckConstraint("slots & awaited = 0", name="allocation_disjoint"),
        CheckConstraint(
            "awaited_cpus_milli between 0 and cpus_milli and awaited_memory_bytes between 0 and memory_bytes",
            name="allocation_awaited",
        ),
        Index("allocation_live", "machine", postgresql_where=text("released_at is null")),
        Index(
            "allocation_unconfirmed",
            "machine",
            postgresql_where=text("released_at is not null and stopped_at is null"),
        ),
    )


class Eviction(Base):
    """Who evicted whom: who evicted a workload is immune to it until the queue changes from outside."""

    __tablename__ = "eviction"
    evictor: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"), primary_key=True)
    evictor_attempt: Mapped[int] = mapped_column(primary_key=True)
    victim: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"), primary_key=True)
    victim_attempt: Mapped[int]
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    change: Mapped[int] = mapped_column(server_default=text("newest_outside_change()"))
    """How often workloads had been submitted or had ended, or levels and quotas had been changed, before it."""
    __table_args__ = (Index("eviction_victim", "victim"), Index("eviction_change", "change"))


# --------------------------------------------------------------------------------------------------------- archives


class Archive(Base):
    """An uploaded working directory (tar.gz), by its SHA-256."""

    __tablename__ = "archive"
    tenant: Mapped[str] = mapped_column(ForeignKey("tenant.name"), primary_key=True)
    sha256: Mapped[str] = mapped_column(primary_key=True)
    body: Mapped[bytes]
    paths: Mapped[bytes | None]
    """Its files and folders (`infra.archives.Tree.dump`); None: it was uploaded before they were kept."""
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
