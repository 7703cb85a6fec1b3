"""Terms of the objective, computed from running sums, and the excess over limits (MAST 3.3)."""

import math

from domain.compiled import compiled
from tetris.kernels.layout import (
    ALL_BYTES,
    ALL_H,
    CAPACITY2,
    F8,
    GPU_WEIGHT,
    HOME_H,
    HOURS,
    HOURS2,
    HOURS_SHARE,
    MOVE_QUOTA,
    MOVED,
    OVERLOAD,
    READ,
    READ_WEIGHT,
    ROUNDING,
    STORAGE_WEIGHT,
    STORED,
    STORED2,
    STORED_SCALE,
    STORED_SHARE,
    STRAIN,
    WANTED_H,
    Fixed,
    PlanState,
)


@compiled
def strain(demand: float, supply: float, mean: float, tiny: float) -> float:
    """Returns the overload: 0 up to the supply (hours), above it sigmoid(over / mean) - 1/2, or 1/2 if `mean` is 0."""
    over = demand - supply
    if over <= tiny:
        return 0.0
    if mean <= 0.0:
        return 0.5
    return 1.0 / (1.0 + math.exp(-over / mean)) - 0.5


@compiled
def key_cost(
    hours: float, hours2: float, hours_share: float, strained: float, share2: float, importance: float,
    overload: float, tiny: float,
) -> float:  # fmt: skip
    """Returns the GPU term of one type and level: the squares of (D/sum D - S/sum S), expanded, plus the overload.

    D is the demand of a region, S its supply.
    """
    apart = share2
    if hours > tiny:
        apart += hours2 / (hours * hours) - 2.0 * hours_share / hours
    return importance * (apart + overload * strained)


@compiled
def storage_cost(stored: float, stored2: float, stored_share: float, capacity2: float) -> float:
    """Returns the storage term, with the squares expanded as in `key_cost`."""
    if stored <= 0.0:
        return capacity2
    return capacity2 + stored2 / (stored * stored) - 2.0 * stored_share / stored


@compiled
def over(amount: float, limit: float, scale: float) -> float:
    """Returns the excess over a limit divided by `scale`; 0 if it is only a rounding error."""
    excess = amount - limit
    if excess > ROUNDING * max(amount, limit):
        return excess / scale
    return 0.0


@compiled
def short_of_home(hours: float, number: F8) -> float:
    """Returns the missing high-priority hours at home, as a fraction of all high-priority hours."""
    if hours < number[WANTED_H] - ROUNDING * number[ALL_H]:
        return (number[WANTED_H] - hours) / number[ALL_H]
    return 0.0


@compiled
def gpu_term(fixed: Fixed, state: PlanState) -> float:
    """Returns the GPU term without its weight."""
    sums, share2, importance, tiny, overload = (
        state.sums, fixed.share2, fixed.importance, fixed.tiny, fixed.number[OVERLOAD],
    )  # fmt: skip
    term = 0.0
    for key in range(sums.shape[0]):
        term += key_cost(
            sums[key, HOURS], sums[key, HOURS2], sums[key, HOURS_SHARE], sums[key, STRAIN], share2[key],
            importance[key], overload, tiny[key],
        )  # fmt: skip
    return term


@compiled
def objective(fixed: Fixed, state: PlanState) -> float:
    """Returns the objective of the state's plan."""
    number, now = fixed.number, state.now
    storage = storage_cost(now[STORED], now[STORED2], now[STORED_SHARE], number[CAPACITY2])
    return (
        number[READ_WEIGHT] * now[READ] + number[GPU_WEIGHT] * gpu_term(fixed, state) + number[STORAGE_WEIGHT] * storage
    )


@compiled
def excess(fixed: Fixed, state: PlanState) -> tuple[float, float]:
    """Returns the relative excess over the limits, and that over the allowed limits (MAST 3.3).

    An allowed limit is the limit itself, or the value at the start if that already exceeds the limit. Each excess is
    divided by its own scale before they are added up, so that bytes, hours and fractions are comparable.
    """
    number, now, stored, cpu = fixed.number, state.now, state.stored, state.cpu
    capacity, capacity_allowed = fixed.capacity, fixed.capacity_allowed
    quota, quota_allowed, quota_scale = fixed.quota, fixed.quota_allowed, fixed.quota_scale
    short = short_of_home(now[HOME_H], number)
    far = over(now[MOVED], number[MOVE_QUOTA], number[ALL_BYTES])
    lack, broken = short + far, short + far
    for region in range(stored.shape[0]):
        lack += over(stored[region], capacity[region], number[STORED_SCALE])
        broken += over(stored[region], capacity_allowed[region], number[STORED_SCALE])
    for app in range(cpu.shape[0]):
        for region in range(cpu.shape[1]):
            lack += over(cpu[app, region], quota[app, region], quota_scale[app])
            broken += over(cpu[app, region], quota_allowed[app, region], quota_scale[app])
    return lack, broken
