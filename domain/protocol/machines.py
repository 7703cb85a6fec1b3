"""Messages between workflows and agents: preparing, running and stopping a gang's tasks, registration and liveness."""

from dataclasses import dataclass, field

from domain.isolation import Isolation
from domain.protocol.leases import ElementResult
from domain.task_reports import BandwidthReport, DiskReport, NoticeReport, NotReadyReport, TaskProgress

DETACHED = "Detached"
"""Type of the error with which an agent ends an activity when the agent stops; the tasks continue without it."""
MAX_RUNS = 1000
"""Maximum number of attempts in a hello."""


@dataclass
class TaskExit:
    """How a task ended. Either `exit_code` or `signal` is set; if the exit status was lost, neither is."""

    job: str
    task: int
    exit_code: int | None = None
    signal: int | None = None
    memory_limit_bytes: int | None = None
    """Set if the kernel killed a process of the task because the task had reached its memory limit."""
    memory_peak_bytes: int | None = None
    in_setup: bool = False
    """Whether the task ended before its setup had succeeded, so that its command never ran."""
    not_ready: NotReadyReport | None = None
    """Set if the agent stopped the task because it did not become ready in time."""
    disk: DiskReport | None = None
    """Set if the agent stopped the task because its attempt had used up its share of the disk."""
    restarts: int = 0
    """How often the task was started again alone before, as far as that counts for the limit of this end."""

    @property
    def succeeded(self) -> bool:
        """Whether the task ended by itself with exit code 0, after its setup."""
        return self.exit_code == 0 and not self.in_setup and self.not_ready is None and self.disk is None

    @property
    def status(self) -> str:
        """`exit code 3`, `signal 9`, or `an unknown status`."""
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        return f"signal {self.signal}" if self.signal is not None else "an unknown status"


@dataclass
class PrepareNode:
    """Request to an agent to fetch the launch description, unpack files and reserve rendezvous ports."""

    workload_id: str
    attempt: int
    machine: str
    launch_key: str
    bucket_url: str
    leads_jobs: list[str]
    """Jobs whose task 0 runs on this machine: the agent reserves a rendezvous port for each."""
    launch_sha256: str
    """`LaunchPlan.launch_sha256`."""
    only_images: bool = False
    """Only fetch the images of the tasks: the attempt does not hold its slots yet."""


@dataclass
class NodePrepared:
    """The agent's response: an address that its peers can connect to, and a port for each job in `leads_jobs`."""

    machine: str
    address: str
    ports: dict[str, int]


@dataclass
class RunNode:
    """Request to an agent to run its tasks of an attempt until they end: one long-running activity per node."""

    workload_id: str
    attempt: int
    machine: str
    launch_key: str
    bucket_url: str
    masters: dict[str, str]
    """Job to `address:port` of its rendezvous."""
    launch_sha256: str
    """`LaunchPlan.launch_sha256`."""
    leads_jobs: list[str] | None = None
    """If the node was not prepared before: the jobs for which this activity reserves a port. None: it was prepared."""


@dataclass
class NodeHeartbeat:
    """Heartbeat details of `node.run`, and of `node.prepare`."""

    progress: list[TaskProgress]
    running: int
    bandwidth: BandwidthReport | None = None
    """What the agent has measured for the machine; None: nothing yet."""
    preparing: str = ""
    """What the start of the tasks waits for on this machine, with its progress, for people."""


@dataclass
class NodeOutcome:
    """How a node's tasks ended. `stopped`: the agent received a request to stop them before all had ended.

    As soon as one task fails, the agent stops the other tasks of its node and returns; the workflow stops the other
    nodes.
    """

    machine: str
    exits: list[TaskExit]
    progress: list[TaskProgress]
    stopped: bool = False
    notice: NoticeReport | None = None
    """The platform's notice that it reclaims this machine, if the agent or a task received one."""
    elements: list[ElementResult] = field(default_factory=list)
    """For a runner: the results of the elements of its last chunk."""

    @property
    def succeeded(self) -> bool:
        """Whether all tasks of the node ended by themselves and succeeded."""
        return not self.stopped and bool(self.exits) and all(e.succeeded for e in self.exits)


@dataclass
class StopNode:
    """Request to an agent to stop its tasks of an attempt: SIGTERM, then after `grace_s` SIGKILL to all processes.

    The activity returns when no process of the tasks runs any more. From then on the agent refuses attempts up to
    `attempt`.
    """

    workload_id: str
    attempt: int
    grace_s: float
    ends: bool = False
    """Whether the workload has ended, so that nothing of it is needed on the machine any more."""


