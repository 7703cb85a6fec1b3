"""Messages between workflows, activities, agents and the outbox: names and payloads.

Payloads are references and small facts. A plan, a snapshot or a specification never travels through Temporal's
history; neither does a secret.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from domain.reported import NoticeReport, TaskProgress

# ------------------------------------------------------------------------------------------------ mail to workflows


class MailKind(StrEnum):
    """What can be told to a workload's workflow. Each is an outbox row first and a Temporal signal after."""

    AWARDED = "awarded"
    SLOTS_READY = "slots_ready"
    EVICT = "evict"
    CANCEL = "cancel"
    PREEMPT = "preempt"
    MACHINE_LOST = "machine_lost"
    HUNG = "hung"


@dataclass
class Mail:
    """One message to a workload's workflow. Delivered at least once; `id` tells a repetition."""

    id: int
    kind: str
    attempt: int
    """The attempt that it is about; an older one is ignored. 0: whichever it is now."""
    detail: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------------- workload life


@dataclass
class WorkloadInput:
    """State of a workload's workflow, carried over `continue_as_new`."""

    workload_id: str
    attempt: int = 0
    """Number of the last attempt that was awarded: the fencing number of its tasks."""
    placed: bool = False
    """Started anew for a workload whose earlier workflow is gone: `attempt` may still hold slots and run tasks."""
    ready: bool = False
    """With `placed`: the attempt holds all its slots."""
    stopping: bool = False
    """With `placed`: the attempt's tasks were told to save and stop."""
    takes_over: bool = False
    """With `placed`: it goes on with the attempt. Workflows of before this field ask a patch."""
    failures: int = 0
    """Failures of the user's own so far."""
    hangs: int = 0
    """Attempts in a row that hung."""
    unloadable: int = 0
    """Attempts in a row whose checkpoint could not be loaded; those that did not come so far are passed over."""
    ran_s: float = 0.0
    """Seconds of running in all earlier attempts."""
    refusals: int = 0
    """Launches in a row that failed and blamed nobody, or a machine."""
    mails: list[Mail] = field(default_factory=list)
    """Mail that was not dealt with yet."""
    seen_mail: list[int] = field(default_factory=list)
    """Ids of the last mails, to know a repetition."""


@dataclass
class TransitionRequest:
    """Asks for a phase change with its event. Idempotent by (workload, attempt, phase).

    The answer is False where a newer attempt was awarded meanwhile: nothing was changed then.
    """

    workload_id: str
    attempt: int
    phase: str
    reason: dict[str, Any]
    provisioning: dict[str, Any] | None = None
    """With `running`: the reason of `provisioning`, which comes first in the same transaction, with the checkpoint's
    region."""


@dataclass
class StageRequest:
    """Asks for an attempt's launch description to be written to its region's bucket."""

    workload_id: str
    attempt: int
    winds_up: bool = False
    """Only the plan is wanted, to stop what an attempt, maybe a released one, left running: nothing is written."""


@dataclass
class NodeLaunch:
    """One machine's share of an attempt."""

    machine: str
    leads_jobs: list[str]
    """Jobs whose task 0 is here: their rendezvous ports are reserved here."""


@dataclass
class LaunchPlan:
    """What `launch.stage` found out: where the tasks start, and the limits that the workflow watches."""

    region: str
    bucket_url: str
    launch_key: str
    nodes: list[NodeLaunch]
    tasks: int
    checkpoint_region: str | None
    """Where the newest checkpoint is; None if there was no earlier attempt."""
    grace_s: float
    max_runtime_s: float | None
    retries: int
    heartbeat_timeout_s: float
    node_lost_after_s: float
    """How long a node's work may wait for its agent before the machine counts as lost."""
    launch_sha256: str | None = None
    """SHA-256 of the launch description, in hexadecimal: agents refuse another one. None: of an earlier version."""
    starts_at_once: bool = False
    """One machine, which has nothing to fetch but the launch description: preparing is part of running."""


