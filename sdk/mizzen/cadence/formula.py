"""Computes the interval that wastes the least time: Young's formula for short saves, else Daly's higher-order formula.

Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006. The interval is the work between two
saves, in seconds, without the saves themselves.

If the end of the machines is known, the interval divides the time until then (`best_until_end`).
"""

from collections.abc import Callable
from math import ceil, expm1, floor, inf, sqrt
from typing import Literal, TypeAlias

Rule: TypeAlias = Literal["young", "daly", "mtbf"]

SMALL = 0.01
"""Young's formula is used for saves of up to this fraction of the mean time between interruptions.

Young's interval is then at most 5% too long, which costs less than one part in 5,000 of the time.
"""

_MOST_STEPS = 1e15
_HALVINGS = 60


def best_interval_s(mtbf_s: float, save_s: float) -> tuple[float, Rule]:
    """Return the seconds of work between two saves, and the formula that gave them.

    The result is monotonic: it never decreases if `mtbf_s` or `save_s` grows. The formulas have jumps at the boundaries
    of their ranges. There the value at the boundary is kept until the next formula exceeds it, which is nearer to the
    optimum than the jump.

    Args:
        mtbf_s: mean time between interruptions of the whole gang, above 0.
        save_s: the time that one save costs the training, 0 or more.

    Raises:
        ValueError: a number is out of its range.
    """
    check_above_zero(mtbf_s=mtbf_s)
    check_not_negative(save_s=save_s)
    if save_s <= SMALL * mtbf_s:
        return sqrt(2 * mtbf_s) * sqrt(save_s), "young"
    if save_s >= 2 * mtbf_s:
        return mtbf_s, "mtbf"
    part = save_s / (2 * mtbf_s)
    daly_s = sqrt(2 * save_s) * sqrt(mtbf_s) * (1 + sqrt(part) / 3 + part / 9) - save_s
    return max(daly_s, sqrt(2 * SMALL) * mtbf_s, save_s / 2), "daly"


def expected_time(mtbf_s: float, save_s: float, interval_s: float) -> float:
    """Return the expected seconds for a second of work, with exponential interruptions and no restart time.

    This is Daly's complete cost function, (mtbf / interval) * (exp((interval + save) / mtbf) - 1). It is infinite if
    the value is too large for a float.

    Raises:
        ValueError: a number is out of its range.
    """
    check_above_zero(mtbf_s=mtbf_s, interval_s=interval_s)
    check_not_negative(save_s=save_s)
    try:
        return mtbf_s / interval_s * expm1((interval_s + save_s) / mtbf_s)
    except OverflowError:
        return inf


def best_until_end(mtbf_s: float, save_s: float, ends_in_s: float) -> tuple[float, int]:
    """Return the seconds of work between two saves that divide the time until a known end, and the number of saves.

    An interruption certainly occurs at the end, and others may occur before it at random. With k saves, each after W
    seconds of work, the expected saved work is

        W (exp(-(W + C) / mu) + exp(-2 (W + C) / mu) + ... + exp(-k (W + C) / mu)),    k (W + C) <= L

    If the saves divide all of L, k (W + C) = L, this is greatest where Daly's complete cost function of W is least. So
    the best k is next to L / (W + C) for the interval without an end. If a save takes about as long as the mean time
    between interruptions, a W shorter than the one that fills L is better.

    Args:
        mtbf_s: mean time between the random interruptions, above 0.
        save_s: C, the time that one save costs the training, above 0.
        ends_in_s: L, the time until the end, above 0.

    Returns:
        W and k; (0, 0) if not even one save fits.

    Raises:
        ValueError: a number is out of its range.
    """
    check_above_zero(save_s=save_s, ends_in_s=ends_in_s)
    best_s, _ = best_interval_s(mtbf_s, save_s)
    near = ends_in_s / (best_s + save_s)
    # Try one more on either side: Young's and Daly's intervals are only close to the best one.
    found = []
    for saves in range(max(1, floor(near) - 1), ceil(near) + 2):
        most_s = ends_in_s / saves - save_s
        if most_s > 0:
            interval_s = _peak(lambda work_s, k=saves: _saved(mtbf_s, save_s, work_s, k), most_s)  # type: ignore[misc]
            found.append((_saved(mtbf_s, save_s, interval_s, saves), interval_s, saves))
    if not found:
        return 0.0, 0
    _, interval_s, saves = max(found)
    # If the end is far away, the best W is slightly shorter than the one that fills L, so more saves may fit.
    return interval_s, max(saves, floor(ends_in_s / (interval_s + save_s)))


def expected_time_until_end(mtbf_s: float, save_s: float, interval_s: float, ends_in_s: float) -> float:
    """Return the expected seconds for a second of saved work, with a known end and random interruptions before.

    This is the mean time until the first interruption, divided by the work that is expected to be saved until then. It
    is infinite if no save finishes before the end.

    Raises:
        ValueError: a number is out of its range.
    """
    check_above_zero(mtbf_s=mtbf_s, interval_s=interval_s, ends_in_s=ends_in_s)
    check_not_negative(save_s=save_s)
    part_s = interval_s + save_s
    saves = floor(ends_in_s / part_s * (1 + 1e-12))
    if not saves:
        return inf
    work_s = _saved(mtbf_s, save_s, interval_s, saves)
    return mtbf_s * -expm1(-ends_in_s / mtbf_s) / work_s if work_s > 0 else inf


def whole_steps(interval_s: float, step_s: float) -> int:
    """Return the whole steps of `step_s` in the interval, at least 1. Rounding down allows for floating-point error."""
    return max(1, int(min(interval_s / step_s * (1 + 1e-12), _MOST_STEPS)))


def _saved(mtbf_s: float, save_s: float, interval_s: float, saves: int) -> float:
    """Return the expected work that is saved, in at most `saves` saves, before the first interruption."""
    part = (interval_s + save_s) / mtbf_s
    try:
        return interval_s * -expm1(-saves * part) / expm1(part)
    except OverflowError:
        return 0.0


def _peak(value: Callable[[float], float], most: float) -> float:
    """Return the maximizer of a unimodal function between 0 and `most`, by ternary search."""
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        one, other = low + (high - low) / 3, high - (high - low) / 3
        if value(one) < value(other):
            low = one
        else:
            high = other
    return most if value(most) >= value((low + high) / 2) else (low + high) / 2


def check_above_zero(**given_s: float | None) -> None:
    """Raise ValueError, with the argument's name, if seconds are not finite or not above 0. None is valid."""
    for name, value in given_s.items():
        if value is not None and not 0 < value < inf:
            raise ValueError(f"{name}={value}: must be more than 0 seconds")


def check_not_negative(**given_s: float | None) -> None:
    """Raise ValueError, with the argument's name, if seconds are not finite or below 0. None is valid."""
    for name, value in given_s.items():
        if value is not None and not 0 <= value < inf:
            raise ValueError(f"{name}={value}: must be 0 or more seconds")
