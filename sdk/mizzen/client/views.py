"""Typed dictionaries for the API's JSON. The JSON is not converted, so additional fields of a newer server are kept.

Times are ISO 8601 strings with a time zone; sizes are in bytes; an absent value is None.
"""

from typing import Any, Literal, NotRequired, TypedDict

Role = Literal["viewer", "submitter", "operator"]

TERMINAL_PHASES: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""The final phases: a workload in one of them never changes again."""


class Reason(TypedDict):
    """Why something waits, stopped or ended: a code of a fixed list, its details, and a sentence made from both."""

    code: str
    detail: dict[str, Any]
    sentence: str


class Cadence(TypedDict):
    """How often a workload's tasks save: W, C, mu and the time of a step, in seconds, and the source of mu."""

    interval_s: float
    cost_s: float | None
    mtbf_s: float | None
    step_s: float | None
    source: str | None


class Load(TypedDict):
    """The result of loading the newest checkpoint; `state` is started, loaded, none or failed."""

    state: str
    error: str | None
    skipped: int


class Notice(TypedDict):
    """A platform's notice that a task will be stopped, and the task's reaction. Times are epoch seconds."""

    platform: str
    kind: str
    certain: bool
    at_s: float
    ends_at_s: float | None
    words: str
    decision: str | None


class Progress(TypedDict):
    """The last progress that the workload's tasks reported. An interruption now would lose `at_risk_s` of work."""

    step: int | None
    checkpoint_step: int | None
    checkpoint_at: str | None
    checkpoint_age_s: float | None
    checkpoint_bytes: int | None
    checkpoint_s: float | None
    checkpoint_write_s: float | None
    cadence: Cadence | None
    load: Load | None
    notice: Notice | None
    at_risk_s: float | None


class TaskResources(TypedDict):
    """Resources of one task; `gpu_types` are in order of preference."""

    gpus: int
    gpu_types: list[str]
    cpus: float
    memory_bytes: int


class Job(TypedDict):
    """One job of a workload: `tasks` identical tasks."""

    name: str
    role: str
    tasks: int
    resources: TaskResources


class Placement(TypedDict):
    """The machine and slots of a task."""

    machine: str
    job: str
    task: int
    slots: list[int]


class Workload(TypedDict):
    """A workload."""

    id: str
    name: str
    tenant: str
    labels: dict[str, str]
    phase: str
    reason: Reason | None
    attempt: int
    level: int
    held_by: str | None
    submitted_at: str
    finished_at: str | None
    region: str | None
    checkpoint_region: str | None
    queued: bool
    preemptions: int
    lost_s: float
    progress: Progress | None
    jobs: list[Job]
    tables: list[str]


class WorkloadDetail(Workload):
    """A workload with its specification, the placement of its tasks, and its cost."""

    spec: dict[str, Any]
    placement: list[Placement]
    cost_usd: float
    unpriced_h: float


class Submitted(WorkloadDetail):
    """A workload that was submitted."""

    never: NotRequired[str | None]
    """Why no region of the current fleet could ever run the workload; None if one could."""


class DryRun(TypedDict):
    """What would happen to a workload if it were submitted now."""

    admitted: bool
    rank: int
    over_quota: bool
    region: str | None
    machines: list[str]
    victims: list[str]
    other_victims: int
    reasons: list[Reason]
    never: NotRequired[str | None]
    """Why no region of the current fleet could ever run the workload; None if one could."""


class Why(TypedDict):
    """Why a workload is in its current phase or still waits."""

    workload: str
    phase: str
    summary: str
    reasons: list[Reason]
    rank: int | None
    level: int
    over_quota: bool | None
    credit: float | None
    position: int | None
    of: int | None


class Attempt(TypedDict):
    """One placement of a workload, from award to release."""

    attempt: int
    region: str
    awarded_at: str
    ready_at: str | None
    started_at: str | None
    evicting_since: str | None
    evictor: str | None
    released_at: str | None
    outcome: Reason | None
    resumed_step: int | None
    last_step: int | None
    checkpoint_step: int | None
    checkpoint_at: str | None
    checkpoint_bytes: int | None
    checkpoint_s: float | None
    checkpoint_write_s: float | None
    cadence: Cadence | None
    load: Load | None
    notice: Notice | None
    lost_s: float | None
    stale_tables: dict[str, str]
    gpus: dict[str, int]
    cpus: float