@dataclass
class CheckpointCopy:
    """Asks for a workload's checkpoints to be brought to another region's bucket, and fenced at the source."""

    workload_id: str
    attempt: int
    source_region: str
    target_region: str


@dataclass
class ReleaseRequest:
    """Ends an attempt: its slots go to their successors or become free, and it is recorded why.

    `next_phase` is pending, preempted or a terminal phase. Idempotent by (workload, attempt).
    """

    workload_id: str
    attempt: int
    next_phase: str
    reason: dict[str, Any]
    progress: list[TaskProgress] = field(default_factory=list)
    blames_machine: str | None = None
    """A machine on which tasks could not be started or were lost: counts towards its cordon."""
    silent_machines: list[str] = field(default_factory=list)
    """Those whose agents could not be asked whether anything still runs there, or where tasks still save."""
    flushing_s: float = 0.0
    """How long tasks on silent machines may go on to save their last checkpoint."""
    unstarted: bool = False
    """The workflow has asked no machine for anything. Refused (`TASKS_MAY_RUN`) where Postgres says that its tasks were
    started: Temporal was rolled back since, or the workflow replaces one that is gone.
    """


TASKS_MAY_RUN = "TasksMayRun"
"""Type of the error with which a `ReleaseRequest` is refused that is `unstarted`."""


@dataclass
class FlushedRequest:
    """Records what tasks of an attempt reported after its release: it was given up while they saved."""

    workload_id: str
    attempt: int
    progress: list[TaskProgress]


# -------------------------------------------------------------------------------------------------------- scheduling


@dataclass
class ScanTicket:
    """What a scan pass found: how long the queue is, and whom to ask for bids.

    The order itself stays with the process that scanned: a batch of it is named by the place where it begins.
    """

    scan: int
    workloads: list[str] = field(default_factory=list)
    """The whole queue: only in histories of before there was `queued`."""
    regions: list[str] = field(default_factory=list)
    """Those to be asked. A region whose RMS is the process that scanned bids when it awards."""
    batch: int = 1
    bid_timeout_s: float = 30.0
    """How long the pass waits for the bids of `regions` on a batch."""
    interval_s: float = 300.0
    queued: int = 0
    """Workloads in the queue, held ones not among them."""
    probed: list[str] = field(default_factory=list)
    """Silent regions that are asked again in this pass, which does not wait for them."""
    probe_timeout_s: float = 30.0
    silent: list[str] = field(default_factory=list)
    """Silent regions: the pass places nothing there."""
    rest_s: float | None = None
    """The next tick is due this soon; None: after the interval."""


@dataclass
class BidRequest:
    """Asks a region to bid on a batch of a scan's queue, each workload against the same state, which is newer than it.

    The batch is where `scan` put it into Postgres (`infra.db.logs.ScanBatch`).
    """

    region: str
    scan: int
    first: int = 0
    """Where in the queue the batch begins, from 0."""


@dataclass
class AwardRequest:
    """Asks for the plans of a batch to be awarded in queue order."""

    scan: int
    first: int = 0
    unreachable: list[str] = field(default_factory=list)
    waited_s: float = 0.0


@dataclass
class AwardResult:
    """How a batch went: counts."""

    awarded: int
    waiting: int
    rebids: int
    """Plans that an earlier award of the batch, or a change meanwhile, had made stale."""
    over: bool = False
    """There is nothing to go on with: the process that scanned is gone. Another scan has been asked for."""
    rest_s: float | None = None
    """The next tick is due this soon; None: after the interval."""


# ------------------------------------------------------------------------------------------------------------ agents


