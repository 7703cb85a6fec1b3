"""Lower bounds of one channel's terms, given the amounts that are certainly or possibly in each region.

Once all decisions are made, each bound equals the term.
"""

import math

from domain.compiled import compiled
from tetris.exact.kernels.layout import F8, ROUNDING
from tetris.kernels.terms import strain

_STEPS = 12
"""Maximum number of iterations of the dual."""


@compiled
def apart_bound(
    low: F8, high: F8, share: F8, sure: float, may: float, slack: float, is_empty: bool, is_settled: bool
) -> float:
    """Returns a lower bound of the sum over regions of (D_r / D - s_r)^2; D is in `sure`..`may`, D_r in `low`..`high`.

    The shares q_r = D_r / D add up to 1 and lie between low_r / max(D) and high_r / min(D). The dual of this projection
    has a single multiplier. Each dual value is a lower bound, so the iteration may stop early.
    """
    regions = low.shape[0]
    without = 0.0
    for region in range(regions):
        without += share[region] * share[region]
    if is_empty:
        return without
    if is_settled:
        whole, total = 0.0, 0.0
        for region in range(regions):
            whole += low[region]
        for region in range(regions):
            total += (low[region] / whole - share[region]) ** 2
        return total
    # If D is positive, it is between `least` and `may + slack`.
    of_most, least = 1.0 / (may + slack), sure - slack
    of_least = 1.0 / least if least > 0.0 else 0.0
    multiplier, under, above = 0.0, -2.0, 2.0
    best = 0.0
    for _ in range(_STEPS):
        filled, total, free = 0.0, 0.0, 0
        for region in range(regions):
            floor = low[region] * of_most
            ceiling = max(floor, (high[region] + slack) * of_least) if least > 0.0 else 1.0
            part = share[region] + multiplier
            if part <= floor:
                part = floor
            elif part >= ceiling:
                part = ceiling
            else:
                free += 1
            filled += part
            total += (part - share[region]) ** 2
        missing = 1.0 - filled
        best = max(best, total + 2.0 * multiplier * missing)
        if abs(missing) < 1e-13:
            break
        if missing > 0.0:
            under = multiplier
        else:
            above = multiplier
        step = multiplier + missing / free if free > 0 else 0.5 * (under + above)
        multiplier = step if under < step < above else 0.5 * (under + above)
    return min(best, without) if least <= 0.0 else best


@compiled
def overload_bound(low: F8, high: F8, supply: F8, mean: float, sure: float, slack: float, is_settled: bool) -> float:
    """Returns a lower bound of the sum over regions of sigmoid(max(0, D_r - S_r) / m) - 1/2.

    The term of a region is zero up to its supply and concave above. The amount that is certainly in some region first
    uses the free supply. Because the terms are concave, the rest costs least if all of it is in one region.
    """
    total, rest = 0.0, sure
    for region in range(low.shape[0]):
        total += strain(low[region], supply[region], mean, 0.0)
        free = min(supply[region], high[region]) - low[region]
        rest -= low[region] + max(0.0, free)
    if is_settled or rest <= slack:
        return total
    least = math.inf
    for region in range(low.shape[0]):
        if high[region] > max(low[region], supply[region]):
            over = max(0.0, low[region] - supply[region])
            least = min(least, strain(over + rest, 0.0, mean, 0.0) - strain(over, 0.0, mean, 0.0))
    return total if least == math.inf else total + least


@compiled
def lack_bound(low: F8, high: F8, limit: F8, allowed: F8, sure: float, slack: float, is_settled: bool) -> float:
    """Returns a lower bound of the total excess over the limits; inf if an allowed limit is certainly exceeded."""
    total, rest, room = 0.0, sure, sure
    for region in range(low.shape[0]):
        amount = low[region]
        if amount - allowed[region] > ROUNDING * max(amount, allowed[region]):
            return math.inf
        over = amount - limit[region]
        if over > ROUNDING * max(amount, limit[region]):
            total += over
        # An excess within the rounding tolerance does not violate a limit.
        rest -= amount + max(0.0, min(limit[region] * (1.0 + 2.0 * ROUNDING), high[region]) - amount)
        room -= amount + max(0.0, min(allowed[region] * (1.0 + 2.0 * ROUNDING), high[region]) - amount)
    if is_settled:
        return total
    if room > slack:
        return math.inf
    return total + rest if rest > slack else total
