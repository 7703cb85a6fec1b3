"""The workloads of a simulation."""

from dataclasses import dataclass
from math import inf

from domain.scheduling import JobRequest


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """A workload of the simulation."""

    id: str
    tenant: str
    level: int
    submit_s: float
    """Submission on the simulation's clock, from which the age counts."""
    arrives_s: float
    """When the scheduler sees the workload: later than `submit_s` if it was submitted before the start of a slice.

    Infinity: it is submitted during the run (`Simulator.submit`).
    """
    duration_s: float
    """Seconds of work; of an elastic job, with its fewest tasks: n times as many tasks need 1/n of the time."""
    jobs: tuple[JobRequest, ...]
    regions: frozenset[str] | None
    """The regions that have the data, or in which the workload may run; None: all."""
    max_runtime_s: float = inf
    """The limit on the sum of the times that its attempts run."""
    user: str = ""
    """The person who submitted it."""
    recurring: str | None = None
    """The name that the runs of a recurring workload share."""
    ran_s: float = 0.0
    """Seconds that its attempts had run when the simulation began."""

    @property
    def gpus(self) -> int:
        """GPU slots of the whole gang; of an elastic job, with its fewest tasks."""
        return sum(job.gpus for job in self.jobs)
