"""Draws from weights and from names, by the random numbers of `simulation.random_draws`."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from simulation.random_draws import chance

T = TypeVar("T")


def pick(at: float, weights: Mapping[T, float]) -> T:
    """Returns the key whose interval contains `at` if [0, 1] is split in proportion to `weights`, in their order.

    Raises:
        ValueError: no weight is above 0.
    """
    chosen = [(key, weight) for key, weight in weights.items() if weight > 0]
    if not chosen:
        raise ValueError("weights: at least one must be above 0")
    ends = list(accumulate(weight for _, weight in chosen))
    return chosen[min(bisect_right(ends, at * ends[-1]), len(chosen) - 1)][0]


def sample(seed: int, what: str, whose: str, among: Sequence[str], count: int) -> tuple[str, ...]:
    """Returns `count` different names of `among` (all if there are fewer), sorted by name.

    Each name gets a random number of its own, and the names with the lowest numbers are taken. So a name that is added
    to `among` does not change the order of the others.
    """
    by_number = sorted(among, key=lambda one: (chance(seed, f"{what}\0{one}", whose), one))
    return tuple(sorted(by_number[:count]))
