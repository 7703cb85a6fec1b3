"""The state of jobs and machines in a run."""

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from research.reclaim.network import Flow
from research.reclaim.records import Hit

NOWHERE = -1
STALL_SHARE = 0.09
"""The share of a local write for which a background save stalls training, as measured by mizzen's bench."""


class JobPhase(Enum):
    """The phase of a job."""

    FUTURE = 0
    WAITING = 1
    """In the queue, without a machine."""
    LOADING = 2
    """Its checkpoint is transferred to its machine, or it restarts there."""
    RUNNING = 3
    MOVING = 4
    """Stopped at its machine, while its final checkpoint is transferred to the next."""
    DONE = 5


@dataclass(eq=False)
class Job:
    """A job. `progress_s` is work that was computed up to `since_s`."""

    number: int
    gpus: int
    work_s: float
    checkpoint_bytes: float
    memory_bytes: float
    phase: JobPhase = JobPhase.FUTURE
    node: int = NOWHERE
    target: int = NOWHERE
    """The machine whose GPUs are reserved for a planned move."""
    progress_s: float = 0.0
    since_s: float = 0.0
    segment_s: float = 0.0
    """When the job began to hold its GPUs in the current phase..."""
    segment_progress_s: float = 0.0
    """...and its progress then."""
    stalled_s: float = 0.0
    """The time in which checkpoints stalled it since then."""
    saved_s: float = 0.0
    """The work in the newest complete checkpoint..."""
    saved_at: int = NOWHERE
    """...and the building that has it."""
    last_save_s: float = 0.0
    interval_s: float = inf
    started_s: float = 0.0
    """When its attempt began to run."""
    mtbf_s: float = inf
    """The mean time between interruptions that its SDK was told at the start of the attempt."""
    has_saved: bool = False
    """Whether the attempt has completed a checkpoint."""
    most_s: float = inf
    """The interval that P1 has told the attempt..."""
    least_s: float = 0.0
    """...and the shortest one that leaves others their bandwidth."""
    version: int = 0
    """Changes with each start and stop, so that outdated events are ignored."""
    save_version: int = 0
    write: Flow | None = None
    move: Flow | None = None
    hit: Hit | None = None
    """The departure from which the job has not resumed."""
    stopped_s: float = 0.0
    """When it stopped for its last move."""
    eligible_s: float = 0.0
    """Before, it may not start."""
    home: int = NOWHERE
    """The only machine on which it may run, without migration."""
    moved_s: list[float] = field(default_factory=list)

    def stall_s(self, write_bytes_s: float) -> float:
        """Returns how long a save stalls the job, from the speed of a local write."""
        return STALL_SHARE * self.checkpoint_bytes / write_bytes_s

    def progress(self, now_s: float, slowdown: float) -> float:
        """Returns the work that is computed by now."""
        if self.phase is not JobPhase.RUNNING:
            return self.progress_s
        return min(self.work_s, self.progress_s + max(0.0, now_s - self.since_s) / (1 + slowdown))

    def advance(self, now_s: float, slowdown: float) -> None:
        """Adds to `progress_s` the work that was computed until now."""
        self.progress_s, self.since_s = self.progress(now_s, slowdown), max(self.since_s, now_s)


@dataclass(eq=False)
class Node:
    """The state of a machine in a run."""

    number: int
    building: int
    gpus: int
    memory_bytes: float
    is_controlled: bool
    free: int
    is_lent: bool = False
    leaves_s: float = inf
    """When it leaves, if its owner has said so."""
    jobs: set[int] = field(default_factory=set)
    """Jobs that hold or have reserved GPUs."""

    def takes(self, job: Job) -> bool:
        """Returns whether a job can start here."""
        return self.is_lent and self.leaves_s == inf and self.free >= job.gpus and self.memory_bytes >= job.memory_bytes
