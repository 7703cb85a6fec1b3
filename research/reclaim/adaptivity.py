"""How much an interval that follows hazard and bandwidth gains over the best fixed interval (Theorem 2).

With W = sqrt(lambda / B), the expected cost of the best fixed interval divided by that of the best interval at each
time is sqrt(E[lambda] E[1 / B]) / E[W]. It is 1 only if lambda B is constant.
"""

from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
from numpy.typing import ArrayLike

from reclaim.arrays import column, rows

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Adaptivity:
    """The gap of Theorem 2 on a trace."""

    fixed_cost: float
    """The share of time lost with the best fixed interval."""
    adaptive_cost: float
    """The share of time lost with the best interval at each time."""
    defect: float
    """E[lambda] E[1 / B] - E[W]^2, in 1 / (bytes): the defect of the Cauchy-Schwarz inequality (equation 8)."""
    hazard_cv: float
    """The coefficient of variation of the hazard..."""
    slowness_cv: float
    """...and of 1 / B."""
    correlation: float
    """The correlation of the hazard and 1 / B; NaN if one of them is constant."""

    @property
    def ratio(self) -> float:
        """Equation 6: 1.05 is a gap of 5%."""
        return self.fixed_cost / self.adaptive_cost

    @property
    def gap(self) -> float:
        """Equation 7: the difference of the two costs."""
        return self.fixed_cost - self.adaptive_cost


def adaptivity(
    hazard_per_h: ArrayLike, bandwidth_bytes_s: ArrayLike, checkpoint_bytes: float, weight: ArrayLike = 1.0
) -> Adaptivity:
    """Returns the gap for a trace of hazard and effective bandwidth.

    Args:
        hazard_per_h: the hazard in each epoch, in departures per hour.
        bandwidth_bytes_s: the effective bandwidth in each epoch.
        checkpoint_bytes: the payload. The costs depend on it, the ratio does not.
        weight: the length of each epoch.

    Raises:
        ValueError: a number is out of its range, or there is no epoch with a weight.
    """
    size = rows(hazard_per_h)
    hazard = column("hazard_per_h", hazard_per_h, size, positive=True) / _HOUR_S
    slowness = 1 / column("bandwidth_bytes_s", bandwidth_bytes_s, size, positive=True)
    parts = column("weight", weight, size)
    if not parts.sum() > 0:
        raise ValueError(f"weight: {size} epochs: at least one must have a weight above 0")
    parts = parts / parts.sum()
    mean_hazard, mean_slowness = float(parts @ hazard), float(parts @ slowness)
    root = float(parts @ np.sqrt(hazard * slowness))
    spread = [sqrt(max(0.0, float(parts @ (one - mean) ** 2)))
              for one, mean in ((hazard, mean_hazard), (slowness, mean_slowness))]  # fmt: skip
    together = float(parts @ ((hazard - mean_hazard) * (slowness - mean_slowness)))
    both = spread[0] * spread[1]
    return Adaptivity(
        fixed_cost=sqrt(2 * checkpoint_bytes * mean_hazard * mean_slowness),
        adaptive_cost=sqrt(2 * checkpoint_bytes) * root,
        defect=max(0.0, mean_hazard * mean_slowness - root**2),
        hazard_cv=spread[0] / mean_hazard,
        slowness_cv=spread[1] / mean_slowness,
        correlation=together / both if both > 0 else float("nan"),
    )


def lognormal_ratio(hazard_cv: float, slowness_cv: float, correlation: float) -> float:
    """Returns the ratio of equation 6 for jointly lognormal hazard and 1 / B with these moments, exactly.

    The logarithms have the variances s1 = ln(1 + CV1^2) and s2, and the covariance c = ln(1 + correlation CV1 CV2). The
    ratio is exp((s1 + s2 - 2 c) / 8).

    Raises:
        ValueError: no lognormal pair has this correlation.
    """
    together = 1 + correlation * hazard_cv * slowness_cv
    first, second = log(1 + hazard_cv**2), log(1 + slowness_cv**2)
    if together <= 0 or log(together) ** 2 > first * second:
        raise ValueError(f"correlation: {correlation}: no lognormal variables with these variations have it")
    return exp((first + second - 2 * log(together)) / 8)


def second_order_ratio(hazard_cv: float, slowness_cv: float, correlation: float) -> float:
    """Returns the ratio of equation 6 for any distribution with these moments and small variations.

    It is 1 + (CV1^2 + CV2^2 - 2 correlation CV1 CV2) / 8.
    """
    return 1 + (hazard_cv**2 + slowness_cv**2 - 2 * correlation * hazard_cv * slowness_cv) / 8
