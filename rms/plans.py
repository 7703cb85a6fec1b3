"""Plans in terms of a region's columns: for one job, and for a whole gang."""

from dataclasses import dataclass

from domain.scheduling import JobRequest
from rms.arrays import I4, I8
from rms.packing import Need

SEVERAL = -1
"""The cluster of a job whose tasks span clusters."""


@dataclass(frozen=True)
class JobPlan:
    """Where one job's tasks go and whom that evicts."""

    job: JobRequest
    preference: int
    """Index of its GPU type in the job's list; 0 for a job without GPUs."""
    cluster: int
    """`SEVERAL` where no single one could take it."""
    rows: I4
    """Its machines, in the order of their ids."""
    tasks: I8
    racks: int
    victims: tuple[int, ...] = ()
    """Without victims of earlier jobs of the gang."""
    capacity_preference: int = 0
    """Place of its kind of capacity in the job's list; of several clusters the last."""
    nano_usd_per_h: int = 0
    """Its price, in billionths of a US dollar an hour."""


@dataclass(frozen=True)
class GangPlan:
    """A plan for each job, and the victims of all of them."""

    jobs: tuple[JobPlan, ...]
    victims: tuple[int, ...]


@dataclass(frozen=True)
class Stuck:
    """The first job for which there is no plan."""

    job: JobRequest


def need_of(job: JobRequest) -> Need:
    """A job as the kernels take it."""
    return Need(job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task, job.tasks)
