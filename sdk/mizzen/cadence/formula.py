"""The interval that wastes least: Young's square root, and Daly's higher-order form where a save is not short.

Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006. The interval is the work between two
saves, in seconds, without the saves themselves.
"""

from math import expm1, inf, isfinite, sqrt
from typing import Literal, TypeAlias

Rule: TypeAlias = Literal["young", "daly", "mtbf"]

SMALL = 0.01
"""Up to this part of the mean time between interruptions a save is short, and Young's form is taken.

Young's interval is then at most 5% too long, which costs less than one part in 5,000 of the time.
"""

_MOST_STEPS = 1e15


def best_interval_s(mtbf_s: float, save_s: float) -> tuple[float, Rule]:
    """Seconds of work between two saves, and the form that gave them.

    Never shrinks where `mtbf_s` or `save_s` grows. Each form starts below where the one before it ends, and Daly's ends
    below what follows it; there the value at the joint is kept, which is nearer to the optimum than a step would be.

    Args:
        mtbf_s: mean time between interruptions of the whole gang, above 0.
        save_s: what one save costs the training, 0 or more.

    Raises:
        ValueError: a number is out of its range.
    """
    _check(mtbf_s, save_s)
    if save_s <= SMALL * mtbf_s:
        return sqrt(2 * mtbf_s) * sqrt(save_s), "young"
    if save_s >= 2 * mtbf_s:
        return mtbf_s, "mtbf"
    part = save_s / (2 * mtbf_s)
    daly_s = sqrt(2 * save_s) * sqrt(mtbf_s) * (1 + sqrt(part) / 3 + part / 9) - save_s
    return max(daly_s, sqrt(2 * SMALL) * mtbf_s, save_s / 2), "daly"


def expected_time(mtbf_s: float, save_s: float, interval_s: float) -> float:
    """Seconds that a second of work takes, with interruptions at random instants (exponential) and no time to restart.

    Daly's complete cost function, (mtbf / interval) * (exp((interval + save) / mtbf) - 1): infinite where nothing would
    ever get done.

    Raises:
        ValueError: a number is out of its range.
    """
    _check(mtbf_s, save_s)
    if not interval_s > 0:
        raise ValueError(f"interval_s={interval_s}: must be more than 0 seconds")
    try:
        return mtbf_s / interval_s * expm1((interval_s + save_s) / mtbf_s)
    except OverflowError:
        return inf


def whole_steps(interval_s: float, step_s: float) -> int:
    """Steps of `step_s` in the interval, rounded down, at least 1. What float division loses is not a step's worth."""
    return max(1, int(min(interval_s / step_s * (1 + 1e-12), _MOST_STEPS)))


def _check(mtbf_s: float, save_s: float) -> None:
    if not (mtbf_s > 0 and isfinite(mtbf_s)):
        raise ValueError(f"mtbf_s={mtbf_s}: must be a number of seconds, more than 0")
    if not (save_s >= 0 and isfinite(save_s)):
        raise ValueError(f"save_s={save_s}: must be 0 or more seconds")
