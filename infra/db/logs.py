"""Models of logs, the outbox, derived data and temporary data. The primary data is in `infra.db.models`.

The queue's order and credit are derived data, which the scheduler computes and publishes (`Publication`).
"""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index, Sequence, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from infra.db.base import NOW, Base, Json
from infra.db.models import Workload


class Audit(Base):
    """The audit log: which key changed what, and when."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW, index=True)
    actor: Mapped[str]
    """The id of an API key, `mizzen`, or `unknown` if the request had no valid key."""
    tenant: Mapped[str | None]
    action: Mapped[str]
    target: Mapped[str]
    detail: Mapped[Json] = mapped_column(server_default=text("'{}'"))


class Event(Base):
    """The event log, in an order that readers can follow without gaps.

    Serial ids become visible out of order. So readers follow the order (txid, id), where `txid` is the writing
    transaction, and stop before the oldest transaction in flight (`infra.db.events`).
    """

    __tablename__ = "event"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    txid: Mapped[int] = mapped_column(server_default=text("(pg_current_xact_id()::text::bigint)"))
    at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    kind: Mapped[str]
    """`workload.<phase>`, `workload.checkpoint`, `workload.hung`, `machine.<state>`, `replica.<state>`, ..."""
    tenant: Mapped[str | None]
    workload: Mapped[str | None]
    attempt: Mapped[int | None]
    region: Mapped[str | None]
    machine: Mapped[str | None]
    reason: Mapped[Json | None] = mapped_column(JSONB(none_as_null=True))
    detail: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    dedup: Mapped[str | None]
    """Key that prevents a retried operation from writing the event twice; unique for each workload."""
    __table_args__ = (
        UniqueConstraint("workload", "dedup", name="event_once"),
        Index("event_order", "txid", "id"),
        Index("event_workload", "workload", "txid", "id"),
    )


class MachineChange(Base):
    """The state of a machine from `since` until the next row. Triggers write the rows."""

    __tablename__ = "machine_change"
    machine: Mapped[str] = mapped_column(primary_key=True)
    since: Mapped[datetime] = mapped_column(primary_key=True)
    state: Mapped[str]
    is_closed: Mapped[bool]
    """Whether the machine was cordoned or drained."""
    __table_args__ = (
        CheckConstraint("state in ('joining', 'ready', 'lost')", name="machine_change_state"),
        Index("machine_change_since", "since"),
    )


class UsageRun(Base):
    """The usage of one run of a job: an attempt of a workload, or an imported run (`infra.db.usage`)."""

    __tablename__ = "usage_run"
    source: Mapped[str] = mapped_column(primary_key=True)
    """Source of the record: `mizzen` for workloads, else the name of the importing system, such as `spark`."""
    run: Mapped[str] = mapped_column(primary_key=True)
    """The run's id in its source; `workload.attempt` for workloads."""
    job: Mapped[str]
    """The name that the runs of a recurring job share."""
    kind: Mapped[str] = mapped_column(CheckConstraint("kind in ('ml', 'spark', 'presto')"))
    app: Mapped[str | None]
    """The app whose quota of CPU hours the run counts against (`Region.cpu_hours`)."""
    priority: Mapped[int] = mapped_column(CheckConstraint("priority between 1 and 7"))
    tables: Mapped[list[str]]
    """The tables that the run read, or single partitions as `table/partition` (`domain.ids.READ_RULE`)."""
    gpu_hours: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    """GPU hours by GPU type."""
    cpu_hours: Mapped[float] = mapped_column(CheckConstraint("cpu_hours >= 0"), server_default=text("0"))
    ended_at: Mapped[datetime]
    __table_args__ = (Index("usage_run_window", "ended_at"),)


class Outbox(Base):
    """Messages to Temporal workflows, written in the transaction of a change and delivered after it, at least once."""

    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    kind: Mapped[str]
    """`start` (start a workload's workflow), `mail` (signal it), `wake` (wake the scheduler), `replicate` (copy a
    table), `unconfirmed` (signal a machine's workflow), `placement_run` (the workflow of a nightly run), `scrub` (the
    verification of a region's copies), `instance` (the workflow of an instance) or `session` (asks an agent to join a
    session)."""
    workload: Mapped[str | None]
    body: Mapped[Json]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    delivered_at: Mapped[datetime | None]
    __table_args__ = (Index("outbox_due", "id", postgresql_where=text("delivered_at is null")),)


class Change(Base):
    """The change log: the changed rows that scheduling decisions depend on.

    Triggers write it, and `infra.db.changes` reads it. The table is unlogged, so a crash of Postgres empties it,
    together with the epoch.
    """

    __tablename__ = "change"
    txid: Mapped[int] = mapped_column(server_default=text("(pg_current_xact_id()::text::bigint)"), primary_key=True)
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    kind: Mapped[str]
    """`workload`, `moved` (a workload was deleted, or its submission time changed), `attempt`, `history` (a released
    attempt), `machine`, `tenant`, `region` or `everything`."""
    key: Mapped[str]
    attempt: Mapped[int | None]
    region: Mapped[str | None]
    """The only region that the change affects, if that is known."""
    __table_args__ = ({"prefixes": ["UNLOGGED"]},)


class ChangeEpoch(Base):
    """The epoch of the change log, at most one row. A crash of Postgres deletes it, because changes are lost then."""

    __tablename__ = "change_epoch"
    one: Mapped[bool] = mapped_column(CheckConstraint("one"), primary_key=True, server_default=text("true"))
    epoch: Mapped[str] = mapped_column(server_default=text("gen_random_uuid()::text"))
    forgotten_txid: Mapped[int] = mapped_column(server_default="0")
    """The newest transaction id whose changes were deleted."""
    __table_args__ = ({"prefixes": ["UNLOGGED"]},)


class Publication(Base):
    """Derived data that one process computes and publishes for readers, such as the queue's order and ranks."""

    __tablename__ = "publication"
    name: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    body: Mapped[Json]
    columns: Mapped[bytes | None]
    """Packed columns (`infra.db.published_queue`)."""


SCAN_NUMBER = Sequence("scan_number", metadata=Base.metadata)
"""Numbers the scans of the queue."""


class ScanBatch(Base):
    """A batch of a scan's queue for regions to bid on. Temporary data between the scan and the award."""

    __tablename__ = "scan_batch"
    scan: Mapped[int] = mapped_column(primary_key=True)
    first: Mapped[int] = mapped_column(primary_key=True)
    """Position in the queue at which the batch begins, from 0."""
    entries: Mapped[list[Any]] = mapped_column(JSONB)
    """`activities.scheduling.scan_result.ScannedWorkload` of each workload, as JSON."""
    __table_args__ = ({"prefixes": ["UNLOGGED"]},)


class RegionBid(Base):
    """A region's bids for one batch. Temporary data between the bids and the award."""

    __tablename__ = "region_bid"
    scan: Mapped[int] = mapped_column(primary_key=True)
    first: Mapped[int] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    bids: Mapped[bytes]
    """`domain.scheduling.Bid` of each workload, as JSON."""
    at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    __table_args__ = ({"prefixes": ["UNLOGGED"]},)


class Waiting(Base):
    """Why a queued workload was not placed in the last pass: the reason of each region. Derived data."""

    __tablename__ = "waiting"
    workload: Mapped[str] = mapped_column(ForeignKey(Workload.id, ondelete="CASCADE"), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    reasons: Mapped[Json]
    """JSON object with the regions' reasons: `{"reasons": [...]}`."""
