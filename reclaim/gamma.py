"""Quantiles of the gamma distribution, for bounds of the rate of a Poisson process.

If n events were counted in the exposure E, the exact upper confidence bound of the rate is the quantile of
Gamma(n + 1) divided by E. It is half the quantile of chi-square with 2 n + 2 degrees of freedom. With a gamma prior of
shape k and rate K, the posterior is Gamma(n + k) / (E + K).
"""

from functools import lru_cache
from math import exp, lgamma, log, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from reclaim.arrays import Floats, column

_EPSILON = 1e-16
_ROUNDS = 100
_NORMAL_FROM = 1e6
"""From this shape on, the Wilson-Hilferty approximation is exact to 1e-9, and the series would need many terms."""


@lru_cache(maxsize=65536)
def quantile(shape: float, probability: float) -> float:
    """Returns the quantile of a gamma variable with this shape and scale 1: Newton's method on the series of P.

    Raises:
        ValueError: the shape is not above 0, or the probability is not between 0 and 1.
    """
    if not shape > 0:
        raise ValueError(f"shape: {shape}: must be above 0")
    if not 0 < probability < 1:
        raise ValueError(f"probability: {probability}: must be between 0 and 1, without both")
    normal = 1 - 1 / (9 * shape) + NormalDist().inv_cdf(probability) / (3 * sqrt(shape))
    if shape >= _NORMAL_FROM:
        return shape * normal**3
    # The second value is a lower bound of the quantile, and close to it if the quantile is far below the mean.
    value = max(shape * normal**3, exp((log(probability) + lgamma(shape + 1)) / shape))
    for _ in range(_ROUNDS):
        density = exp((shape - 1) * log(value) - value - lgamma(shape))
        term = below = value / shape
        step = shape
        while term > below * _EPSILON:
            step += 1
            term *= value / step
            below += term
        change = probability / density - below
        value = max(value + change, value / 2)
        if abs(change) <= 1e-14 * value:
            break
    return value


def quantiles(shapes: ArrayLike, probability: float) -> Floats:
    """Returns the quantile of each shape. It is computed once for each distinct shape.

    Raises:
        ValueError: as `quantile`.
    """
    given = np.asarray(shapes, dtype=np.float64)
    distinct, place = np.unique(column("shapes", given.ravel(), given.size, positive=True), return_inverse=True)
    found = np.array([quantile(float(one), probability) for one in distinct])
    return np.asarray(found[place].reshape(given.shape)) if given.size else np.zeros(given.shape)
