"""Models of the primary data: the fleet, and workloads with their attempts and allocations.

Tenants are in `infra.db.tenants`, input tables in `infra.db.tables`, logs and derived data in `infra.db.logs`.

Times are `timestamptz`; CPUs are thousandths of a core; memory is bytes; a set of a machine's GPU slots is a bit mask
(bit i is slot i).
"""

from datetime import datetime
from typing import Any

from sqlalchemy import (
    CheckConstraint,
    Computed,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    literal_column,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, MappedSQLExpression, column_property, mapped_column

from domain.capacity import CapacityKind
from domain.isolation import Isolation
from domain.phases import Phase
from domain.slots import MAX_SLOTS
from infra.db.base import NOW, Base, Json

_CAPACITY = f"capacity in ({', '.join(repr(kind.value) for kind in CapacityKind)})"


# -------------------------------------------------------------------------------------------------------------- fleet


class Region(Base):
    """A region and its bucket."""

    __tablename__ = "region"
    name: Mapped[str] = mapped_column(primary_key=True)
    bucket_url: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    storage_bytes: Mapped[int | None] = mapped_column(CheckConstraint("storage_bytes >= 0"))
    """Storage capacity for tables in the region's bucket. If it is not set (None), Tetris cannot run."""
    cpu_hours: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    """Quota of CPU hours per day of each app. Apps that are not listed have no limit."""


class Datacenter(Base):
    """A datacenter of a region. Clusters and partitions can be assigned to it."""

    __tablename__ = "datacenter"
    region: Mapped[str] = mapped_column(ForeignKey("region.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    storage_bytes: Mapped[int | None] = mapped_column(CheckConstraint("storage_bytes >= 0"))


class Cluster(Base):
    """A cluster of machines in a region."""

    __tablename__ = "cluster"
    region: Mapped[str] = mapped_column(ForeignKey("region.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    manager: Mapped[str] = mapped_column(server_default="agent")
    """The cluster manager that starts tasks there. `agent` means mizzen's node agents."""
    datacenter: Mapped[str | None]
    zone: Mapped[str | None]
    """The platform's name of the zone in which the machines are."""
    capacity: Mapped[str] = mapped_column(server_default=CapacityKind.RESERVED.value)
    prices: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    """US dollars per hour of a GPU, by type, and of a core (key `domain.capacity.CPU`). Others have no price."""
    departures_per_h: Mapped[float] = mapped_column(server_default="0")
    """How often the owner of one machine takes it back without notice, as learned (`activities.reclaim`)."""
    store_url: Mapped[str | None]
    """URL of the store in which workloads that run in this cluster save checkpoints; None: the region's bucket."""
    link_mbit: Mapped[float | None] = mapped_column(CheckConstraint("link_mbit > 0", name="cluster_link_mbit"))
    """Bandwidth of the link to other clusters of the region, in Mbit/s; None: unknown (`reclaim.buildings`)."""
    service: Mapped[str | None]
    """Id of the service whose replicas are the only workloads on these machines; None: the machines are shared."""
    tenant: Mapped[str | None] = mapped_column(ForeignKey("tenant.name"))
    """The tenant whose workloads are the only ones on these machines, which it brought itself (`api.fleet.pilots`)."""
    __table_args__ = (
        ForeignKeyConstraint(["region", "datacenter"], ["datacenter.region", "datacenter.name"]),
        CheckConstraint("service is null or tenant is null", name="cluster_users"),
        CheckConstraint(_CAPACITY, name="cluster_capacity"),
        CheckConstraint("departures_per_h >= 0", name="cluster_departures"),
    )


class ClusterPrice(Base):
    """The prices and the capacity kind of a cluster from `since` until the next row.

    Triggers write the rows. They are kept after the cluster is deleted.
    """

    __tablename__ = "cluster_price"
    region: Mapped[str] = mapped_column(primary_key=True)
    cluster: Mapped[str] = mapped_column(primary_key=True)
    since: Mapped[datetime] = mapped_column(primary_key=True)
    """Start of the validity; -infinity in the first row of a cluster."""
    capacity: Mapped[str]
    prices: Mapped[Json]
    __table_args__ = (CheckConstraint(_CAPACITY, name="cluster_price_capacity"),)


class Machine(Base):
    """A machine, with its held, promised and free resources, which the allocation guard (a trigger) updates."""

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
    """Bit mask of the slots that allocations hold."""
    promised: Mapped[int] = mapped_column(server_default="0")
    """Bit mask of the slots that victims hold and that are promised to another allocation."""
    withheld: Mapped[int] = mapped_column(server_default="0")
    """Bit mask of the slots that get no new work: the machine's owner has taken them back, or they are in `unfreed`. A
    workload that leaves may still hold some."""
    unfreed: Mapped[int] = mapped_column(server_default="0")
    """Bit mask of slots that the owner lends, and whose memory was not freed at the end of an attempt."""
    free_cpus_milli: Mapped[int]
    free_memory_bytes: Mapped[int]
    state: Mapped[str] = mapped_column(CheckConstraint("state in ('joining', 'ready', 'lost')", name="machine_state"))
    cordon: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The reason why no new work may be placed on the machine; None if it is not cordoned."""
    draining: Mapped[bool] = mapped_column(server_default=text("false"))
    pool: Mapped[str] = mapped_column(server_default="")
    """Name of its pool; empty: none. Not a foreign key, because a pool may be deleted before its machines leave it."""
    pool_since: Mapped[datetime | None]
    """When its pool was last changed by a plan."""
    next_pool: Mapped[str | None]
    """The pool that it moves to when all workloads have left that this pool does not serve. None: it does not move."""
    failed_gangs: Mapped[int] = mapped_column(server_default="0")
    """Number of workloads in `failed_workloads`."""
    failed_workloads: Mapped[list[str]] = mapped_column(JSONB, server_default=text("'[]'"))
    """Ids of workloads that lost tasks or could not start them on this machine since the last one that succeeded."""
    failed_at: Mapped[datetime | None]
    """When the last failed workload was counted. Workloads that were placed here before this count as one failure."""
    incarnation: Mapped[str]
    public_key: Mapped[str]
    """Public key, pinned at the first registration. Secrets for the machine are encrypted with it."""
    offered_key: Mapped[str | None]
    """Another public key with which the machine has registered, and which is not trusted yet."""
    offered_at: Mapped[datetime | None]
    """When the machine first registered with `offered_key`."""
    address: Mapped[str]
    isolation: Mapped[str] = mapped_column(
        CheckConstraint("isolation in ('none', 'user', 'sandbox')", name="machine_isolation"),
        server_default=Isolation.NONE.value,
    )
    """How tasks on the machine are separated (`domain.isolation`)."""
    isolation_why: Mapped[str | None]
    """Why no stronger mode is used; None: the mode is the strongest, or was set."""
    engine: Mapped[str | None]
    """Kind and version of the machine's container engine; None: it has none, and takes no jobs with an image."""
    registered_at: Mapped[datetime] = mapped_column(server_default=NOW)
    lost_at: Mapped[datetime | None]
    notice: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The platform's notice that it will take the machine; None after the machine has returned."""
    word_at_s: Mapped[float] = mapped_column(server_default="0")
    """When the owner last took back or lent resources, by the machine's clock, in seconds since the epoch; 0: never."""
    taken: Mapped[bool] = mapped_column(server_default=text("false"))
    """Whether the owner took back the whole machine at that time."""
    gpu_fault_at_s: Mapped[float] = mapped_column(server_default="0")
    """When the last handled GPU fault was detected, by the machine's clock, in seconds since the epoch."""
    answered_at: Mapped[datetime | None]
    """When tasks first ran on the machine, as far as its agent has reported; None: it has not run anything yet."""
    __table_args__ = (
        ForeignKeyConstraint(["region", "cluster"], ["cluster.region", "cluster.name"]),
        CheckConstraint("free_cpus_milli between 0 and cpus_milli", name="machine_cpus"),
        CheckConstraint("free_memory_bytes between 0 and memory_bytes", name="machine_memory"),
        CheckConstraint("held >= 0 and held < (1::bigint << gpus::int)", name="machine_held"),
        CheckConstraint("withheld >= 0 and withheld < (1::bigint << gpus::int)", name="machine_withheld"),
        Index("machine_region", "region", "cluster", "id"),
        # Free space on each page for the next versions of its rows (HOT updates): these rows change often, in columns
        # without an index.
        {"postgresql_with": {"fillfactor": 50}},
    )


# ---------------------------------------------------------------------------------------------------------- workloads


_WHOLE = "array_id is null"
_IS_PLACED = "finished_at is null and phase <> 'pending'"
_IS_PAUSED = "(held_by is not null or blocked is not null)"


class Workload(Base):
    """A submitted workload and its current state. After the first award its workflow drives it through its phases."""

    __tablename__ = "workload"
    id: Mapped[str] = mapped_column(primary_key=True)
    tenant: Mapped[str] = mapped_column(ForeignKey("tenant.name"))
    name: Mapped[str]
    labels: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    spec: Mapped[Json]
    """The specification, a `domain.spec.WorkloadSpec` as JSON."""
    ask: Mapped[str | None] = mapped_column(Computed("workload_ask(spec)", persisted=True), deferred=True)
    """The part of the specification that schedulers read (`domain.demand`)."""
    listed: MappedSQLExpression[Json] = column_property(
        literal_column(
            "jsonb_build_object('jobs', workload.spec -> 'jobs', 'tables', workload.spec -> 'tables', 'array',"
            " case when workload.array_index is not null then workload.spec -> 'array'"
            " when workload.spec ->> 'array' is not null then '{}' end)",
            JSONB,
        ),
        deferred=True,
    )
    """The part of the specification that lists show. The list or matrix of an array can be long."""
    phase: Mapped[str] = mapped_column(server_default="pending")
    reason: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Why the workload is in this phase."""
    attempt: Mapped[int] = mapped_column(server_default="0")
    """Number of the newest attempt, 0 before the first award. It is the fencing token of the attempt's tasks."""
    level: Mapped[int | None]
    """Priority level that the user requested, lower than the tenant's level. None: the tenant's level."""
    held_by: Mapped[str | None]
    blocked: Mapped[str | None]
    """Whether it waits for its dependencies (`infra.db.dependencies`), or one of them can never hold. A trigger sets it
    to None when all hold."""
    held_at: Mapped[datetime | None]
    """When the present pause began: the workload is on hold or blocked."""
    unheld_at: Mapped[datetime | None]
    """When the last pause ended."""
    paused_s: Mapped[float] = mapped_column(server_default="0")
    """Seconds of all pauses that have ended. They do not count as waiting."""
    submitted_at: Mapped[datetime] = mapped_column(server_default=NOW)
    finished_at: Mapped[datetime | None]
    region: Mapped[str | None]
    """Region in which the workload is placed; None while it is queued."""
    checkpoint_region: Mapped[str | None]
    """Region of the newest checkpoint."""
    checkpoint_store: Mapped[str | None]
    """URL of the cluster's store that has the newest checkpoint; None: the region's bucket."""
    images: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    """Maps image references in the specification to references with the digest at the first launch."""
    submitted_by: Mapped[str] = mapped_column(server_default="")
    expired_at: Mapped[datetime | None]
    """When the logs and checkpoints of the finished workload were deleted."""
    array_id: Mapped[str | None]
    """The array (`infra.db.array_rows`) of which the workload is an element; None: it is none. Not a foreign key:
    each deletion of a workload would look for its elements in both of the indexes below, or in the whole table."""
    array_index: Mapped[int | None]
    """The element's index in its array; None: the workload is not an element, or is a runner of `array_id`."""
    runner: Mapped[str | None]
    """Of an element that runners run: the runner that has leased it, or empty while none has. Such an element is not in
    the queue and has no workflow. None: the workload is no such element."""
    runner_attempt: Mapped[int | None]
    """The attempt of the runner that has leased the element: the fence of the lease."""
    __table_args__ = (
        Index("element_live", "array_id", postgresql_where=text("array_id is not null and finished_at is null")),
        Index(
            "element_ended",
            "array_id",
            "phase",
            postgresql_where=text("array_id is not null and finished_at is not null"),
        ),
        CheckConstraint(f"phase in ({', '.join(repr(p.value) for p in Phase)})", name="workload_phase"),
        CheckConstraint("blocked in ('waiting', 'never')", name="workload_blocked"),
        Index("workload_tenant", "tenant", "id"),
        Index("workload_name", "name", "id"),
        # No index on the phase of live workloads: it changes often.
        Index("workload_live", "id", postgresql_where=text("finished_at is null")),
        # The lists of the console (`api.workloads.selection`).
        Index("workload_live_tenant", "tenant", "id", postgresql_where=text(f"finished_at is null and {_WHOLE}")),
        Index("workload_placed", "id", postgresql_where=text(f"{_IS_PLACED} and {_WHOLE}")),
        Index("workload_paused", "id", postgresql_where=text(f"finished_at is null and {_IS_PAUSED}")),
        Index("workload_ended", "phase", "id", postgresql_where=text(f"finished_at is not null and {_WHOLE}")),
        Index(
            "workload_ended_tenant",
            "tenant",
            "phase",
            "id",
            postgresql_where=text(f"finished_at is not null and {_WHOLE}"),
        ),
        Index(
            "workload_expiring",
            "id",
            postgresql_where=text("finished_at is null and spec -> 'limits' ->> 'max_pending_s' is not null"),
        ),
        Index(
            "workload_elastic",
            "id",
            postgresql_where=text("finished_at is null and spec -> 'jobs' -> 0 ->> 'most_tasks' is not null"),
        ),
        Index(
            "workload_never",
            "id",
            postgresql_where=text("finished_at is null and blocked = 'never' and spec ->> 'if_never' = 'end'"),
        ),
        Index("workload_labels", "labels", postgresql_using="gin"),
        # Free space on each page for the next versions of its rows (HOT updates): these rows change often, in columns
        # without an index.
        {"postgresql_with": {"fillfactor": 80}},
    )


class Idempotency(Base):
    """An Idempotency-Key header, with the workload that the request created."""

    __tablename__ = "idempotency"
    api_key: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    body_sha256: Mapped[str]
    workload: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"))
    at: Mapped[datetime] = mapped_column(server_default=NOW)


class Attempt(Base):
    """One placement of a workload, from its award to its release."""

    __tablename__ = "attempt"
    workload: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    region: Mapped[str]
    plan: Mapped[Json]
    """The awarded plan: placements of jobs, victims and quality."""
    awarded_at: Mapped[datetime] = mapped_column(server_default=NOW)
    ready_at: Mapped[datetime | None]
    """When the attempt held all its slots."""
    store_url: Mapped[str | None]
    """URL of the cluster's store in which the attempt saves checkpoints; None: the bucket of its region, or the
    checkpoints were deleted there after the end of the workload."""
    started_at: Mapped[datetime | None]
    """When the attempt's tasks were running."""
    launch_s: Mapped[float | None]
    """Duration of the launch, from the prepare request until all machines had started, in seconds; None: unknown."""
    launch_limit_s: Mapped[float | None]
    """How long its launch may take on machines that owners lend; None: none of its machines is lent."""
    earned: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The evidence of its work on lent machines, as JSON of `domain.lifecycle.credit.Earned`."""
    evicting_since: Mapped[datetime | None]
    """When the attempt was evicted for `evictor` or, without one, told to continue in the place that is booked for it.
    Not set by preemptions of operators, drains and stopping stacks."""
    evictor: Mapped[str | None]
    released_at: Mapped[datetime | None]
    outcome: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The reason why the attempt ended."""
    resumed_step: Mapped[int | None]
    last_step: Mapped[int | None]
    metrics: Mapped[dict[str, float] | None] = mapped_column(JSONB(none_as_null=True))
    """The metrics that its tasks last reported, such as the loss."""
    curve: Mapped[list[list[Any]] | None] = mapped_column(JSONB(none_as_null=True), deferred=True)
    """Its steps and metrics over time: the fields of `domain.progress_curve.Point`."""
    checkpoint_step: Mapped[int | None]
    checkpoint_at: Mapped[datetime | None]
    checkpoint_bytes: Mapped[int | None]
    checkpoint_s: Mapped[float | None]
    """How long the newest save blocked the training, in seconds."""
    checkpoint_write_s: Mapped[float | None]
    """How long the newest save took until it was durable, in seconds."""
    saves: Mapped[list[list[float]] | None] = mapped_column(JSONB(none_as_null=True))
    """The last saves, oldest first: what each wrote in bytes, and how long it took until it was durable, in seconds
    (`domain.task_reports.typical_save`)."""
    bandwidth: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The bandwidth from the attempt's machines, a `domain.task_reports.BandwidthReport`; None: not measured."""
    cadence: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The save interval as last reported: `interval_s` (W), `cost_s` (C), `mtbf_s` (mu), `step_s`, `source`."""
    load: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Result of loading the checkpoint: `state`, `error`, `skipped`."""
    failing: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The saves that have failed since the last checkpoint, a `domain.task_reports.FailingReport`; None: none."""
    preparing: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Maps machines to a text about what the start of their tasks waits for; None: nothing that takes long."""
    notice: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """The last platform notice that a task reacted to, with its `decision`."""
    left_files: Mapped[list[Json] | None] = mapped_column(JSONB(none_as_null=True))
    unstored: Mapped[list[Json] | None] = mapped_column(JSONB(none_as_null=True))
    """Outputs that agents have not stored, with job, task and reason."""
    """Files that ended tasks have left on machines: `job`, `task` and the fields of `domain.task_reports.LeftFiles`."""
    gpu_use: Mapped[list[Json] | None] = mapped_column(JSONB(none_as_null=True))
    """The last GPU use of each task: `job`, `task` and the fields of `domain.task_reports.GpuReport`."""
    lost_s: Mapped[float | None]
    """Seconds of work that the attempt lost (`domain.lost_work`), set when it has ended."""
    cold_start_s: Mapped[float | None]
    """For a workload that serves: the time from its award until it was first ready. None: it has not been ready."""
    stale_tables: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    """Tables whose replica was stale when the start was prepared, each with the time up to which it is complete."""
    gpu_types: Mapped[Json]
    """Number of slots that the attempt holds, by GPU type."""
    cpus_milli: Mapped[int]
    rank: Mapped[int] = mapped_column(server_default="7")
    """Rank that evictions compare. Set by the award, and updated by scans that compute another rank."""
    __table_args__ = (
        Index("attempt_live", "workload", unique=True, postgresql_where=text("released_at is null")),
        Index("attempt_window", "released_at"),
    )


WAS_HELD = "tstzrange(least(held_at, released_at), released_at, '[]')"
"""SQL: when an allocation that was released had its slots. `least`, because clocks of transactions are not in the order
of their commits."""
_WAS_HELD_ONCE = "held_at is not null and released_at is not null"


class Allocation(Base):
    """The resources of one machine that one attempt holds or was promised. Kept as history after the release.

    A trigger, the allocation guard, updates the machine's masks and free counts, and rejects overlapping slots.
    """

    __tablename__ = "allocation"
    workload: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    """Not a foreign key: the attempt of a booking has no row yet."""
    machine: Mapped[str] = mapped_column(primary_key=True)
    """Not a foreign key, because history is kept after a machine is removed. The guard rejects unreleased rows without
    a machine."""
    slots: Mapped[int]
    """Bit mask of the slots that the attempt holds."""
    awaited: Mapped[int]
    """Bit mask of the slots that were promised to the attempt and that victims still hold."""
    cpus_milli: Mapped[int]
    awaited_cpus_milli: Mapped[int]
    """The part of `cpus_milli` that victims still hold."""
    memory_bytes: Mapped[int]
    awaited_memory_bytes: Mapped[int]
    awarded_at: Mapped[datetime] = mapped_column(server_default=NOW)
    held_at: Mapped[datetime | None]
    """When the attempt held all awarded resources of the machine. Its tasks run only after this time."""
    released_at: Mapped[datetime | None]
    stopped_at: Mapped[datetime | None]
    """When it was confirmed that no task of the attempt runs, or will run, on the machine. If the agent cannot be
    reached, this may be long after the release. A machine becomes ready only after all its released allocations are
    confirmed."""
    __table_args__ = (
        CheckConstraint("slots & awaited = 0", name="allocation_disjoint"),
        CheckConstraint(
            "awaited_cpus_milli between 0 and cpus_milli and awaited_memory_bytes between 0 and memory_bytes",
            name="allocation_awaited",
        ),
        Index("allocation_live", "machine", postgresql_where=text("released_at is null")),
        Index("allocation_past", "machine", "released_at", postgresql_where=text("released_at is not null")),
        Index("allocation_held", text(WAS_HELD), postgresql_using="gist", postgresql_where=text(_WAS_HELD_ONCE)),
        Index(
            "allocation_unconfirmed",
            "machine",
            postgresql_where=text("released_at is not null and stopped_at is null"),
        ),
    )


class Booking(Base):
    """The place of the next attempt of a running workload, which is being stopped to continue there.

    Allocations of the next attempt hold its slots. The release of the running attempt ends the booking, and awards the
    place in the same transaction if the attempt ended for the reason of the booking.
    """

    __tablename__ = "booking"
    workload: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"), primary_key=True)
    attempt: Mapped[int]
    """The running attempt."""
    code: Mapped[str]
    """Code of the reason with which the running attempt is stopped."""
    candidate: Mapped[Json]
    """The award, an `award_candidate` of `functions/award.sql` as JSON."""
    booked_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Eviction(Base):
    """One eviction. Until the queue changes from outside, the victim may not evict its evictor (immunity)."""

    __tablename__ = "eviction"
    evictor: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"), primary_key=True)
    evictor_attempt: Mapped[int] = mapped_column(primary_key=True)
    victim: Mapped[str] = mapped_column(ForeignKey("workload.id", ondelete="CASCADE"), primary_key=True)
    victim_attempt: Mapped[int]
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    change: Mapped[int] = mapped_column(server_default=text("newest_outside_change()"))
    """Number of changes of the queue from outside before the eviction: submissions and ends of workloads, and changes
    of levels and quotas."""
    __table_args__ = (Index("eviction_victim", "victim"), Index("eviction_change", "change"))
