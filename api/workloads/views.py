"""Response models for workloads."""

from datetime import datetime
from typing import Any

from pydantic import Field

from api.paging import Page
from api.views import NotificationView, ReasonView, View
from domain.phases import Phase

_WAITED = (
    "Seconds since the submission until its end, without time on hold or blocked."
    " They count for credit and reservations"
)
_EXPECTED = "The expected start; null: it does not wait in the queue, or there is no forecast"
_ELIGIBLE = (
    "Seconds since it could last be placed: since the submission, or the end of its last attempt, hold or block;"
    " null: it is not queued, or is on hold or blocked"
)


class TaskResourcesView(View):
    """Resources of one task."""

    gpus: int
    gpu_types: list[str] = Field(description="In order of preference")
    cpus: float
    memory_bytes: int


class JobView(View):
    """One job: `tasks` identical tasks, or more if it is elastic."""

    name: str
    role: str
    tasks: int = Field(description="Of an elastic job: its fewest tasks")
    most_tasks: int | None = Field(description="Of an elastic job: its most tasks")
    placed_tasks: int | None = Field(description="Of an elastic job: the number of tasks of the newest attempt")
    resources: TaskResourcesView


class CadenceView(View):
    """The checkpoint cadence that the tasks report, in seconds."""

    interval_s: float = Field(description="W: time between two saves")
    cost_s: float | None = Field(description="C: time for which a save blocks the training")
    mtbf_s: float | None = Field(description="mu: mean time between interruptions of the whole gang")
    step_s: float | None = Field(description="Duration of a step; null: not measured yet")
    source: str | None = Field(description="Source of mu", examples=["hazard"])


class LoadView(View):
    """The result of loading the newest checkpoint."""

    state: str = Field(description="`started`, `loaded`, `none` (there was no valid checkpoint) or `failed`")
    error: str | None
    skipped: int = Field(description="Number of checkpoints that were skipped because they are damaged")


class FailingView(View):
    """The saves of a task that have failed since its last checkpoint."""

    failures: int
    since_s: float = Field(description="When the first of these saves failed, in seconds since the epoch")
    error: str | None = Field(description="Why the last save failed")
    limit: str | None = Field(description="The limit that ended the task; null: the task tries again")


class NoticeView(View):
    """A notice from a platform that a task will be stopped, and the task's reaction."""

    platform: str
    kind: str
    certain: bool = Field(description="False: a recommendation to leave")
    at_s: float = Field(description="When the task received it, in seconds since the epoch")
    ends_at_s: float | None = Field(description="When the machine will stop, in seconds since the epoch; null: unknown")
    words: str
    decision: str | None


class BandwidthView(View):
    """The bandwidth for uploads of checkpoints from a machine, as its agent measured it during uploads."""

    measured_at: datetime = Field(description="When it was last measured")
    mean_bytes_s: float = Field(description="The mean, in bytes on the wire per second")
    lower_bytes_s: float = Field(description="The lower confidence bound, from which save intervals are computed")


class ProgressView(View):
    """The latest reports of the workload's tasks."""

    step: int | None
    metrics: dict[str, float] = Field(description="The values that the newest attempt has reported, such as its loss")
    checkpoint_step: int | None
    checkpoint_at: datetime | None
    checkpoint_age_s: float | None = Field(description="Age of the newest checkpoint")
    checkpoint_bytes: int | None
    checkpoint_s: float | None = Field(description="How long the newest save blocked the training")
    checkpoint_write_s: float | None = Field(description="How long the newest save took until it was durable")
    cadence: CadenceView | None
    load: LoadView | None = Field(description="From the newest attempt that tried to load a checkpoint")
    failing: FailingView | None = Field(
        description="Saves of the newest attempt that have failed since its last checkpoint; null: none"
    )
    notice: NoticeView | None = Field(description="Notice to the newest attempt; null: there was none")
    at_risk_s: float | None = Field(description="Work that an interruption now would lose; null: no task runs")


class PlacementView(View):
    """One task, with its machine and its slots."""

    machine: str
    job: str
    task: int
    slots: list[int] = Field(description="Indices of its slots on the machine")


class ArrayView(View):
    """The elements of an array by state."""

    elements: int
    waiting: int = Field(description="Elements that wait for their first placement")
    live: int = Field(description="Elements that hold slots, or wait for another attempt")
    succeeded: int
    failed: int
    cancelled: int
    throttle: int | None = Field(description="Maximum number of elements that hold slots; null: no limit")


