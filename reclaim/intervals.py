"""Computes the checkpoint interval of each job of a site: ReclaimNet's P1 (V-E and V-F, Algorithm 1).

`tick` is one control period. It divides the bandwidth for checkpoints among all jobs, and sets the interval of each
job. Agents decide about the final checkpoint within a notice (P3). All functions are vectorised over jobs.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reclaim.allocation import water_fill, water_fill_links
from reclaim.arrays import Floats, Ints, column, number, rows

_HOUR_S = 3600.0
_GOLDEN = np.uint64(11400714819323198485)
"""2^64 divided by the golden ratio."""


class IntervalReason(IntEnum):
    """What determined an interval. The name in lower case is the reason in documents and events."""

    OPTIMUM = 0
    """The least expected loss: equation 5, with the time for which a save stalls the job."""
    NETWORK_SHARE = 1
    """A shorter interval would use more than the share for checkpoints of the job's bandwidth: C / (share b)."""
    LOSS_BUDGET = 2
    """A longer interval would lose more than the job accepts: 2 L_max."""
    LOSS_BUDGET_UNREACHABLE = 3
    """The share for checkpoints does not suffice for the loss that the job accepts. The share is kept."""
    NO_BANDWIDTH = 4
    """The job has no bandwidth for checkpoints, so it does not save: the interval is infinite."""


class Intervals(NamedTuple):
    """The interval of each job, with its reason."""

    interval_s: Floats
    least_s: Floats
    """The lower limit C / (share b)."""
    reason: NDArray[np.int8]
    """`IntervalReason` of each job."""


@dataclass(frozen=True)
class P1Settings:
    """The constants of P1. docs/reclaim.md has their sensitivity."""

    write_share: float = 0.2
    """P1's beta: the share of a job's bandwidth that checkpoints may use. P3's beta is another constant."""
    stagger_s: float = 30.0
    """Jobs start their checkpoints at different offsets within periods of this length."""

    def __post_init__(self) -> None:
        if not 0 < self.write_share <= 1:
            raise ValueError(f"write_share: {self.write_share}: must be above 0 and at most 1")
        number("stagger_s", self.stagger_s, positive=True)


@dataclass(frozen=True)
class SiteJobs:
    """The jobs of a site, as columns. A column may be a single number for all jobs."""

    number: NDArray[np.uint64]
    """A number of each job that never changes, for its offset."""
    hazard_per_h: Floats
    """The upper bound of the hazard of each job's node (of its gang: the sum over its nodes)."""
    checkpoint_bytes: ArrayLike
    """C: the payload of a checkpoint."""
    loss_budget_s: ArrayLike = 1800.0
    """L_max: the mean work that a departure may lose."""
    cap_bytes_s: ArrayLike = np.inf
    """W: the write speed or an administrator's cap."""
    stall_s: ArrayLike | None = None
    """How long a save stalls the job; None: C / b, as in the paper."""
    store: Ints | None = None
    """The store of each job, as a number of an element of the budget; None: all jobs share one budget."""


class Tick(NamedTuple):
    """The decisions of one control period for each job."""

    bandwidth_bytes_s: Floats
    """b."""
    interval_s: Floats
    """The interval; infinite: the job does not save."""
    least_s: Floats
    """The lower limit of intervals: more frequent checkpoints would use more than their share of the bandwidth."""
    reason: NDArray[np.int8]
    """`IntervalReason` of each job."""
    offset_s: Floats
    """The offset in each period of `stagger_s` at which the job starts its checkpoints."""


def intervals(
    hazard_per_h: Floats,
    checkpoint_bytes: ArrayLike,
    bandwidth_bytes_s: ArrayLike,
    loss_budget_s: ArrayLike,
    write_share: float = P1Settings.write_share,
    stall_s: ArrayLike | None = None,
) -> Intervals:
    """Returns clip(sqrt(2 s / lambda), C / (share b), 2 L_max) for each job (equation 9).

    s is `stall_s`, the time for which a save stalls the job. None: C / b, the whole transfer, as in the paper. A save
    in the background stalls a job for a small part of it, and C / b would give intervals that are several times too
    long.

    If the lower limit is above the upper one, the lower one is kept: a shorter interval would only make the job's
    checkpoints compete with its own traffic.

    Raises:
        ValueError: a number is out of its range. The message names it.
    """
    size = len(hazard_per_h)
    hazard_per_s = column("hazard_per_h", hazard_per_h, size) / _HOUR_S
    payload = column("checkpoint_bytes", checkpoint_bytes, size)
    bandwidth = column("bandwidth_bytes_s", bandwidth_bytes_s, size, infinite=True)
    most_s = 2 * column("loss_budget_s", loss_budget_s, size, positive=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        write_s = np.where(payload > 0, payload / bandwidth, 0.0)
        cost_s = write_s if stall_s is None else column("stall_s", stall_s, size)
        best_s = np.where(hazard_per_s > 0, np.sqrt(2 * cost_s / hazard_per_s), np.inf)
    least_s = write_s / write_share
    found = np.maximum(least_s, np.minimum(best_s, most_s))
    reason = np.full(size, IntervalReason.OPTIMUM, dtype=np.int8)
    reason[best_s > most_s] = IntervalReason.LOSS_BUDGET
    reason[best_s < least_s] = IntervalReason.NETWORK_SHARE
    reason[least_s > most_s] = IntervalReason.LOSS_BUDGET_UNREACHABLE
    reason[np.isinf(least_s)] = IntervalReason.NO_BANDWIDTH
    return Intervals(found, least_s, reason)


def tick(jobs: SiteJobs, budget_bytes_s: ArrayLike, settings: P1Settings = P1Settings()) -> Tick:
    """Returns the decisions of one control period for all jobs of a site (Algorithm 1).

    Args:
        jobs: the active jobs.
        budget_bytes_s: the bandwidth that the site has for checkpoints; with `SiteJobs.store`, that of each store.
        settings: the constants.

    Raises:
        ValueError: a number is out of its range. The message names it.
    """
    size = rows(jobs.number)
    payload = column("checkpoint_bytes", jobs.checkpoint_bytes, size)
    hazard = column("hazard_per_h", jobs.hazard_per_h, size)
    if jobs.store is None:
        bandwidth = water_fill(hazard, payload, jobs.cap_bytes_s, float(np.asarray(budget_bytes_s)))
    else:
        budgets = np.asarray(budget_bytes_s, np.float64)
        bandwidth = water_fill_links(hazard, payload, jobs.cap_bytes_s, budgets, jobs.store)
    interval_s, least_s, reason = intervals(
        hazard, payload, bandwidth, jobs.loss_budget_s, settings.write_share, jobs.stall_s
    )
    return Tick(bandwidth, interval_s, least_s, reason, phases(jobs.number) * settings.stagger_s)


def phases(numbers: ArrayLike) -> Floats:
    """Returns a phase in [0, 1) for each job's number: the fractional part of the number divided by the golden ratio.

    The phases of successive numbers are spread as evenly as possible: n of them are nowhere closer than about 1 / (2.6
    n). A phase depends on the job's own number only, so it stays when other jobs join or leave.
    """
    with np.errstate(over="ignore"):
        turned = np.asarray(numbers).astype(np.uint64) * _GOLDEN
    return (turned >> np.uint64(11)).astype(np.float64) / 2.0**53