class Allocation(TypedDict):
    """The resources that an attempt holds or held on a machine. `awaited` slots are promised; slots are indices."""

    attempt: int
    machine: str
    slots: list[int]
    awaited: list[int]
    cpus: float
    memory_bytes: int
    tasks: list[dict[str, Any]]
    awarded_at: str
    held_at: str | None
    released_at: str | None


class Event(TypedDict):
    """An entry of the event log. `id` is its position: pass it as `after` to read the events that follow."""

    id: str
    at: str
    kind: str
    tenant: str | None
    workload: str | None
    attempt: int | None
    region: str | None
    machine: str | None
    reason: Reason | None
    detail: dict[str, Any]


class QueueEntry(TypedDict):
    """A waiting workload; `rank`, `over_quota`, `credit` and `position` are None before its first scan."""

    id: str
    name: str
    tenant: str
    position: int | None
    rank: int | None
    level: int
    over_quota: bool | None
    credit: float | None
    submitted_at: str
    reasons: list[Reason]


class Queue(TypedDict):
    """The queue as of the last scan."""

    scanned_at: str | None
    total: int
    items: list[QueueEntry]


class Resources(TypedDict):
    """GPU slots by type, and CPUs in cores (as a quota: None is no limit)."""

    gpus: dict[str, int]
    cpus: float | None


class Tenant(TypedDict):
    """A tenant with its level (1..7), quota and current use."""

    name: str
    level: int
    quota: Resources
    used: Resources


class Key(TypedDict):
    """An API key without its secret value."""

    id: str
    role: Role
    tenant: str | None
    label: str
    created_at: str
    revoked_at: str | None
    expires_at: str | None


class NewKey(Key):
    """A new API key with its secret value, which the API returns only once."""

    key: str


class Identity(TypedDict):
    """The identity of an API key."""

    id: str
    role: Role
    tenant: str | None
    label: str
    expires_at: str | None


class Slots(TypedDict):
    """GPU slots of one type on machines that are not lost. Promised slots are still held by an evicted workload."""

    total: int
    held: int
    promised: int


class MachineCounts(TypedDict):
    """Number of machines by state. Cordoned machines are also counted in their state."""

    ready: int
    joining: int
    lost: int
    cordoned: int


class Datacenter(TypedDict):
    """A datacenter of a region."""

    name: str
    storage_bytes: int | None
    clusters: list[str]


class Region(TypedDict):
    """A region."""

    name: str
    bucket_url: str
    storage_bytes: int | None
    cpu_hours: dict[str, float]
    datacenters: list[Datacenter]
    clusters: list[str]
    machines: MachineCounts
    gpus: dict[str, Slots]
    state: str
    """`answering`, `slow`, `silent` or `bucket_unavailable`."""
    state_since: str | None
    bucket_error: str | None


class Cluster(TypedDict):
    """A cluster of a region."""

    region: str
    name: str
    manager: str
    zone: str | None
    capacity: str
    """`reserved`, `on_demand`, `spot` or `voluntary`."""
    prices: dict[str, float]
    """Price in US dollars per hour of a GPU by its type, and of a core as `cpu`."""
    machines: MachineCounts
    gpus: dict[str, Slots]


class Cost(TypedDict):
    """The use and the cost of one resource by a tenant's workloads on one day (UTC)."""

    day: str
    tenant: str
    capacity: str
    resource: str
    """A GPU type, or `cpu`."""
    hours: float
    unpriced_h: float
    """The part of `hours` for which no price is known."""
    usd: float


class Machine(TypedDict):
    """A machine with its held and promised slots. Slots are indices."""

    id: str
    region: str
    cluster: str
    machine: str
    rack: str
    gpu_type: str | None
    gpus: int
    slots_held: list[int]
    slots_promised: list[int]
    cpus: float
    free_cpus: float
    memory_bytes: int
    free_memory_bytes: int
    state: str
    cordon: Reason | None
    draining: bool
    failed_gangs: int
    address: str
    key: str
    offered_key: str | None
    registered_at: str
    lost_at: str | None


class MachineDetail(Machine):
    """A machine with the workloads on it that the API key may see."""

    workloads: list[str]


class AuditEntry(TypedDict):
    """An entry of the audit log: the actor, the action and its target."""

    id: int
    at: str
    actor: str
    tenant: str | None
    action: str
    target: str
    detail: dict[str, Any]