class ElementView(View):
    """The identity of an element of an array."""

    array: str = Field(description="Id of the array")
    index: int
    parameters: dict[str, str] = Field(description="The element's values of the parameters of the matrix or the list")


class StartView(View):
    """An interval in which a waiting workload is expected to start. It should hold for four of five workloads."""

    earliest: datetime
    latest: datetime
    sentence: str = Field(description="The interval, what the workload waits for, and what would move the start")


class WorkloadView(View):
    """A workload, with the fields that lists contain."""

    id: str = Field(examples=["wl-01jd3k9p2q7x4m5t"])
    name: str
    tenant: str
    labels: dict[str, str]
    phase: Phase
    reason: ReasonView | None = Field(description="Why it is in this phase")
    attempt: int = Field(description="Number of the newest attempt; 0 before the first")
    level: int = Field(description="The effective level: the tenant's, or the lower one that was requested")
    held_by: str | None
    blocked: str | None = Field(
        description="Before it enters the queue: `waiting` for its dependencies, or `never` if one can never hold"
    )
    submitted_at: datetime
    waited_s: float = Field(description=_WAITED)
    eligible_s: float | None = Field(description=_ELIGIBLE)
    finished_at: datetime | None
    region: str | None
    checkpoint_region: str | None
    checkpoint_store: str | None = Field(
        description="The cluster's store that has the newest checkpoint; null: the bucket of `checkpoint_region`"
    )
    queued: bool = Field(description="Whether it is in the queue")
    expected_start: StartView | None = Field(description=_EXPECTED)
    preemptions: int
    lost_s: float = Field(description="Estimated seconds of work lost by interruptions so far")
    progress: ProgressView | None
    jobs: list[JobView]
    tables: list[str]
    array: ArrayView | None = Field(description="Its elements, if it is an array")
    element: ElementView | None = Field(description="Its array and index, if it is an array element")


class DependencyView(View):
    """A condition for a workload to enter the queue, on another workload, a partition of a table, or the time."""

    predecessor: str | None = Field(description="Id of the workload on which the condition depends")
    predecessor_name: str | None
    table: str | None
    partition: str | None
    not_before: datetime | None
    condition: str = Field(description="`succeeded`, `ended`, `failed`, `started`, `ready` or `due`")
    state: str = Field(
        description="`waiting`, `met`, `never`: it can no longer hold, `waived` by a user, or `each`: each element of"
        " the array waits for the element of the predecessor with the same index"
    )
    phase: str | None = Field(description="The predecessor's phase, or its phase when it decided the condition")
    decided_at: datetime | None


class WorkloadDetail(WorkloadView):
    """A workload with its specification, the placement of its tasks, and its cost."""

    after: list[DependencyView] = Field(description="Its dependencies, first the ones that can no longer hold")
    notifications: list[NotificationView] = Field(description="Notifications of its end, by receiver")
    spec: dict[str, Any] = Field(description="Its document, without defaults; it can be submitted again")
    placement: list[PlacementView]
    cost_usd: float = Field(description="Cost so far in US dollars, at the prices of its clusters")
    unpriced_h: float = Field(description="GPU hours and core hours for which no price is known")


class SubmittedView(WorkloadDetail):
    """A submitted workload."""

    document_notes: list[str] = Field(description="Fields of the document that have no effect")
    never: str | None = Field(
        description="Why no region of the current fleet can hold it, and what would have to change; null: one might"
    )


class WorkloadPage(Page[WorkloadView]):
    """A page of workloads, newest first."""


class LeftView(View):
    """The files that an ended task has left in its working directory, on its machine."""

    job: str
    task: int
    machine: str
    path: str
    bytes: int = Field(description="Size of the files written since the task's start, without hidden ones")
    until: datetime = Field(description="When the directory is deleted; earlier if the machine's disk fills")


class GpuUseView(View):
    """The GPU use of a task, as its agent last measured it."""

    job: str
    task: int
    gpus: int
    percent: int = Field(description="The share of the time in which they computed, the mean over them, in steps of 5")
    used_bytes: int = Field(description="Memory in use on all of them, in steps of 128 MiB")


class UnstoredView(View):
    """An output of a task that was not stored."""

    job: str
    task: int
    name: str
    why: str


