"""Inputs and outputs of the decision packages: the queue for GMS; snapshots, requests, bids and plans for RMS.

Times are seconds since the epoch, CPUs are thousandths of a core (`_milli`), memory is bytes, GPUs are whole slots.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated

from pydantic import Field

from domain.capacity import USUAL, CapacityKind
from domain.criteria import JSON_CONFIG, PlanQuality
from domain.reasons import Reason
from domain.spread import SpreadRule
from domain.topology import ANYWHERE, TopologyRule

Amount = Annotated[int, Field(ge=0)]
"""A non-negative integer. It is validated when it is parsed from a document, not when an object is constructed."""


@dataclass(frozen=True)
class MoveCost:
    """The cost of moving a job that left a machine of an owner to another cluster (ReclaimNet's P2)."""

    place: str
    """`region/cluster`."""
    away: bool
    """Whether another cluster is preferred: the one that the job left, if enough machines there have room."""
    score_us: int
    """The score: expected microseconds of this migration, and of the next one; at most `MOST_US`."""


MOST_US = 10**15
"""The worst score. A cluster without a score, because it is newer than the scores, also gets the worst."""


@dataclass(frozen=True)
class JobRequest:
    """One job of a gang: `tasks` identical tasks, each on one machine, or more if it is elastic.

    Shapes: `gpu_types` is in order of preference and empty where `gpus_per_task` is 0.
    """

    name: str
    tasks: Annotated[int, Field(ge=1)]
    gpus_per_task: Amount
    gpu_types: tuple[str, ...]
    cpus_milli_per_task: Amount
    memory_bytes_per_task: Amount
    span_clusters: bool = False
    """The tasks may span several clusters of a region if no single cluster can hold them all."""
    topology: TopologyRule = ANYWHERE
    """Which of the tasks stay together."""
    most_tasks: Amount = 0
    """Of an elastic job: an attempt has `tasks` to `most_tasks` tasks. 0: it has `tasks`."""
    capacity: tuple[str, ...] = USUAL
    """Capacity kinds (`domain.capacity.CapacityKind`) on which the job may run, in order of preference."""
    moves: tuple[MoveCost, ...] = ()
    """The score of each cluster, if the job left a machine that an owner lends; empty: all clusters are equal."""

    @property
    def is_elastic(self) -> bool:
        """Whether an attempt may have more tasks than `tasks`."""
        return self.most_tasks > self.tasks

    def sized(self, tasks: int) -> "JobRequest":
        """Returns the job with a number of tasks.

        Raises:
            ValueError: the job must not have this number of tasks.
        """
        if not self.tasks <= tasks <= max(self.tasks, self.most_tasks):
            most = f" to {self.most_tasks}" if self.is_elastic else ""
            raise ValueError(f"plan places {tasks} of {self.tasks}{most} tasks of job {self.name}")
        return self if tasks == self.tasks else replace(self, tasks=tasks)

    @property
    def gpus(self) -> int:
        """Total GPU slots of all tasks."""
        return self.tasks * self.gpus_per_task

    @property
    def cpus_milli(self) -> int:
        """Total CPUs of all tasks, in thousandths of a core."""
        return self.tasks * self.cpus_milli_per_task

    def move_to(self, region: str, cluster: str) -> tuple[int, int]:
        """Returns `MoveCost.away` (0 or 1) and `MoveCost.score_us` of a cluster; zeros if the job does not move."""
        if not self.moves:
            return 0, 0
        place = f"{region}/{cluster}"
        found = next((one for one in self.moves if one.place == place), None)
        return (1, MOST_US) if found is None else (int(found.away), found.score_us)


# --------------------------------------------------------------------------------------------------- GMS (MAST 4.2)


@dataclass(frozen=True)
class TenantState:
    """A tenant's level (1..7), quotas, and usage over the fairness window."""

    name: str
    level: int
    quota_gpus: Mapping[str, int]
    """GPU type to slots; an absent type is a quota of 0."""
    quota_cpus_milli: int | None
    """None: no limit on CPUs."""
    window_share: float
    """The tenant's contested use of its quota of GPUs or of CPUs, whichever share is larger, averaged over the window
    (`gms.contested_use`)."""
    user_shares: Mapping[str, float] = field(default_factory=dict)
    """The same share of the fleet of each person who used any of it for the tenant; contested or not."""


@dataclass(frozen=True)
class QueuedWorkload:
    """A pending workload, as input of a scan."""

    id: str
    tenant: str
    submitted_at_s: float
    """The start of the waiting time: the submission, plus the time on hold. Preemptions do not change it."""
    jobs: tuple[JobRequest, ...]
    requested_level: int | None = None
    """A level below (numerically above) the tenant's, if the user requested one."""
    held: bool = False
    user: str = ""
    """The person who submitted it: that of an API key or its id, or `oidc:` and the subject of a token."""
    gpu_s: float = inf
    """The GPU seconds that it will use at most (`gpu_seconds`); infinity: not known."""


def gpu_seconds(jobs: Iterable[JobRequest], max_runtime_s: float) -> float:
    """Returns the GPU seconds of a gang that runs for `max_runtime_s`. At least one GPU is counted."""
    return max_runtime_s * max(1, sum(job.gpus for job in jobs))


@dataclass(frozen=True)
class PlacedWorkload:
    """A workload that holds resources, as input of a scan."""

    id: str
    tenant: str
    awarded_at_s: float
    gpus: Mapping[str, int]
    cpus_milli: int
    requested_level: int | None = None


@dataclass(frozen=True)
class CreditWeights:
    """The constants of expressions 10 and 11 of MAST, and of the order of the people of a tenant."""

    w_age: float
    """Credit per second of age."""
    age_cap_s: float
    w_fair: float
    w_user: float = 0.0
    w_short: float = 0.0


@dataclass(frozen=True)
class QueueSnapshot:
    """The input of a GMS scan: a consistent snapshot at time `now_s`."""

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
    """1..7, or 8..14 if it is over-quota (`domain.priority`)."""
    level: int
    over_quota: bool
    credit: float
    gpu_types: tuple[tuple[str, ...], ...]
    """For each job, the GPU types on which it may be placed; for a within-quota workload, those within the quota."""
    reason: Reason | None
    """Why the workload is over-quota; None: it is within-quota."""
    displaces: tuple[str, ...] = ()
    """Ids of lower-priority placed workloads of the same tenant that become over-quota when this one is awarded."""
    most_tasks: int = 0
    """Of an elastic workload within quota: the most tasks with which it stays within quota. 0: as in its request."""


@dataclass(frozen=True)
class ScanResult:
    """The result of a scan: the queue in order, and the rank of every placed workload."""

    queue: tuple[Ranked, ...]
    placed_ranks: Mapping[str, int]


# --------------------------------------------------------------------------------------------------- RMS (MAST 4.3)


@dataclass(frozen=True)
class MachineState:
    """A machine and its free resources, which no workload holds and which are promised to none."""

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
    """The capacity kind of the cluster. The prices below are also the cluster's, in US dollars an hour per GPU and per
    core."""
    gpu_usd_per_h: float = 0.0
    core_usd_per_h: float = 0.0
    departures_per_h: float = 0.0
    """How often the owner of a machine of the cluster takes it back without notice."""
    zone: str = ""
    """The zone of the cluster; empty: unknown."""
    pool: str = ""
    """Its pool, if only some tenants may use it; `capacity` then says which pool. Empty: any tenant."""

    @property
    def dynamic_cluster(self) -> str:
        """The name of the machines that a job may use together: those of one cluster that the same tenants may use."""
        return f"{self.cluster}@{self.pool}" if self.pool else self.cluster


@dataclass(frozen=True)
class Holding:
    """The resources that one workload holds on one machine."""

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
    """None: the workload has reported no checkpoint, and the cluster's typical value is assumed."""
    evictable: bool = True
    """False: the workload is not running yet, or is already being evicted."""
    protected_until_s: float = -inf
    """End of the minimum runtime; the workload cannot be evicted before this time."""
    attempt: int = 0
    """Number of the running attempt; a plan evicts this attempt and no later one."""
    ends_by_s: float = inf
    """When the maximum runtime ends; infinity: the workload has none."""
    lost_s: float | None = None
    """The work that an eviction loses, if it does not grow with time: the cold start of a replica that serves. None:
    the work since the last checkpoint."""
    group: str | None = None
    """The group of workloads that are spread (`SpreadRule.group`); None: it belongs to none."""
    tenant: str = ""
    """Empty: unknown."""

    @property
    def gpus(self) -> int:
        """GPU slots that the workload holds in the region."""
        return sum(h.gpus for h in self.holdings)


@dataclass(frozen=True)
class RegionSnapshot:
    """A snapshot of a region's schedulable machines and running workloads."""

    region: str
    now_s: float
    machines: tuple[MachineState, ...]
    running: tuple[RunningWorkload, ...]


@dataclass(frozen=True)
class PlacementRequest:
    """A workload for which a region is asked to make a plan."""

    workload: str
    rank: int
    jobs: tuple[JobRequest, ...]
    may_not_evict: frozenset[str] = frozenset()
    """Workloads that evicted this one, directly or through others, since the queue last changed from outside
    (`gms.auction.immunity`)."""
    displaces: frozenset[str] = frozenset()
    """Lower-priority workloads of the same tenant that become over-quota when this one is awarded; the plan already
    treats them as over-quota."""
    avoids: frozenset[str] = frozenset()
    """Ids of machines that may not be used: the workload failed there, and no other machine has confirmed that, or
    their isolation is too weak (`too_open`), or they have no container engine (`no_engine`)."""
    avoids_until_s: float = inf
    """When one of the machines on which it failed may be used again."""
    shuns: frozenset[str] = frozenset()
    """Ids of machines that are used only if a plan without them would be worse by a criterion before `move_s`."""
    failed: frozenset[str] = frozenset()
    """Ids of lent machines that lost or did not start the last work that they got (`PlanQuality.doubts`)."""
    untried: frozenset[str] = frozenset()
    """Ids of other lent machines that have not run anything yet."""
    too_open: frozenset[str] = frozenset()
    """Those of the machines in `avoids` whose isolation of tasks is weaker than the workload requires."""
    no_engine: frozenset[str] = frozenset()
    """Those of the machines in `avoids` that have no container engine, which the workload's image needs."""
    spread: SpreadRule | None = None
    """How far it should be from other workloads of its group."""
    too_close: frozenset[str] = frozenset()
    """Those of the machines in `avoids` that are too close to others of its group (`rms.spread`)."""
    tenant: str = ""
    """Empty: unknown."""
    spares: frozenset[str] = frozenset()
    """Those of the workloads in `may_not_evict` that are its own tenant's (`rms.own_tenant`)."""

    @property
    def left_out(self) -> tuple[frozenset[str], ...]:
        """Groups of machines that a plan should avoid: for each, in this order, a plan without the group is tried.

        The plan without the group is used unless it is worse by a criterion before `move_s`.
        """
        return self.failed, self.untried, self.shuns


@dataclass(frozen=True)
class JobPlacement:
    """The placement of one job: `machines` is a list of (machine id, number of tasks), sorted by machine id."""

    job: str
    cluster: str
    """Name of the cluster; if the tasks span several clusters, their names joined by `+`."""
    gpu_type: str | None
    machines: tuple[tuple[str, int], ...]

    @property
    def tasks(self) -> int:
        """The number of tasks."""
        return sum(count for _, count in self.machines)


@dataclass(frozen=True)
class Plan:
    """A region's plan for a whole gang. A plan reserves nothing; the award checks and commits it."""

    workload: str
    region: str
    jobs: tuple[JobPlacement, ...]
    victims: tuple[str, ...]
    quality: PlanQuality

    @property
    def key(self) -> tuple[object, ...]:
        """Sort key that orders all plans for one workload: all criteria, then region and machine ids."""
        return (*self.quality.key, self.region, tuple(m for job in self.jobs for m in job.machines))

    def uses(self, machines: Collection[str]) -> bool:
        """Returns whether the plan uses any of these machines."""
        return any(machine in machines for job in self.jobs for machine, _ in job.machines)

    def doubted(self, request: PlacementRequest) -> "Plan":
        """Returns the plan with its criterion `doubts`, which depends on what the request says about machines."""
        if not request.failed and not request.untried:
            return self
        used = {machine for job in self.jobs for machine, _ in job.machines}
        doubts = 2 * len(used & request.failed) + len(used & request.untried)
        return replace(self, quality=replace(self.quality, doubts=doubts))


@dataclass(frozen=True)
class Bid:
    """A region's answer for one workload: a plan, or the reasons why there is none."""

    __pydantic_config__ = JSON_CONFIG

    workload: str
    region: str
    plan: Plan | None
    reasons: tuple[Reason, ...] = field(default=())
    victim_attempts: Mapping[str, int] = field(default_factory=dict)
    """Victim to the number of its attempt; the award evicts only these attempts."""
    lasting: bool = False
    """True for a refusal that holds for the rest of the pass: one job does not fit even on its own."""
    retry_at_s: float = inf
    """For a refusal, the earliest time at which it may change although nothing happens until then: the end of a minimum
    runtime, for example. Infinity: it changes only after an event."""