@dataclass
class GpuFault:
    """An error of a GPU after which its machine should take no new work until an operator has looked at it."""

    slot: int
    gpu: str
    """Its UUID."""
    error: str
    """`Xid 79: has fallen off the bus`, or that it has uncorrectable ECC errors."""
    at_s: float
    """When the agent noticed it, by the machine's clock, in seconds since the epoch."""


@dataclass
class Hello:
    """An agent's registration: a signal to the machine's workflow, sent at each start and until `Attend` runs."""

    machine: str
    region: str
    cluster: str
    rack: str
    gpu_type: str | None
    gpus: int
    cpus_milli: int
    memory_bytes: int
    address: str
    incarnation: str
    """Identifies a boot of the machine: new at each boot, unchanged when only the agent restarts."""
    public_key: str
    """X25519 public key in base64. Secrets of the machine's tasks are sealed for it."""
    runs: list[str] = field(default_factory=list)
    """Attempts that still run on the machine, each as `workload.attempt`; at most `MAX_RUNS`."""
    key_proof: str = ""
    """Response to `Welcome.challenge`, if the machine also holds the pinned key."""
    instance: str = ""
    """Id of the machine's instance; empty: the machine was not launched by a provider."""
    join_token: str = ""
    """Token that was passed at the launch; it proves that the machine is this instance."""
    native_id: str = ""
    """The provider's id of the machine, such as a job's number, if the machine knows it."""
    at_s: float = 0.0
    """When the agent said this, by its own clock, in seconds since the epoch."""
    taken: bool = False
    """Whether the owner has taken the whole machine back, now or from an announced time."""
    withheld: int = 0
    """Mask of the GPU slots that the owner has taken back while the rest of the machine is lent."""
    isolation: str = Isolation.NONE.value
    """How tasks on the machine are separated (`domain.isolation`)."""
    isolation_why: str = ""
    """Why the mode is not a stronger one; empty: it is the strongest, or was set."""
    engine: str = ""
    """Kind and version of the machine's container engine, for jobs with an image; empty: it has none."""
    word_at_s: float = 0.0
    """When the owner last lent or took back resources, according to the agent's record, by the machine's clock, in
    seconds since the epoch. 0: the record has no entry, for example because the machine was set up again."""
    gpu_fault: GpuFault | None = None
    """The last fault of a GPU since the boot."""
    unfreed: int = 0
    """Mask of the GPU slots whose memory was not freed at the end of an attempt."""


@dataclass
class Welcome:
    """Response to `Hello`. `stop` lists runs that must not continue; the agent stops them before it is ready."""

    stop: list[str]
    heartbeat_timeout_s: float
    lost_after_s: float = 30.0
    refused: bool = False
    """True: the machine was not registered: another key is pinned for it, or its instance is not admitted."""
    challenge: str | None = None
    """If refused: a sealed box for the pinned key, in base64, for the agent to open (`Activity.PROVE_KEY`)."""
    unknown: bool = False
    """If refused: whether no machine of this name is registered, so that its workflow has nothing to do."""


@dataclass
class ProveKey:
    """Request to an agent to prove that, besides its current key, it also holds the machine's pinned key."""

    machine: str
    challenge: str


@dataclass
class MachineNotice:
    """An agent's report that a platform reclaims its machine, sent repeatedly to the machine's workflow as a signal."""

    machine: str
    incarnation: str
    notice: NoticeReport
    run: str | None = None
    """`workload.attempt` of the task that received the notice, which then concerns only this attempt; None: the agent
    received it, and it concerns the machine."""


@dataclass
class RunPace:
    """How often the tasks of a run should save."""

    run: str
    """`workload.attempt`."""
    interval_s: float
    hazard_per_h: float
    """Expected interruptions of the gang per hour."""
    period_s: float
    """Saves begin `offset_s` after a multiple of this period, so that those of a site do not begin together."""
    offset_s: float
    reason: str = ""
    """What determined the interval (`reclaim.intervals.IntervalReason`)."""
    least_s: float = 0.0
    """The task's own formula may shorten the interval, but not below this limit, which the bandwidth sets."""


@dataclass
class Pace:
    """How often the tasks on a machine should save, until `expires_at_s` (seconds since the epoch)."""

    machine: str
    expires_at_s: float
    runs: list[RunPace]


@dataclass
class Attend:
    """Request to an agent to stop the runs in `stop` and then to send heartbeats, which detect a lost machine."""

    machine: str
    incarnation: str
    stop: list[str]
