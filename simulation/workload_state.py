"""The state of each workload. It follows the same step table as live workflows, and produces the queue's changes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from domain.lifecycle.attempts import END_PHASES, LATEST, TABLES, End, Step, StepOutcome
from domain.phases import Phase
from domain.scheduling import (
    Holding,
    JobRequest,
    PlacedWorkload,
    PlacementRequest,
    Plan,
    QueuedWorkload,
    gpu_seconds,
)
from gms.columns import QueueChange
from simulation.engine import id_of
from simulation.workloads import SimulatedWorkload

_TABLE = TABLES[LATEST]
_AT_ONCE = frozenset({Step.STAGE, Step.AWAIT_SAVES, Step.COPY})
"""Steps without a duration of their own in the simulation: their time is part of the provisioning delay."""

BOOKED = "+"
"""Ends the id that holds the place of a booking until its workload has left its old place."""


@dataclass
class WorkloadState:
    """The current state of one workload. Times are seconds on the simulation's clock."""

    number: int
    workload: SimulatedWorkload
    phase: Phase | None = None
    """None: the workload was not submitted yet."""
    step: Step | None = None
    """The step of the present attempt; None: there is no attempt."""
    place: str | None = None
    """The region (or cluster) of the present attempt."""
    only: frozenset[str] | None = None
    """The places that may hold the workload; None: all."""
    attempt: int = 0
    turn: int = 0
    """A counter of waits and attempts: a timed event with an older value is stale."""
    objective_since_s: float = 0.0
    """Start of the wait that its objective limits: the submission, or the notice of the last eviction. The wait that
    counts for credit and reservations is since the submission (`SimulatedWorkload.submit_s`)."""
    judged: bool = False
    """Whether the present wait until the award was judged by its objective."""
    idle_since_s: float = 0.0
    """Start of the wait until the start: the submission, or the notice that ended the last run.

    -inf: the workload held its slots when the simulation began, and that wait is not counted.
    """
    start_judged: bool = False
    """Whether the wait since `idle_since_s` was judged."""
    awarded_at_s: float = -inf
    ready_at_s: float = -inf
    started_at_s: float = -inf
    ran_s: float = 0.0
    """Seconds that its earlier attempts ran, from their starts until their slots were released."""
    done_s: float = 0.0
    """Seconds of work that earlier attempts have saved."""
    gpus: dict[str, int] = field(default_factory=dict)
    """Slots of the award, by GPU type."""
    speed: float = 1.0
    """The tasks of the present attempt divided by the fewest of an elastic job; 1 if it is not elastic."""
    victims: set[int] = field(default_factory=set)
    """Numbers of the evicted workloads that still hold some of the awarded slots."""
    evictor: int | None = None
    booking: tuple[Plan, PlacementRequest] | None = None
    """The place where it continues after its departure; None: it does not move."""
    moved: bool = False
    """Whether the present attempt continues one that was moved."""
    award: tuple[Plan, PlacementRequest] | None = None
    """The plan of the present attempt; None: it has several jobs, and held its slots at the start of the simulation."""
    damaged: bool = False
    """Whether a machine of the present attempt was lost while its tasks ran."""

    def take(self, step: Step) -> None:
        """Enters a step of an attempt; skips the steps without a duration."""
        while step in _AT_ONCE:
            following = _TABLE[step].after[StepOutcome.DONE]
            assert isinstance(following, Step)
            step = following
        self.step, self.phase = step, _TABLE[step].phase or self.phase

    def go_on(self, event: StepOutcome) -> None:
        """Enters the step that follows the present one after an event.

        Raises:
            ValueError: the step table ends the attempt there.
        """
        following = self._after(event)
        if isinstance(following, End):
            raise ValueError(f"workload {self.id}: event {event} of step {self.step} must not end the attempt")
        self.take(following)

    def end(self, phase: Phase) -> None:
        """Ends the attempt after its present step; the workload enters `phase`.

        Raises:
            ValueError: the step table does not end the attempt there, or not with this phase.
        """
        following = self._after(StepOutcome.DONE)
        if not isinstance(following, End) or phase not in END_PHASES[following]:
            raise ValueError(f"workload {self.id}: phase {phase} must not follow step {self.step}")
        self.step, self.phase = None, phase

    def _after(self, event: StepOutcome) -> Step | End:
        assert self.step is not None
        return _TABLE[self.step].after[event]

    @property
    def id(self) -> str:
        """The workload's id in the decision packages."""
        return id_of(self.number)

    @property
    def booked_id(self) -> str:
        """The id under which the place of its booking is held."""
        return f"{self.id}{BOOKED}"

    def ends_by_s(self) -> float:
        """Returns when the maximum runtime of a workload that has started ends."""
        return self.started_at_s + self.workload.max_runtime_s - self.ran_s

    def remaining_s(self) -> float:
        """Returns how many seconds an attempt needs for the work that is left at its start."""
        return max(0.0, self.workload.duration_s - self.done_s) / self.speed

    @property
    def held_gpus(self) -> float:
        """The slots of the present attempt, on all machines."""
        return self.workload.gpus * self.speed

    @property
    def held_cpus_milli(self) -> int:
        """The CPUs of the present attempt, in thousandths of a core."""
        return round(sum(job.cpus_milli for job in self.workload.jobs) * self.speed)

    def queued(self, now: bool) -> QueueChange[QueuedWorkload]:
        """Returns the queue change that adds the workload to the pending ones, or (`now` False) removes it."""
        w = self.workload
        gpu_s = gpu_seconds(w.jobs, w.max_runtime_s)
        value = QueuedWorkload(self.id, w.tenant, w.submit_s, w.jobs, w.level, user=w.user, gpu_s=gpu_s)
        return QueueChange(w.submit_s, self.id, value if now else None)

    def placed(self, now: bool) -> QueueChange[PlacedWorkload]:
        """Returns the queue change that adds the workload to the placed ones, or (`now` False) removes it.

        Of the quota, it uses what it holds or, while a place is booked for it, that place.
        """
        w = self.workload
        held = self.gpus, self.held_cpus_milli
        if self.booking is not None:
            plan, request = self.booking
            cpus = (one.tasks * job.cpus_milli_per_task for one, job in zip(plan.jobs, request.jobs, strict=True))
            held = gpus_of(plan, request), sum(cpus)
        value = PlacedWorkload(self.id, w.tenant, self.awarded_at_s, *held, w.level) if now else None
        return QueueChange(self.awarded_at_s, self.id, value)


