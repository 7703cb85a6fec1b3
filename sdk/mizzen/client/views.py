"""What the API returns, as typed dictionaries: the JSON as it came, so that nothing of a newer server is lost.

Times are ISO 8601 strings with a zone; sizes are bytes; an absent value is None.
"""

from typing import Any, Literal, NotRequired, TypedDict

Role = Literal["viewer", "submitter", "operator"]

TERMINAL_PHASES: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""A workload in one of these never changes again."""


class Reason(TypedDict):
    """Why something waits, stopped or ended: a code of a closed list, its numbers, and a sentence made of them."""

    code: str
    detail: dict[str, Any]
    sentence: str


class Cadence(TypedDict):
    """How often a workload's tasks save: W, C, mu and the time of a step in seconds, and who says mu."""

    interval_s: float
    cost_s: float | None
    mtbf_s: float | None
    step_s: float | None
    source: str | None


class Load(TypedDict):
    """How loading the newest checkpoint went; `state` is started, loaded, none or failed."""

    state: str
    error: str | None
    skipped: int


class Notice(TypedDict):
    """A platform's word that a task will be stopped, and what the task did about it; times are epoch seconds."""

    platform: str
    kind: str
    certain: bool
    at_s: float
    ends_at_s: float | None
    words: str
    decision: str | None


class Progress(TypedDict):
    """What the workload's tasks last reported; `at_risk_s` is the work that an interruption now would lose."""

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
    """One task on one machine."""

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
    """A workload with its specification and where its tasks are."""

    spec: dict[str, Any]
    placement: list[Placement]
    cost_usd: float
    unpriced_h: float


class Submitted(WorkloadDetail):
    """A workload that was submitted."""

    never: NotRequired[str | None]
    """Why no region could ever hold it as the fleet is; None: one might."""


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
    """Why no region could ever hold it as the fleet is; None: one might."""


class Why(TypedDict):
    """Why a workload is where it is, or why it waits."""

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
    """What one attempt holds, held or was promised (`awaited`) on one machine; slots are indices."""

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
    """One entry of the event log. `id` is its position: give it back to go on after it."""

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
    """The queue as the last scan left it."""

    scanned_at: str | None
    total: int
    items: list[QueueEntry]


class Resources(TypedDict):
    """GPU slots by type, and CPUs in cores (as a quota: None is no limit)."""

    gpus: dict[str, int]
    cpus: float | None


class Tenant(TypedDict):
    """A tenant with its level (1..7), quota and present use."""

    name: str
    level: int
    quota: Resources
    used: Resources


class Key(TypedDict):
    """An API key, without the key itself."""

    id: str
    role: Role
    tenant: str | None
    label: str
    created_at: str
    revoked_at: str | None
    expires_at: str | None


class NewKey(Key):
    """A new API key with the key itself, which is shown this once."""

    key: str


class Identity(TypedDict):
    """Whose key this is."""

    id: str
    role: Role
    tenant: str | None
    label: str
    expires_at: str | None


class Slots(TypedDict):
    """GPU slots of one type on machines that are not lost; promised ones are held by a workload being evicted."""

    total: int
    held: int
    promised: int


class MachineCounts(TypedDict):
    """Number of machines by state; those of `cordoned`, on which nothing new is placed, are among the others."""

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
    """A dynamic cluster of a region."""

    region: str
    name: str
    manager: str
    zone: str | None
    capacity: str
    """`reserved`, `on_demand`, `spot` or `voluntary`."""
    prices: dict[str, float]
    """US dollars an hour of a GPU by its type, and of a core as `cpu`."""
    machines: MachineCounts
    gpus: dict[str, Slots]


class Cost(TypedDict):
    """What a tenant's workloads held of one thing on a day (UTC), and what that cost."""

    day: str
    tenant: str
    capacity: str
    resource: str
    """A GPU type, or `cpu`."""
    hours: float
    unpriced_h: float
    """Of these, hours at no known price."""
    usd: float


class Machine(TypedDict):
    """A machine and what of it is held or promised; slots are indices."""

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
    """A machine with the workloads on it, as far as the key may see them."""

    workloads: list[str]


class AuditEntry(TypedDict):
    """One change: who made it, and to what."""

    id: int
    at: str
    actor: str
    tenant: str | None
    action: str
    target: str
    detail: dict[str, Any]
