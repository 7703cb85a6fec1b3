"""Quantiles of the gamma distribution, for bounds of the rate of a Poisson process.

If n events were counted in the exposure E, the exact upper confidence bound of the rate is the quantile of
Gamma(n + 1) divided by E. It is half the quantile of chi-square with 2 n + 2 degrees of freedom. With a gamma prior of
shape k and rate K, the posterior is Gamma(n + k) / (E + K).
"""

from functools import lru_cache
from math import erfc, exp, lgamma, log, sqrt

import numpy as np
from numpy.typing import ArrayLike

from reclaim.arrays import Floats, column

_EPSILON = 1e-16
_ROUNDS = 200
_NORMAL_FROM = 1e6
"""From this shape on, the Wilson-Hilferty approximation is exact to 1e-9, and the series would need many terms."""


def below(shape: float, value: float) -> float:
    """Returns the probability that a gamma variable of this shape is at most `value`: P(shape, value), regularised.

    A series below the mean, a continued fraction (Lentz) above it.
    """
    if value <= 0:
        return 0.0
    front = exp(shape * log(value) - value - lgamma(shape + 1))
    if value < shape + 1:
        term = total = 1.0
        step = shape
        while term > total * _EPSILON:
            step += 1
            term *= value / step
            total += term
        return front * total
    tiny = 1e-300
    b = value + 1 - shape
    c, d = 1 / tiny, 1 / b
    fraction = d
    for i in range(1, 100_000):
        a = -i * (i - shape)
        b += 2
        d = 1 / (a * d + b or tiny)
        c = b + a / c or tiny
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return 1 - front * shape * fraction


@lru_cache(maxsize=65536)
def quantile(shape: float, probability: float) -> float:
    """Returns the quantile of a gamma variable with this shape and scale 1.

    Raises:
        ValueError: the shape is not above 0, or the probability is not between 0 and 1.
    """
    if not shape > 0:
        raise ValueError(f"shape: {shape}: must be above 0")
    if not 0 < probability < 1:
        raise ValueError(f"probability: {probability}: must be between 0 and 1, without both")
    normal = _normal_quantile(probability)
    cube = 1 - 1 / (9 * shape) + normal / (3 * sqrt(shape))
    guess = shape * cube**3 if cube > 0 else 0.0
    if shape >= _NORMAL_FROM:
        return guess
    # P(k, x) is about x^k / Gamma(k + 1) for small x.
    small = exp((log(probability) + lgamma(shape + 1)) / shape)
    low, high = 0.0, max(guess, small, 1.0) * 2 + 10
    while below(shape, high) < probability:
        high *= 2
    found = guess if low < guess < high and guess > 1e-3 else min(small, high / 2)
    for _ in range(_ROUNDS):
        error = below(shape, found) - probability
        if error > 0:
            high = found
        else:
            low = found
        density = exp((shape - 1) * log(found) - found - lgamma(shape)) if found > 0 else 0.0
        following = found - error / density if density > 0 else low
        if not low < following < high:
            following = (low + high) / 2
        if abs(following - found) <= 1e-14 * found:
            return following
        found = following
    return found


def _normal_quantile(probability: float) -> float:
    """Returns the quantile of the standard normal distribution, by bisection of erfc."""
    low, high = -40.0, 40.0
    for _ in range(100):
        middle = (low + high) / 2
        if erfc(-middle / sqrt(2)) / 2 < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def quantiles(shapes: ArrayLike, probability: float) -> Floats:
    """Returns the quantile of each shape. It is computed once for each distinct shape.

    Raises:
        ValueError: as `quantile`.
    """
    given = np.asarray(shapes, dtype=np.float64)
    distinct, place = np.unique(column("shapes", given.ravel(), given.size, positive=True), return_inverse=True)
    found = np.array([quantile(float(one), probability) for one in distinct])
    return np.asarray(found[place].reshape(given.shape)) if given.size else np.zeros(given.shape)