class AttemptView(View):
    """One attempt, from award to release."""

    attempt: int
    region: str
    tasks: int
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
    checkpoint_s: float | None = Field(description="How long the last save blocked the training")
    checkpoint_write_s: float | None = Field(description="How long the last save took until it was durable")
    cadence: CadenceView | None
    bandwidth: BandwidthView | None = Field(
        description="Bandwidth of its slowest lent machine; kept while an agent restarts; null: unknown"
    )
    load: LoadView | None
    failing: FailingView | None = Field(description="Saves that failed after its last checkpoint; null: none")
    notice: NoticeView | None
    left: list[LeftView] = Field(description="Files that its ended tasks have left on machines, largest first")
    unstored: list[UnstoredView] = Field(
        description="Outputs that were not stored at its end. An output that any task has counts as stored"
    )
    gpu_use: list[GpuUseView] = Field(description="By task, of at most 256 tasks; empty: not measured")
    lost_s: float | None = Field(description="Estimated seconds of work that it lost; null until it ends")
    stale_tables: dict[str, datetime] = Field(
        description="Tables that are stale in its region, each with the time up to which the replica is complete"
    )
    gpus: dict[str, int]
    cpus: float


class PointView(View):
    """The values that the tasks of an attempt had reported at one time."""

    attempt: int
    step: int
    at: datetime
    metrics: dict[str, float]


class CurveView(View):
    """Steps and metrics over time."""

    points: list[PointView] = Field(
        description="By attempt and step; of each attempt at most 200, evenly spaced by step within a factor of two"
    )


class AttemptList(Page[AttemptView]):
    """A page of attempts, oldest first."""


class AllocationView(View):
    """The resources of one machine that an attempt holds, held or is promised."""

    attempt: int
    machine: str
    slots: list[int] = Field(description="Indices of the slots that it holds or held")
    awaited: list[int] = Field(description="Indices of promised slots that a victim still holds")
    cpus: float
    memory_bytes: int
    tasks: list[dict[str, Any]]
    awarded_at: datetime
    held_at: datetime | None
    released_at: datetime | None


class AllocationList(Page[AllocationView]):
    """A page of allocations, oldest first."""


class CancelledView(View):
    """The workloads whose cancellation was requested."""

    cancelled: list[str]


class WhyView(View):
    """Why a workload is in its current phase or still waits. Rank and credit are from the last scan."""

    workload: str
    phase: Phase
    summary: str
    reasons: list[ReasonView]
    rank: int | None = Field(
        description="1..14, lower is served first; 8 and more: over-quota, in the order of the levels"
    )
    level: int
    over_quota: bool | None
    credit: float | None
    preference: float | None = Field(
        description="Bonus in the order among its tenant's workloads of this level, in units of credit:"
        " more for a person with less recent use, and for a short maximum runtime"
    )
    position: int | None = Field(description="Position in the queue, from 1")
    of: int | None = Field(description="Length of the queue")
    waited_s: float = Field(description=_WAITED)
    eligible_s: float | None = Field(description=_ELIGIBLE)
    expected_start: StartView | None = Field(description=_EXPECTED)


class QueueEntry(View):
    """A waiting workload.

    Before its first scan, `position`, `rank`, `over_quota` and `credit` are null, and the workload comes last.
    """

    id: str
    name: str
    tenant: str
    position: int | None
    rank: int | None
    level: int
    over_quota: bool | None
    credit: float | None
    submitted_at: datetime
    waited_s: float = Field(description=_WAITED)
    eligible_s: float | None = Field(description=_ELIGIBLE)
    reasons: list[ReasonView]
    expected_start: StartView | None = Field(description=_EXPECTED)


class QueueView(View):
    """The queue in the order of the last scan."""

    scanned_at: datetime | None
    total: int = Field(description="Number of waiting workloads that the caller may see")
    items: list[QueueEntry]


class DryRunView(View):
    """The expected result of submitting the document now."""

    admitted: bool
    rank: int
    over_quota: bool
    region: str | None
    machines: list[str]
    victims: list[str] = Field(description="Workloads that would be evicted and that the key may see")
    other_victims: int = Field(description="Number of other tenants' workloads that would also be evicted")
    reasons: list[ReasonView]
    never: str | None = Field(
        description="Why no region of the current fleet can hold it, and what would have to change; null: one might"
    )
