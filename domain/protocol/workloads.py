"""Input of a workload's workflow, and the messages that it sends to activities."""

from dataclasses import dataclass, field
from typing import Any

from domain.protocol.leases import ElementResult
from domain.protocol.workload_messages import WorkloadMessage
from domain.reasons import Reason, ReasonCode
from domain.task_reports import TaskProgress


@dataclass
class WorkloadInput:
    """State of a workload's workflow, passed on by `continue_as_new`."""

    workload_id: str
    attempt: int = 0
    """Number of the last awarded attempt; it is the fencing token of the attempt's tasks."""
    placed: bool = False
    """True: this workflow replaces a lost one, and `attempt` may still hold slots and run tasks."""
    ready: bool = False
    """With `placed`: the attempt holds all its slots."""
    stopping: bool = False
    """With `placed`: the attempt's tasks have already received the notice to save and stop."""
    failures: int = 0
    """Number of failures of the user's tasks so far."""
    by_exit: dict[str, int] = field(default_factory=dict)
    """Like `failures`, but by exit status (`domain.lifecycle.retry_limits.exit_status`)."""
    preemptions: int = 0
    """Number of attempts that ended by a preemption."""
    losses: int = 0
    """Number of attempts that ended by the loss of a machine."""
    max_preemptions: int | None = None
    max_losses: int | None = None
    """Limits of these numbers (`domain.spec.LimitsSpec`)."""
    hangs: int = 0
    """Number of consecutive attempts that hung."""
    unloadable: int = 0
    """Number of consecutive attempts whose checkpoint could not be loaded; attempts that ended before loading do not
    count."""
    ran_s: float = 0.0
    """Seconds of running in all earlier attempts."""
    refusals: int = 0
    """Number of consecutive launches that failed for a reason other than the workload itself."""
    suspects: list[str] = field(default_factory=list)
    """`domain.lifecycle.suspicion.Suspicion.machines`."""
    unconfirmed: int = 0
    """`domain.lifecycle.suspicion.Suspicion.attempts`."""
    stops: int = 0
    """Number of attempts that an agent said to have stopped before, since tasks last ran to another end."""
    table: int = 1
    """Version of the table of steps (`domain.lifecycle.attempts.TABLES`) that the workflow follows to its end."""
    one_attempt: bool = False
    """True: the workload is not queued again. Whatever ends its attempt ends the workload."""
    brings_image: bool = False
    """Whether tasks run in an image: agents fetch it while the victims of the attempt still save."""
    held_on: list[str] = field(default_factory=list)
    """Machines of earlier attempts that may hold checkpoints in memory (`LaunchPlan.holds_memory`), sorted."""
    mails: list[WorkloadMessage] = field(default_factory=list)
    """Messages that are not handled yet."""
    seen_mail: list[int] = field(default_factory=list)
    """Ids of the latest messages, to detect duplicates."""


@dataclass
class TransitionRequest:
    """Request to change a workload's phase and record the event. Idempotent by (workload, attempt, phase).

    The response is False, and nothing was changed, if a newer attempt has been awarded.
    """

    workload_id: str
    attempt: int
    phase: str
    reason: dict[str, Any]
    provisioning: dict[str, Any] | None = None
    """With phase `running`: the reason of the phase `provisioning`. The transaction enters that phase first and records
    the checkpoint's region."""
    launch_s: float | None = None
    """With phase `running`: how long the machines took to prepare the tasks, in seconds; None: they did not."""


@dataclass
class StageRequest:
    """Request to write an attempt's launch description to its region's bucket."""

    workload_id: str
    attempt: int
    winds_up: bool = False
    """True: return only the plan and write nothing. The workflow uses the plan to stop tasks that an attempt, possibly
    a released one, left running."""
    may_run: bool = False
    """True: nothing but the staging delays the tasks, so the workload enters `running` with it if
    `LaunchPlan.starts_at_once`."""


@dataclass
class NodeLaunch:
    """One machine's share of an attempt."""

    machine: str
    leads_jobs: list[str]
    """Jobs whose task 0 runs on this machine: their rendezvous ports are reserved here."""
    tasks: dict[str, list[int]]
    """The indices of the tasks on this machine, by job: it reports only these."""
    lent: bool = False
    """The machine is lent by its owner, so what it reports about the workload must be confirmed
    (`domain.lifecycle.suspicion`)."""


