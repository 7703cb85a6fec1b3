"""Answers about workloads."""

from datetime import datetime
from typing import Any

from pydantic import Field

from api.paging import NextCursor
from api.views import ReasonView, View
from domain.phases import Phase


class ResourceView(View):
    """Resources of one task."""

    gpus: int
    gpu_types: list[str]
    """In order of preference."""
    cpus: float
    memory_bytes: int


class JobView(View):
    """One job: `tasks` identical tasks."""

    name: str
    role: str
    tasks: int
    resources: ResourceView


class CadenceView(View):
    """How often its tasks save, as they report it; seconds."""

    interval_s: float = Field(description="W: work between two saves")
    cost_s: float | None = Field(description="C: what a save costs the training")
    mtbf_s: float | None = Field(description="mu: mean time between interruptions of the whole gang")
    step_s: float | None = Field(description="One step; null: none was timed yet")
    source: str | None = Field(description="Who says mu", examples=["hazard"])


class LoadView(View):
    """How loading the newest checkpoint went."""

    state: str = Field(description="started, loaded, none (nothing valid was there) or failed")
    error: str | None
    skipped: int = Field(description="Checkpoints that were passed over as damaged")


class NoticeView(View):
    """A platform's word that a task will be stopped, and what the task did about it."""

    platform: str
    kind: str
    certain: bool = Field(description="False: a recommendation to leave")
    at_s: float = Field(description="When the task learnt it, in seconds since the epoch")
    ends_at_s: float | None = Field(description="When the machine goes, in seconds since the epoch; null: not known")
    words: str
    decision: str | None


class ProgressView(View):
    """What the workload's tasks last reported."""

    step: int | None
    checkpoint_step: int | None
    checkpoint_at: datetime | None
    checkpoint_age_s: float | None = Field(description="How old the newest checkpoint is")
    checkpoint_bytes: int | None
    checkpoint_s: float | None = Field(description="How long the newest save held the training up")
    checkpoint_write_s: float | None = Field(description="How long it took until it was durable")
    cadence: CadenceView | None
    load: LoadView | None = Field(description="Of the newest attempt that came so far")
    notice: NoticeView | None = Field(description="Of the newest attempt, if there was one")
    at_risk_s: float | None = Field(description="Work that an interruption now would lose; null: nothing runs")


class PlacementView(View):
    """One task on one machine."""

    machine: str
    job: str
    task: int
    slots: list[int]


class WorkloadView(View):
    """A workload as lists show it."""

    id: str = Field(examples=["wl-01jd3k9p2q7x4m5t"])
    name: str
    tenant: str
    labels: dict[str, str]
    phase: Phase
    reason: ReasonView | None = Field(description="Why it is in this phase")
    attempt: int = Field(description="Number of the newest placement; 0 before the first")
    level: int = Field(description="The level that counts: the tenant's, or the lower one that was asked for")
    held_by: str | None
    submitted_at: datetime
    finished_at: datetime | None
    region: str | None
    checkpoint_region: str | None
    queued: bool = Field(description="Whether it is in the queue")
    preemptions: int
    lost_s: float = Field(description="Seconds of work that interruptions have lost so far, by estimate")
    progress: ProgressView | None
    jobs: list[JobView]
    tables: list[str]


class WorkloadDetail(WorkloadView):
    """A workload with its specification, as it was read, and where its tasks are."""

    spec: dict[str, Any]
    placement: list[PlacementView]
    cost_usd: float = Field(description="What it has cost so far, at the prices of its clusters")
    unpriced_h: float = Field(description="Hours of GPUs and cores that it held at no known price")


class SubmittedView(WorkloadDetail):
    """A workload that was submitted."""

    never: str | None = Field(
        description="Why no region could ever hold it as the fleet is, and what would have to change; null: one might"
    )


class WorkloadPage(View):
    """A page of workloads, newest first."""

    items: list[WorkloadView]
    next_cursor: str | None = Field(description="Give it as `cursor` for the next page; null on the last one")


class AttemptView(View):
    """One placement, from award to release."""

    attempt: int
    region: str
    awarded_at: datetime
    ready_at: datetime | None = Field(description="When it held all its slots")
    started_at: datetime | None
    evicting_since: datetime | None
    evictor: str | None
    released_at: datetime | None
    outcome: ReasonView | None
    resumed_step: int | None
    last_step: int | None
    checkpoint_step: int | None
    checkpoint_at: datetime | None
    checkpoint_bytes: int | None
    checkpoint_s: float | None = Field(description="How long the last save held the training up")
    checkpoint_write_s: float | None = Field(description="How long the last save took until it was durable")
    cadence: CadenceView | None
    load: LoadView | None
    notice: NoticeView | None
    lost_s: float | None = Field(description="Seconds of work that it lost, by estimate; null until it is over")
    stale_tables: dict[str, datetime] = Field(
        description="Tables that are stale where it runs, each with the time before which it is complete there"
    )
    gpus: dict[str, int]
    cpus: float


class AttemptList(View):
    """A page of attempts, oldest first."""

    items: list[AttemptView]
    next_cursor: NextCursor


class AllocationView(View):
    """What one attempt holds, held or was promised on one machine."""

    attempt: int
    machine: str
    slots: list[int]
    awaited: list[int] = Field(description="Slots promised, which a victim still holds")
    cpus: float
    memory_bytes: int
    tasks: list[dict[str, Any]]
    awarded_at: datetime
    held_at: datetime | None
    released_at: datetime | None


class AllocationList(View):
    """A page of allocations, oldest first."""

    items: list[AllocationView]
    next_cursor: NextCursor


class CancelledView(View):
    """The workloads that were asked to end."""

    cancelled: list[str]


class WhyView(View):
    """Why a workload is where it is, or why it waits. Ranks and credit are those of the last scan."""

    workload: str
    phase: Phase
    summary: str
    reasons: list[ReasonView]
    rank: int | None = Field(description="1..8, lower is served first; 8 is over-quota")
    level: int
    over_quota: bool | None
    credit: float | None
    position: int | None = Field(description="Position in the queue, from 1")
    of: int | None = Field(description="Length of the queue")


class QueueEntry(View):
    """A waiting workload. One that no scan has seen yet has no rank and comes last."""

    id: str
    name: str
    tenant: str
    position: int | None
    rank: int | None
    level: int
    over_quota: bool | None
    credit: float | None
    submitted_at: datetime
    reasons: list[ReasonView]


class QueueView(View):
    """The queue as the last scan left it."""

    scanned_at: datetime | None
    total: int = Field(description="Number of waiting workloads that the caller may see")
    items: list[QueueEntry]


class DryRunView(View):
    """What would happen to the document if it were submitted now."""

    admitted: bool
    rank: int
    over_quota: bool
    region: str | None
    machines: list[str]
    victims: list[str] = Field(description="Workloads that would be evicted, of those that the key may see")
    other_victims: int = Field(description="How many workloads of other tenants would be evicted besides")
    reasons: list[ReasonView]
    never: str | None = Field(
        description="Why no region could ever hold it as the fleet is, and what would have to change; null: one might"
    )
