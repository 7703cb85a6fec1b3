"""What becomes of each workload, by the table of steps that live workflows follow, and what the queue hears of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from domain.phases import Phase
from domain.scheduling import PlacedWorkload, PlacementRequest, Plan, QueuedWorkload
from gms.columns import QueueChange
from lifecycle.attempts import END_PHASES, LATEST, TABLES, End, Event, Step
from simulation.engine import id_of
from simulation.workloads import Workload

_TABLE = TABLES[LATEST]
_AT_ONCE = frozenset({Step.STAGE, Step.AWAIT_SAVES, Step.COPY})
"""Steps that take no time here: what they take is part of the provisioning delay."""


@dataclass
class WorkloadState:
    """One workload as it is now. Times are seconds on the simulation's clock."""

    number: int
    workload: Workload
    phase: Phase | None = None
    """None: it was not submitted yet."""
    step: Step | None = None
    """Of its present attempt; None: it has none."""
    place: str | None = None
    """The region (or cluster) that it is bound to, or is in."""
    only: frozenset[str] | None = None
    """Places that may hold it; None: all."""
    attempt: int = 0
    turn: int = 0
    """Another number for each wait and each attempt: an event about an older one is about nothing."""
    waits_since_s: float = 0.0
    """Submission, or the notice of its last eviction."""
    judged: bool = False
    """Whether this wait was judged by its objective."""
    idle_since_s: float = 0.0
    """Submission, or the notice that ended its last work: since when its user has waited for it to work.

    -inf: it held its place when the simulation began, and that wait is not counted.
    """
    start_judged: bool = False
    """Whether that wait was judged."""
    awarded_at_s: float = -inf
    ready_at_s: float = -inf
    started_at_s: float = -inf
    done_s: float = 0.0
    """Work that is safe: done before this attempt."""
    gpus: dict[str, int] = field(default_factory=dict)
    """GPU type to slots that it was awarded."""
    victims: set[int] = field(default_factory=set)
    """Those that still hold some of its slots."""
    evictor: int | None = None

    def take(self, step: Step) -> None:
        """Begins a step of an attempt."""
        while step in _AT_ONCE:
            following = _TABLE[step].after[Event.DONE]
            assert isinstance(following, Step)
            step = following
        self.step, self.phase = step, _TABLE[step].phase or self.phase

    def go_on(self, event: Event) -> None:
        """Begins the step that follows from how the present one went.

        Raises:
            ValueError: by the table the attempt ends there.
        """
        following = self._after(event)
        if isinstance(following, End):
            raise ValueError(f"workload {self.id}: an attempt ends with {event} of {self.step}")
        self.take(following)

    def end(self, phase: Phase) -> None:
        """Ends the attempt after its present step; `phase` is what follows.

        Raises:
            ValueError: by the table it does not end there, or not so.
        """
        following = self._after(Event.DONE)
        if not isinstance(following, End) or phase not in END_PHASES[following]:
            raise ValueError(f"workload {self.id}: {phase} does not follow from {self.step}")
        self.step, self.phase = None, phase

    def _after(self, event: Event) -> Step | End:
        assert self.step is not None
        return _TABLE[self.step].after[event]

    @property
    def id(self) -> str:
        """Its id in the decision packages."""
        return id_of(self.number)

    def remaining_s(self) -> float:
        """Work that is left at the start of an attempt."""
        return max(0.0, self.workload.duration_s - self.done_s)

    def queued(self, now: bool) -> QueueChange[QueuedWorkload]:
        """News for the queue: it waits, or no more."""
        w = self.workload
        value = QueuedWorkload(self.id, w.tenant, w.submit_s, w.jobs, w.level) if now else None
        return QueueChange(w.submit_s, self.id, value)

    def placed(self, now: bool) -> QueueChange[PlacedWorkload]:
        """News for the queue: it counts as placed, or no more."""
        w = self.workload
        cpus = sum(job.cpus_milli for job in w.jobs)
        value = PlacedWorkload(self.id, w.tenant, self.awarded_at_s, self.gpus, cpus, w.level) if now else None
        return QueueChange(self.awarded_at_s, self.id, value)


def gpus_of(plan: Plan, request: PlacementRequest) -> dict[str, int]:
    """GPU type to slots that a plan takes."""
    out: dict[str, int] = {}
    for placement, job in zip(plan.jobs, request.jobs, strict=True):
        if placement.gpu_type is not None and job.gpus:
            out[placement.gpu_type] = out.get(placement.gpu_type, 0) + job.gpus
    return out


def types_asked(workload: Workload) -> dict[str, int]:
    """GPU type to slots that a queued workload asks for: of each type that a job may run on, all the job's slots."""
    out: dict[str, int] = {}
    for job in workload.jobs:
        for gpu_type in job.gpu_types if job.gpus else ():
            out[gpu_type] = out.get(gpu_type, 0) + job.gpus
    return out


def numbered(workloads: Iterable[Workload]) -> list[WorkloadState]:
    """Lives in the order of (submission, id)."""
    ordered = sorted(workloads, key=lambda w: (w.submit_s, w.id))
    return [WorkloadState(number, workload) for number, workload in enumerate(ordered)]