@dataclass
class TaskExit:
    """How a task ended. Exactly one of `exit_code` and `signal` is set, or neither where its status was lost."""

    job: str
    task: int
    exit_code: int | None = None
    signal: int | None = None
    log_tail: str = ""
    """Of agents of earlier versions only: what tasks print does not travel through Temporal's history."""
    memory_limit_bytes: int | None = None
    """Set where the kernel killed one of its processes because the task had reached its limit of memory."""
    memory_peak_bytes: int | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0

    @property
    def status(self) -> str:
        """`exit code 3`, `signal 9`, or `an unknown status`."""
        if self.exit_code is not None:
            return f"exit code {self.exit_code}"
        return f"signal {self.signal}" if self.signal is not None else "an unknown status"


@dataclass
class PrepareNode:
    """Asks an agent to fetch the launch description, unpack files and reserve a port for each job it leads."""

    workload_id: str
    attempt: int
    machine: str
    launch_key: str
    bucket_url: str
    leads_jobs: list[str]
    launch_sha256: str | None = None
    """`LaunchPlan.launch_sha256`."""


@dataclass
class NodePrepared:
    """The agent's answer: an address that its peers can dial, and a port for each job that it leads."""

    machine: str
    address: str
    ports: dict[str, int]


@dataclass
class RunNode:
    """Asks an agent to run its tasks of an attempt to their end: the one long activity for each node."""

    workload_id: str
    attempt: int
    machine: str
    launch_key: str
    bucket_url: str
    masters: dict[str, str]
    """Job to `address:port` of its rendezvous."""
    launch_sha256: str | None = None
    """`LaunchPlan.launch_sha256`."""
    leads_jobs: list[str] | None = None
    """With nothing prepared before: the jobs for which a port is reserved here."""


@dataclass
class NodeHeartbeat:
    """Heartbeat details of `node.run`."""

    progress: list[TaskProgress]
    running: int


@dataclass
class NodeOutcome:
    """How a node's tasks ended. `stopped` if the agent was told to stop them before they had all ended by themselves.

    As soon as one task fails the agent stops the others of its node and returns; the workflow stops the other nodes.
    """

    machine: str
    exits: list[TaskExit]
    progress: list[TaskProgress]
    stopped: bool = False
    notice: NoticeReport | None = None
    """The platform's word that it takes this machine, heard by the agent or by a task, if there was one."""


@dataclass
class StopNode:
    """Asks an agent to stop its tasks of an attempt: SIGTERM, `grace_s`, SIGKILL to each with all that it started.

    Returns when nothing of them runs. Attempts up to `attempt` are refused from then on.
    """

    workload_id: str
    attempt: int
    grace_s: float


@dataclass
class Hello:
    """An agent's registration: signalled to its machine's workflow at each start, and while nobody attends to it."""

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
    """New at each boot of the machine; an agent that restarts on a running machine keeps it."""
    public_key: str
    """X25519, base64: secrets of its tasks are sealed to it."""
    runs: list[str] = field(default_factory=list)
    """`workload.attempt` of what still runs there."""
    key_proof: str = ""
    """Answer to `Welcome.challenge`, where the machine holds the pinned key too."""


@dataclass
class Welcome:
    """Answer to `Hello`: runs that no longer belong there, which the agent stops before the machine is ready."""

    stop: list[str]
    heartbeat_timeout_s: float
    lost_after_s: float = 30.0
    refused: bool = False
    """The machine is known with another key: nothing was registered."""
    challenge: str | None = None
    """Where refused: base64 of a sealed box for the pinned key, to be opened by the agent (`Activity.PROVE_KEY`)."""


@dataclass
class ProveKey:
    """Asks an agent to show that it holds the key that its machine is known with, beside the one that it has now."""

    machine: str
    challenge: str


@dataclass
class MachineNotice:
    """An agent's word that a platform takes its machine: signalled to its machine's workflow, again and again."""

    machine: str
    incarnation: str
    notice: NoticeReport
    run: str | None = None
    """`workload.attempt` of a task whose word it is, and which it is about; None: the agent's, about the machine."""


@dataclass
class Attend:
    """Asks an agent to stop `stop`, then to heartbeat for as long as it lives: how an idle machine is known alive."""

    machine: str
    incarnation: str
    stop: list[str]


