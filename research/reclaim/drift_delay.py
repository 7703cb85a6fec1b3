"""How long the drift detector takes to notice a change, and how well rates can be estimated (`reclaim.drift`)."""

from dataclasses import dataclass
from math import ceil, exp, floor, fsum, lgamma, log

import numpy as np

from reclaim.drift import DriftSettings


@dataclass(frozen=True)
class Delay:
    """How long a change of one size remains unnoticed."""

    shift: float
    """The rate after the change divided by the rate before; 1: no change, and each alarm is a false one."""
    expected_events: float
    """The mean number of departures that the model expects until the alarm..."""
    events: float
    """...and the mean number that there were."""
    median_expected_events: float

    def hours(self, rate_per_h: float) -> float:
        """Returns the mean delay in hours at a site with this rate before the change."""
        return self.expected_events / rate_per_h


def delay(settings: DriftSettings, shift: float, runs: int = 2000, seed: int = 1) -> Delay:
    """Returns the delay until an alarm of either direction, simulated from one event to the next.

    The detector starts from 0, which is its worst state. A statistic for more departures grows only at an event, and
    one for fewer only between two events, so no finer step of time is needed.
    """
    draw = np.random.default_rng(seed)
    up, down = log(settings.ratio), -log(settings.ratio)
    fall, rise = settings.ratio - 1, 1 - 1 / settings.ratio
    passed, counted = np.zeros(runs), np.zeros(runs)
    more, fewer = np.zeros(runs), np.zeros(runs)
    rows = np.arange(runs)
    while rows.size:
        gap = draw.exponential(1 / shift, rows.size)
        # The statistic for fewer departures may reach the threshold before the next event.
        until = (settings.threshold - fewer[rows]) / rise
        early = until <= gap
        passed[rows] += np.minimum(gap, until)
        rows_left = rows[~early]
        gap = gap[~early]
        counted[rows_left] += 1
        more[rows_left] = np.maximum(0, more[rows_left] - fall * gap) + up
        fewer[rows_left] = np.maximum(0, fewer[rows_left] + rise * gap + down)
        rows = rows_left[more[rows_left] < settings.threshold]
    return Delay(shift, float(passed.mean()), float(counted.mean()), float(np.median(passed)))


def within(share: float, events: float) -> float:
    """Returns the probability that a count of Poisson events is within a share of its mean: that a rate that is
    estimated from so many expected events has a relative error of at most `share`.
    """
    low, high = (1 - share) * events, (1 + share) * events
    counts = range(max(0, ceil(low - 1e-9)), floor(high + 1e-9) + 1)
    return fsum(exp(count * log(events) - events - lgamma(count + 1)) for count in counts)
