"""Plans for one job and for a whole gang, with row and holder numbers of a region's columns, and their comparison.

A rating holds the criteria of `domain/criteria.py` as numbers: it is a float64[WIDTH] with one column per criterion
that is known before the tasks are packed, in the order of the criteria. Ratings are compared lexicographically; the
smaller one is better. Compactness (racks and machines) is computed only to break ties. Numbers of victims and
GPU-milliseconds are integers below 2**53, so float64 represents them exactly.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from domain.capacity import NANO_DEPARTURES, NANO_USD
from domain.compiled import compiled
from domain.criteria import PlanQuality
from domain.scheduling import JobRequest
from domain.spread import SpreadLevel
from domain.topology import ANYWHERE
from rms.arrays import F8, I4, I8
from rms.holders import RANKS, Holders
from rms.packing import Need, PlanShape

_WITHIN_CLUSTERS = SpreadLevel.MACHINE, SpreadLevel.RACK
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
    shape: PlanShape
    """Its racks, machines, opened machines and pieces, when the job was planned."""
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
    apart: int = 0
    """1 if the tasks are not in one place of the level that the job prefers."""


@dataclass(frozen=True)
class GangPlan:
    """A plan for each job, and the victims of all of them."""

    jobs: tuple[JobPlan, ...]
    victims: tuple[int, ...]


@dataclass(frozen=True)
class PlanFailure:
    """Planning failed: the first job for which there is no plan."""

    job: JobRequest


def need_of(job: JobRequest, *, prefers: bool = False) -> Need:
    """Converts a job to the tuple that the kernels use. With `prefers`, its preferred level counts as required."""
    if job.topology is ANYWHERE:  # Nearly always, and bids are short.
        return Need(job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task, job.tasks, 1, 1)
    machine, rack = (job.topology.tasks_by(level, job.tasks, prefers=prefers) for level in _WITHIN_CLUSTERS)
    return Need(job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task, job.tasks, machine, rack)


LOST_GPU_MS = RANKS
YOUNGEST_S = RANKS + 1
OF_VICTIMS = RANKS + 2
"""Number of leading columns that rate the victims."""
PREFERENCE = OF_VICTIMS
WIDTH = OF_VICTIMS + 1


@compiled
def rate(holders: Holders, victims: I4, count: int, preference: int, rating: F8) -> None:
    """Writes the rating of an option whose victims are the first `count` of `victims`."""
    rating[:OF_VICTIMS] = 0.0
    rating[YOUNGEST_S] = -np.inf
    for i in range(count):
        victim = victims[i]
        rating[holders.rank[victim] - 1] += 1.0
        rating[LOST_GPU_MS] += holders.lost_gpu_ms[victim]
        rating[YOUNGEST_S] = max(rating[YOUNGEST_S], holders.started_at_s[victim])
    rating[PREFERENCE] = preference


@compiled
def compare(a: F8, b: F8, columns: int) -> int:
    """Compares two ratings by the first `columns` columns: -1 if a is better, 1 if b is better, 0 if they are equal."""
    for column in range(columns):
        if a[column] != b[column]:
            return -1 if a[column] < b[column] else 1
    return 0


def rating_of(holders: Holders, victims: Sequence[int], preference: int = 0) -> F8:
    """Returns the rating of an option with the given victims."""
    rating = np.empty(WIDTH)
    rate(holders, np.array(victims, np.int32), len(victims), preference, rating)
    return rating


def quality(holders: Holders, plan: GangPlan) -> PlanQuality:
    """Returns the quality of the plan for a whole gang."""
    rating = rating_of(holders, plan.victims)
    return PlanQuality(
        victims_by_rank=tuple(map(int, rating[:RANKS])),
        lost_gpu_s=float(rating[LOST_GPU_MS]) / 1000,
        youngest_victim_started_at_s=float(rating[YOUNGEST_S]),
        missing_tasks=sum(max(0, job.job.most_tasks - job.job.tasks) for job in plan.jobs),
        spanning=sum(job.cluster == SEVERAL for job in plan.jobs),
        apart=sum(job.apart for job in plan.jobs),
        type_preference=sum(job.preference for job in plan.jobs),
        capacity_preference=sum(job.capacity_preference for job in plan.jobs),
        away=sum(job.away for job in plan.jobs),
        move_s=sum(job.move_us for job in plan.jobs) / 1e6,
        departures_per_h=sum(job.nano_departures_per_h for job in plan.jobs) / NANO_DEPARTURES,
        usd_per_h=sum(job.nano_usd_per_h for job in plan.jobs) / NANO_USD,
        racks=sum(job.shape.racks for job in plan.jobs),
        machines=sum(job.shape.machines for job in plan.jobs),
        opened=sum(job.shape.opened for job in plan.jobs),
        pieces=sum(job.shape.pieces for job in plan.jobs),
    )
