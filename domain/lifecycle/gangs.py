"""How the gang of an attempt ended, as reported by the agents of its machines."""

from dataclasses import dataclass, field

from domain.reasons import Reason
from domain.task_reports import DiskReport, NotReadyReport, TaskProgress


@dataclass(frozen=True)
class LaunchFailure:
    """Why a gang could not be started."""

    reason: Reason
    blames_machine: str | None
    blames_workload: bool = False
    """Whether the workload is at fault: no other machine could start it either."""
    lent: str | None = None
    """The machine that reports the failure, if its owner lends it and no other machine of the gang reports that the
    workload is at fault; else None."""
    timed_out: bool = False
    """Whether the blamed machine, which its owner lends, has neither prepared the tasks in time nor refused them. It is
    treated as lost: it may not answer to a stop either."""


@dataclass(frozen=True)
class TaskFailure:
    """A task that failed by itself."""

    name: str
    status: str
    memory: dict[str, int] | None = None
    """The memory limit and the peak in bytes, if the task ran out of memory."""
    in_setup: bool = False
    """Whether the task ended before its setup had succeeded."""
    not_ready: NotReadyReport | None = None
    """Set if the agent stopped the task because it did not become ready in time."""
    disk: DiskReport | None = None
    """Set if the agent stopped the task because its attempt had used up its share of the disk."""
    machine: str | None = None
    """The machine that reported it."""
    restarts: int = 0
    """How often the task was started again alone before, as far as that counts for the limit of this failure."""


@dataclass
class GangEnd:
    """How a gang ended."""

    all_succeeded: bool
    lost_machine: str | None
    first_failure: TaskFailure
    refused: LaunchFailure | None = None
    """A machine refused to run its tasks, and no task failed by itself."""
    stopped_before: bool = False
    """An agent refused the gang because an earlier workflow had stopped it, and no task failed by itself."""
    failed: bool = False
    """A task failed by itself, not because it was stopped."""
    reported: bool = False
    """A task has reported a step or a checkpoint, or has ended by itself."""
    noticed: Reason | None = None
    """The platform's notice that it reclaims one of the gang's machines."""
    progress: tuple[TaskProgress, ...] = field(default=())
