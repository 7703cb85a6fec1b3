"""What the decision packages take and give: the queue for GMS, a region's snapshot, requests, bids and plans for RMS.

Times are seconds since the epoch, CPUs are thousandths of a core (`_milli`), memory is bytes, GPUs are whole slots.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Annotated

from pydantic import Field

from domain.capacity import USUAL, CapacityKind
from domain.criteria import JSON_CONFIG, PlanQuality
from domain.reasons import Reason

Amount = Annotated[int, Field(ge=0)]
"""Checked where it is read from a document, a snapshot for example; not where it is made."""


@dataclass(frozen=True)
class JobRequest:
    """One job of a gang: `tasks` identical tasks, each on one machine.

    Shapes: `gpu_types` is in order of preference and empty where `gpus_per_task` is 0.
    """

    name: str
    tasks: Annotated[int, Field(ge=1)]
    gpus_per_task: Amount
    gpu_types: tuple[str, ...]
    cpus_milli_per_task: Amount
    memory_bytes_per_task: Amount
    span_clusters: bool = False
    """Its tasks may run in several clusters of a region, where no single one can take them all."""
    capacity: tuple[str, ...] = USUAL
    """Kinds of capacity (`domain.capacity.CapacityKind`) on which it may run, in order of preference."""

    @property
    def gpus(self) -> int:
        """GPU slots of all tasks together."""
        return self.tasks * self.gpus_per_task

    @property
    def cpus_milli(self) -> int:
        """Thousandths of a core of all tasks together."""
        return self.tasks * self.cpus_milli_per_task


# --------------------------------------------------------------------------------------------------- GMS (MAST 4.2)


@dataclass(frozen=True)
class TenantState:
    """A tenant's level (1..7), quota, and what it used over the window."""

    name: str
    level: int
    quota_gpus: Mapping[str, int]
    """GPU type to slots; an absent type is a quota of 0."""
    quota_cpus_milli: int | None
    """None: no limit on CPUs."""
    window_share: float
    """The larger of its share of the fleet's GPUs and of its CPUs, averaged over the window."""


@dataclass(frozen=True)
class QueuedWorkload:
    """A pending workload as the scan sees it."""

    id: str
    tenant: str
    submitted_at_s: float
    """The start of its age: kept over preemptions."""
    jobs: tuple[JobRequest, ...]
    requested_level: int | None = None
    """A level below (numerically above) its tenant's, where the user asked for one."""
    held: bool = False


@dataclass(frozen=True)
class PlacedWorkload:
    """A workload that holds resources, as the scan sees it."""

    id: str
    tenant: str
    awarded_at_s: float
    gpus: Mapping[str, int]
    cpus_milli: int
    requested_level: int | None = None


@dataclass(frozen=True)
class CreditWeights:
    """The constants of expressions 10 and 11."""

    w_age: float
    """Credit per second of age."""
    age_cap_s: float
    w_fair: float


@dataclass(frozen=True)
class QueueSnapshot:
    """All that a GMS scan pass looks at, taken at one moment `now_s`."""

    now_s: float
    tenants: tuple[TenantState, ...]
    pending: tuple[QueuedWorkload, ...]
    placed: tuple[PlacedWorkload, ...]
    weights: CreditWeights


@dataclass(frozen=True)
class Ranked:
    """One pending workload after a scan, in queue order."""

    id: str
    rank: int
    """1..7, or `OVER_QUOTA_RANK`."""
    level: int
    over_quota: bool
    credit: float
    gpu_types: tuple[tuple[str, ...], ...]
    """For each job, the GPU types on which it may be placed: within its tenant's quota where it is within-quota."""
    reason: Reason | None
    """Why it is over-quota, if it is."""
    displaces: tuple[str, ...] = ()
    """Less important placed workloads of its tenant, by id, that its award makes over-quota."""


@dataclass(frozen=True)
class ScanResult:
    """A scan pass: the queue in order, and the rank of every placed workload."""

    queue: tuple[Ranked, ...]
    placed_ranks: Mapping[str, int]


# --------------------------------------------------------------------------------------------------- RMS (MAST 4.3)


@dataclass(frozen=True)
class MachineState:
    """A machine's free resources: what no workload holds and none was promised."""

    id: str
    cluster: str
    rack: str
    gpu_type: str | None
    gpus: int
    free_gpus: int
    free_cpus_milli: int
    free_memory_bytes: int
    cpus_milli: int
    memory_bytes: int
    capacity: str = CapacityKind.RESERVED.value
    """Its cluster's; as are the prices, in US dollars an hour of one GPU and of one core."""
    gpu_usd_per_h: float = 0.0
    core_usd_per_h: float = 0.0


@dataclass(frozen=True)
class Holding:
    """What one workload holds on one machine."""

    machine: str
    gpus: Amount
    cpus_milli: Amount
    memory_bytes: Amount


@dataclass(frozen=True)
class RunningWorkload:
    """A workload that holds resources in the region and may be a victim."""

    id: str
    rank: int
    started_at_s: float
    holdings: tuple[Holding, ...]
    last_checkpoint_at_s: float | None
    """None: it has reported no checkpoint; the cluster's usual is imputed."""
    evictable: bool = True
    """False: not running yet, or being evicted already."""
    protected_until_s: float = -inf
    """Not evictable before: the end of its minimum runtime."""
    attempt: int = 0
    """Which of its attempts this is: a plan to evict it is about no other."""
    ends_by_s: float = inf
    """When its maximum runtime is over; infinity: it has none."""

    @property
    def gpus(self) -> int:
        """GPU slots that it holds in the region."""
        return sum(h.gpus for h in self.holdings)


@dataclass(frozen=True)
class RegionSnapshot:
    """A region's schedulable machines and running workloads at a moment."""

    region: str
    now_s: float
    machines: tuple[MachineState, ...]
    running: tuple[RunningWorkload, ...]


@dataclass(frozen=True)
class PlacementRequest:
    """A workload that asks a region for a plan."""

    workload: str
    rank: int
    jobs: tuple[JobRequest, ...]
    may_not_evict: frozenset[str] = frozenset()
    """Workloads whose evictions led to this one's, with no change from outside since (`auction.immunity`)."""
    displaces: frozenset[str] = frozenset()
    """Less important workloads of its tenant that its award makes over-quota: in its plan they are so already."""


@dataclass(frozen=True)
class JobPlacement:
    """Where one job's tasks go: `machines` is a list of (machine id, number of tasks), sorted by machine id."""

    job: str
    cluster: str
    """Where its tasks span several, their names joined by `+`."""
    gpu_type: str | None
    machines: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Plan:
    """A region's plan for a whole gang. Nothing has been touched: the award checks and commits it."""

    workload: str
    region: str
    jobs: tuple[JobPlacement, ...]
    victims: tuple[str, ...]
    quality: PlanQuality

    @property
    def key(self) -> tuple[object, ...]:
        """Total order over plans for one workload: all criteria, then region and machine ids."""
        return (*self.quality.key, self.region, tuple(m for job in self.jobs for m in job.machines))


@dataclass(frozen=True)
class Bid:
    """A region's answer for one workload: a plan, or the reasons why there is none."""

    __pydantic_config__ = JSON_CONFIG

    workload: str
    region: str
    plan: Plan | None
    reasons: tuple[Reason, ...] = field(default=())
    victim_attempts: Mapping[str, int] = field(default_factory=dict)
    """The attempts of the plan's victims that the bid is about: the award evicts no others."""
    lasting: bool = False
    """A refusal that no award can change: one of the jobs has no room, whatever becomes of the others."""
