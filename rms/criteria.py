"""The criteria of `domain/criteria.py` as numbers, for comparing a region's options for one job.

A rating is a float64[WIDTH] with one column per criterion that is known before the tasks are packed, in the order of
the criteria. Ratings are compared lexicographically; the smaller one is better. Compactness (racks and machines) is
computed only to break ties. Numbers of victims and GPU-milliseconds are integers below 2**53, so float64 represents
them exactly.
"""

from collections.abc import Sequence

import numpy as np

from domain.capacity import NANO_DEPARTURES, NANO_USD
from domain.compiled import compiled
from domain.criteria import PlanQuality
from rms.arrays import F8, I4
from rms.holders import RANKS, Holders
from rms.plans import SEVERAL, GangPlan

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
        spanning=sum(job.cluster == SEVERAL for job in plan.jobs),
        type_preference=sum(job.preference for job in plan.jobs),
        capacity_preference=sum(job.capacity_preference for job in plan.jobs),
        away=sum(job.away for job in plan.jobs),
        move_s=sum(job.move_us for job in plan.jobs) / 1e6,
        departures_per_h=sum(job.nano_departures_per_h for job in plan.jobs) / NANO_DEPARTURES,
        usd_per_h=sum(job.nano_usd_per_h for job in plan.jobs) / NANO_USD,
        racks=sum(job.racks for job in plan.jobs),
        machines=sum(len(job.rows) for job in plan.jobs),
    )
