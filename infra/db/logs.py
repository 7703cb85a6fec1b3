"""What the system writes down beside the facts (`infra.db.models`): logs, mail, derived facts and scratch.

Of the derived facts, the queue's order and credit are computed and published (`Publication`).
"""

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Identity, Index, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from infra.db.base import NOW, Base, Json
from infra.db.models import Workload


class Audit(Base):
    """Who changed what."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW, index=True)
    actor: Mapped[str]
    """The id of an API key, `mizzen`, or `unknown` where no known key was given."""
    tenant: Mapped[str | None]
    action: Mapped[str]
    target: Mapped[str]
    detail: Mapped[Json] = mapped_column(server_default=text("'{}'"))


class Event(Base):
    """The event log: everything that happened, in an order that readers can follow without gaps.

    Serial ids become visible out of order. `txid` is the writing transaction, and readers go only up to the oldest
    transaction still in flight (`infra.db.events`), in the order (txid, id).
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
    """Key by which an effect that is carried out again finds that it has written this already."""
    __table_args__ = (
        UniqueConstraint("workload", "dedup", name="event_once"),
        Index("event_order", "txid", "id"),
        Index("event_workload", "workload", "txid", "id"),
    )


class UsageRun(Base):
    """What one run of a job used: an attempt of a workload, or a run that was imported (`infra.db.usage`)."""

    __tablename__ = "usage_run"
    source: Mapped[str] = mapped_column(primary_key=True)
    """`mizzen` for workloads; else who says it, such as `spark`."""
    run: Mapped[str] = mapped_column(primary_key=True)
    """Its id there; of a workload, `workload.attempt`."""
    job: Mapped[str]
    """The name that the runs of a recurring job share."""
    kind: Mapped[str] = mapped_column(CheckConstraint("kind in ('ml', 'spark', 'presto')"))
    app: Mapped[str | None]
    """Whose quota of CPU hours it counts in (`Region.cpu_hours`)."""
    priority: Mapped[int] = mapped_column(CheckConstraint("priority between 1 and 7"))
    tables: Mapped[list[str]]
    """What it read: tables, or `table/partition` (`domain.ids.READ_RULE`)."""
    gpu_hours: Mapped[Json] = mapped_column(server_default=text("'{}'"))
    """GPU type to hours."""
    cpu_hours: Mapped[float] = mapped_column(CheckConstraint("cpu_hours >= 0"), server_default=text("0"))
    ended_at: Mapped[datetime]
    __table_args__ = (Index("usage_run_window", "ended_at"),)


class Outbox(Base):
    """Mail to Temporal, written in the transaction that makes it true and delivered after it, at least once."""

    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    kind: Mapped[str]
    """`start` (a workload's workflow), `mail` (a signal to it), `wake` (the scheduler), `replicate` (a table),
    `unconfirmed` (a signal to a machine's workflow), `night` (the workflow of a night)."""
    workload: Mapped[str | None]
    body: Mapped[Json]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    delivered_at: Mapped[datetime | None]
    __table_args__ = (Index("outbox_due", "id", postgresql_where=text("delivered_at is null")),)


class Change(Base):
    """The change log: which rows changed that decisions look at, written by triggers (in the migrations).

    Emptied by a crash, with the epoch; `infra.db.changes` reads it.
    """

    __tablename__ = "change"
    txid: Mapped[int] = mapped_column(server_default=text("(pg_current_xact_id()::text::bigint)"), primary_key=True)
    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    kind: Mapped[str]
    """`workload`, `moved` (gone, or submitted at another time), `attempt`, `history` (of released attempts), `machine`,
    `tenant`, `region`, `everything`."""
    key: Mapped[str]
    attempt: Mapped[int | None]
    region: Mapped[str | None]
    """The one region to which it matters, where that is known."""
    __table_args__ = ({"prefixes": ["UNLOGGED"]},)


class ChangeEpoch(Base):
    """One row: since when the change log is without gaps. A crash of Postgres takes it away."""

    __tablename__ = "change_epoch"
    one: Mapped[bool] = mapped_column(CheckConstraint("one"), primary_key=True, server_default=text("true"))
    epoch: Mapped[str] = mapped_column(server_default=text("gen_random_uuid()::text"))
    forgotten_txid: Mapped[int] = mapped_column(server_default="0")
    """The newest transaction of which changes were deleted."""


class Publication(Base):
    """Derived facts, computed by their owner and published whole for reading: the queue's order and ranks."""

    __tablename__ = "publication"
    name: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    body: Mapped[Json]
    columns: Mapped[bytes | None]
    """Packed (`infra.db.published`)."""


class ScanBatch(Base):
    """A part of a scan's queue on which regions are to bid: scratch between the scan and the award."""

    __tablename__ = "scan_batch"
    scan: Mapped[int] = mapped_column(primary_key=True)
    first: Mapped[int] = mapped_column(primary_key=True)
    """Where in the queue it begins, from 0."""
    entries: Mapped[list[Any]] = mapped_column(JSONB)
    """`activities.scheduling.scan_result.ScannedWorkload` of each workload, as JSON."""
    __table_args__ = ({"prefixes": ["UNLOGGED"]},)


class RegionBid(Base):
    """A region's answers for one batch: scratch between the regions' bids and the award."""

    __tablename__ = "region_bid"
    scan: Mapped[int] = mapped_column(primary_key=True)
    first: Mapped[int] = mapped_column(primary_key=True)
    region: Mapped[str] = mapped_column(primary_key=True)
    bids: Mapped[bytes]
    """`domain.scheduling.Bid` of each workload, as JSON."""
    at: Mapped[datetime] = mapped_column(server_default=text("clock_timestamp()"))
    __table_args__ = ({"prefixes": ["UNLOGGED"]},)


class Waiting(Base):
    """Why a queued workload was not placed at the last tick: every region's answer. Derived."""

    __tablename__ = "waiting"
    workload: Mapped[str] = mapped_column(ForeignKey(Workload.id, ondelete="CASCADE"), primary_key=True)
    at: Mapped[datetime] = mapped_column(server_default=NOW)
    reasons: Mapped[Json]
    """`{"reasons": [...]}`."""
