"""Plans for one job and for a whole gang, with row and holder numbers of a region's columns."""

from dataclasses import dataclass

from domain.scheduling import JobRequest
from rms.arrays import I4, I8
from rms.packing import Need

SEVERAL = -1
"""Cluster number of a plan whose tasks span clusters."""


@dataclass(frozen=True)
class JobPlan:
    """Placement of one job's tasks, and the victims."""

    job: JobRequest
    preference: int
    """Index of the chosen GPU type in the job's list; 0 for a job without GPUs."""
    cluster: int
    """Cluster number, or `SEVERAL` if the tasks span clusters."""
    rows: I4
    """Rows of the machines, sorted by machine id."""
    tasks: I8
    """Number of tasks on each machine."""
    racks: int
    victims: tuple[int, ...] = ()
    """Numbers of the victims, except those of earlier jobs of the gang."""
    capacity_preference: int = 0
    """Index of the capacity kind in the job's list; the largest index if there are several clusters."""
    away: int = 0
    """1 if the job leaves its building (`Move.away`); with several clusters, if one of them is elsewhere."""
    move_us: int = 0
    """`Move.score_us`; with several clusters, the largest one."""
    nano_departures_per_h: int = 0
    """Expected departures of owners in billionths per hour, summed over all tasks."""
    nano_usd_per_h: int = 0
    """Price in billionths of a US dollar per hour."""


@dataclass(frozen=True)
class GangPlan:
    """A plan for each job, and the victims of all of them."""

    jobs: tuple[JobPlan, ...]
    victims: tuple[int, ...]


@dataclass(frozen=True)
class PlanFailure:
    """Planning failed: the first job for which there is no plan."""

    job: JobRequest


def need_of(job: JobRequest) -> Need:
    """Converts a job to the tuple that the kernels use."""
    return Need(job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task, job.tasks)