@dataclass
class LaunchPlan:
    """The result of `launch.stage`: the machines of the attempt, and the limits that the workflow enforces."""

    region: str
    bucket_url: str
    launch_key: str
    """Empty if the request was only for stopping leftover tasks (`StageRequest.winds_up`)."""
    nodes: list[NodeLaunch]
    tasks: int
    checkpoint_region: str | None
    """Region of the newest checkpoint; None: there was no earlier attempt."""
    grace_s: float
    max_runtime_s: float | None
    retries: int | None
    heartbeat_timeout_s: float
    node_lost_after_s: float
    """Timeout for an agent to accept the work of its node; after it, the machine counts as lost."""
    launch_sha256: str = ""
    """SHA-256 of the launch description, in hex; agents refuse other documents. Empty if `launch_key` is empty."""
    starts_at_once: bool = False
    """True: the attempt has one machine, which fetches only the launch description, so `node.run` also prepares it."""
    is_running: bool = False
    """True: the staging has entered `running` (`StageRequest.may_run`)."""
    drain_s: float | None = None
    """For a workload that serves requests: how long its tasks continue before the notice to stop. They get no new
    requests during that time. None: the workload does not serve."""
    store_url: str | None = None
    """The store of the attempt's cluster, for its checkpoints; None: the region's bucket."""
    checkpoint_store: str | None = None
    """The store of a cluster that has the newest checkpoint; None: the bucket of `checkpoint_region`."""
    launch_limit_s: float | None = None
    """The limit on the preparation on lent machines (`domain.lifecycle.launch_limits`); None: no machine is lent."""
    retries_by_exit: dict[str, int | None] = field(default_factory=dict)
    """Copy of `domain.spec.LimitsSpec.retries_by_exit`."""
    runs_elements: bool = False
    """Whether the workload is a runner, which leases elements of its array."""
    holds_memory: bool = False
    """Whether the machines may hold checkpoints in memory for the next attempt (`agent.memory_servers`)."""

    @property
    def needs_copy(self) -> bool:
        """Whether the newest checkpoint is in another store than the attempt's."""
        if self.checkpoint_region is None:
            return False
        same_store = self.checkpoint_store == self.store_url
        return not same_store or (self.checkpoint_region != self.region and self.checkpoint_store is None)

    @property
    def runs_once_staged(self) -> bool:
        """Whether nothing but the staging delays the tasks."""
        return self.starts_at_once and not self.needs_copy

    @property
    def starting(self) -> Reason:
        """The reason of the phase `provisioning`."""
        return Reason(ReasonCode.STARTING_TASKS, {"tasks": self.tasks, "machines": len(self.nodes)})


@dataclass
class CheckpointCopy:
    """Request to copy a workload's checkpoints to another store and fence them at the source."""

    workload_id: str
    attempt: int
    source_region: str
    target_region: str
    source_store: str | None = None
    """URL of a cluster's store; None: the bucket of `source_region`."""
    target_store: str | None = None
    """URL of a cluster's store; None: the bucket of `target_region`."""


@dataclass
class ReleaseRequest:
    """Request to end an attempt: its slots go to the workloads that wait for them or become free.

    The reason is recorded. `next_phase` is pending, preempted or a terminal phase. Idempotent by (workload, attempt).
    """

    workload_id: str
    attempt: int
    next_phase: str
    reason: dict[str, Any]
    progress: list[TaskProgress] = field(default_factory=list)
    blames_machine: str | None = None
    """A machine on which tasks failed to start or were lost; the release counts towards the machine's cordon."""
    silent_machines: list[str] = field(default_factory=list)
    """Machines whose agents did not respond, so that tasks may still run there, or on which tasks are still saving."""
    flushing_s: float = 0.0
    """How long tasks on `silent_machines` may continue, to save their last checkpoint."""
    elements: list[ElementResult] = field(default_factory=list)
    """For a runner: the known results of the elements that it has leased. Elements without result wait again."""
    unstarted: bool = False
    """True: the workflow has sent no request to any machine. The release is refused (`TASKS_MAY_RUN`) if Postgres
    records that the tasks were started: Temporal was rolled back, or the workflow replaces a lost one.
    """


TASKS_MAY_RUN = "TasksMayRun"
"""Type of the error that refuses an `unstarted` `ReleaseRequest` whose tasks may have been started."""


@dataclass
class FlushedRequest:
    """Request to record the reports that an attempt's tasks sent after its release, while they were still saving."""

    workload_id: str
    attempt: int
    progress: list[TaskProgress]
