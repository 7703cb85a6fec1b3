"""Divides a site's bandwidth for checkpoints among its jobs (ReclaimNet V-C: Theorem 1 and Lemma 2).

The cost of a job with the bandwidth b, at its best interval, is sqrt(2 lambda C / b). The sum over all jobs is least if
b is proportional to the weight (lambda C)^(1/3). The weights need no common unit: only their ratios count.
"""

import numpy as np
from numpy.typing import ArrayLike

from reclaim.arrays import Floats, Ints, check_numbers, column, number


def weights(hazard_per_h: ArrayLike, checkpoint_bytes: ArrayLike, size: int) -> Floats:
    """Returns (lambda C)^(1/3) for each job. The two roots are taken apart, so that no product overflows."""
    hazard = column("hazard_per_h", hazard_per_h, size)
    return np.asarray(np.cbrt(hazard) * np.cbrt(column("checkpoint_bytes", checkpoint_bytes, size)))


def water_fill(
    hazard_per_h: Floats, checkpoint_bytes: ArrayLike, cap_bytes_s: ArrayLike, budget_bytes_s: float
) -> Floats:
    """Returns the bandwidth of each job in bytes per second, with a cap for each job (Lemma 2).

    At the optimum each job gets min(cap, weight * level) for one common level. A job is at its cap if cap / weight is
    at most the level, so the jobs are sorted by this ratio, and the level follows from sums over the jobs before and
    after. This takes one sort; the iteration in the paper takes up to one pass for each job.

    Args:
        hazard_per_h: the hazard of each job's node, in emergency departures per hour, 0 or more.
        checkpoint_bytes: the payload of each job, 0 or more.
        cap_bytes_s: the write speed or the administrator's cap of each job, above 0; infinite: none.
        budget_bytes_s: what all jobs may use together, 0 or more.

    Raises:
        ValueError: a number is out of its range.
    """
    size = len(hazard_per_h)
    weight = weights(hazard_per_h, checkpoint_bytes, size)
    cap = column("cap_bytes_s", cap_bytes_s, size, positive=True, infinite=True)
    left = number("budget_bytes_s", budget_bytes_s)
    if not size:
        return np.zeros(0)
    if not weight.any():
        weight = np.ones(size)
    with np.errstate(divide="ignore", over="ignore"):
        ratio = np.where(weight > 0, cap / weight, np.inf)
    order = np.argsort(ratio)
    # For each position: the level if exactly the jobs before this position are at their caps.
    behind = np.cumsum(weight[order][::-1])[::-1]
    before = np.concatenate(([0.0], np.cumsum(cap[order])[:-1]))
    with np.errstate(divide="ignore", invalid="ignore"):
        level = np.where(behind > 0, (left - before) / behind, np.inf)
    below = level < ratio[order]
    if not below.any():
        return np.where(weight > 0, cap, 0.0)
    first = int(np.argmax(below))
    return np.minimum(cap, weight * max(0.0, float(level[first])))


def water_fill_links(
    hazard_per_h: Floats, checkpoint_bytes: ArrayLike, cap_bytes_s: ArrayLike, budget_bytes_s: Floats, link: Ints
) -> Floats:
    """Returns the bandwidth of each job in bytes per second, where each job shares one of several links (Lemma 2 each).

    Args:
        hazard_per_h: as in `water_fill`, likewise the next two.
        checkpoint_bytes: the payload of each job.
        cap_bytes_s: the cap of each job.
        budget_bytes_s: what the jobs of each link may use together, 0 or more.
        link: the link of each job, as a number of an element of `budget_bytes_s`.

    Raises:
        ValueError: a number is out of its range.
    """
    size = len(hazard_per_h)
    hazard, payload = column("hazard_per_h", hazard_per_h, size), column("checkpoint_bytes", checkpoint_bytes, size)
    cap = column("cap_bytes_s", cap_bytes_s, size, positive=True, infinite=True)
    budget = column("budget_bytes_s", budget_bytes_s, len(budget_bytes_s))
    check_numbers("link", link, len(budget))
    # A job that is alone on its link gets all of it, up to its cap.
    found = np.minimum(cap, budget[link])
    for shared in np.flatnonzero(np.bincount(link, minlength=len(budget)) > 1).tolist():
        at = link == shared
        found[at] = water_fill(hazard[at], payload[at], cap[at], float(budget[shared]))
    return found
