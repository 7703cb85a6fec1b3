"""A workload's life: what its workflow starts from, and the effects that it asks for."""

from dataclasses import dataclass, field
from typing import Any

from domain.protocol.mail import Mail
from domain.reported import TaskProgress


@dataclass
class WorkloadInput:
    """State of a workload's workflow, carried over `continue_as_new`."""

    workload_id: str
    attempt: int = 0
    """Number of the last attempt that was awarded: the fencing number of its tasks."""
    placed: bool = False
    """This workflow replaces one that is gone: `attempt` may still hold slots and run tasks."""
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
    """Attempts in a row whose checkpoint could not be loaded; attempts that ended earlier do not count."""
    ran_s: float = 0.0
    """Seconds of running in all earlier attempts."""
    refusals: int = 0
    """Launches in a row that failed for another reason than the workload itself."""
    table: int = 1
    """Version of the table of steps that it follows (`lifecycle.attempts.TABLES`), from its start on."""
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
    """Empty where the attempt is only wound up."""
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