def gpus_of(plan: Plan, request: PlacementRequest) -> dict[str, int]:
    """Returns the slots that a plan takes, by GPU type."""
    out: dict[str, int] = {}
    for placement, job in zip(plan.jobs, request.jobs, strict=True):
        if placement.gpu_type is not None and job.gpus:
            out[placement.gpu_type] = out.get(placement.gpu_type, 0) + placement.tasks * job.gpus_per_task
    return out


def speed_of(jobs: Sequence[JobRequest], holdings: Iterable[Holding]) -> float:
    """Returns the tasks that hold these resources divided by the fewest of an elastic job; 1 if it is not elastic."""
    job = jobs[0]
    if not job.is_elastic:
        return 1.0
    held = list(holdings)
    gpus, cpus_milli = sum(h.gpus for h in held), sum(h.cpus_milli for h in held)
    return max(1.0, gpus / job.gpus if job.gpus else cpus_milli / job.cpus_milli if job.cpus_milli else 1.0)


def types_asked(workload: SimulatedWorkload) -> dict[str, int]:
    """Returns the slots that a queued workload requests, by GPU type: a job counts fully for each type it accepts."""
    out: dict[str, int] = {}
    for job in workload.jobs:
        for gpu_type in job.gpu_types if job.gpus else ():
            out[gpu_type] = out.get(gpu_type, 0) + job.gpus
    return out


def numbered(workloads: Iterable[SimulatedWorkload]) -> list[WorkloadState]:
    """Returns the states of the workloads, sorted and numbered by (submission, id)."""
    ordered = sorted(workloads, key=lambda w: (w.submit_s, w.id))
    return [WorkloadState(number, workload, ran_s=workload.ran_s) for number, workload in enumerate(ordered)]