# ----------------------------------------------------------------------------------------------- dry runs and data


@dataclass
class DryRunRequest:
    """Asks what would happen to a workload if it were submitted now. Nothing is written."""

    spec: dict[str, Any]
    """`domain.spec.WorkloadSpec` as JSON."""


@dataclass
class DryRunResult:
    """What would happen: a place with its victims, or each region's reasons why not."""

    admitted: bool
    rank: int
    over_quota: bool
    region: str | None = None
    machines: list[str] = field(default_factory=list)
    victims: list[str] = field(default_factory=list)
    reasons: list[dict[str, Any]] = field(default_factory=list)


NIGHTLY = "nightly"
ON_DEMAND = "on demand"
"""Shares of the bandwidth between regions: of planned moves, and of what a workload or an operator waits for."""


@dataclass
class ReplicateTable:
    """Asks for a complete, verified replica of a table in a region."""

    table: str
    source_region: str
    """The table's home when it was asked for; each partition is copied from the home of its moment."""
    target_region: str
    share: str = ON_DEMAND
    """`ON_DEMAND` or `NIGHTLY`."""


@dataclass
class Scrub:
    """Asks for what is due in a region to be verified."""

    region: str


# -------------------------------------------------------------------------------------------------- activity names


class Activity(StrEnum):
    """Names under which activities are registered: the signature of each is given beside its name."""

    # On the control queue, most of them run as local activities of the workflow's own worker.
    TRANSITION = "workload.transition"  # TransitionRequest -> bool
    RELEASE = "workload.release"  # ReleaseRequest -> None
    FLUSHED = "workload.flushed"  # FlushedRequest -> None
    STAGE = "launch.stage"  # StageRequest -> LaunchPlan
    STAGED_HERE = "launch.staged_here"  # StageRequest -> None: its checkpoints are in its region from now on
    SCAN = "queue.scan"  # -> ScanTicket
    AWARD = "queue.award"  # AwardRequest -> AwardResult
    DRY_RUN = "queue.dry_run"  # DryRunRequest -> DryRunResult
    REGISTER_MACHINE = "machine.register"  # Hello -> Welcome
    MACHINE_READY = "machine.ready"  # Attend -> None
    MACHINE_LOST = "machine.lost"  # Attend -> None
    MACHINE_NOTICED = "machine.noticed"  # MachineNotice -> None
    RECONCILE = "house.reconcile"  # -> float
    COLLECT = "house.collect"  # -> float: seconds until it is due again
    EXPIRE = "house.expire"  # -> float
    REMOVE_REPLICAS = "house.remove_replicas"  # -> float
    OPEN_NIGHT = "night.open"  # NightRef -> NightTicket
    PLAN_NIGHT = "night.plan"  # NightRef -> None
    NEXT_MOVE = "night.next_move"  # NextMove -> MoveOrder
    FINISH_MOVE = "night.finish_move"  # MoveRef -> bool: False if there is more to copy
    NIGHTS_PAUSED = "night.paused"  # -> bool
    ASSIGN_PARTITIONS = "night.assign_partitions"  # NightRef -> None
    END_NIGHT = "night.end"  # NightRef -> None
    # On a region's queue.
    BID = "region.bid"  # BidRequest -> int: plans found
    COPY_CHECKPOINT = "region.copy_checkpoint"  # CheckpointCopy -> int (bytes)
    COPY_TABLE = "region.copy_table"  # ReplicateTable -> int (bytes)
    SCRUB = "region.scrub"  # Scrub -> int: seconds until it is due again
    # On an agent's queue.
    PREPARE_NODE = "node.prepare"  # PrepareNode -> NodePrepared
    RUN_NODE = "node.run"  # RunNode -> NodeOutcome
    STOP_NODE = "node.stop"  # StopNode -> NodeOutcome
    PROVE_KEY = "machine.prove_key"  # ProveKey -> str
    ATTEND = "machine.attend"  # Attend -> None, only ever ends by failure or shutdown
