"""Chance: each draw is a hash of the seed, what is drawn, and for whom. No order of events changes it.

So a filtered trace, another policy or another fleet draws the same for a workload that is in both.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import TypeVar

T = TypeVar("T")


def chance(seed: int, what: str, whose: str) -> float:
    """A number in (0, 1), uniformly distributed over whom it is for."""
    digest = blake2b(f"{seed}\0{what}\0{whose}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 11) + 0.5) / (1 << 53)


def pick(at: float, weights: Mapping[T, float]) -> T:
    """The one of `weights` in whose part of their sum `at` (0..1) falls, in the order in which they are given.

    Raises:
        ValueError: no weight is above 0.
    """
    chosen = [(key, weight) for key, weight in weights.items() if weight > 0]
    if not chosen:
        raise ValueError("nothing to pick from: no weight is above 0")
    ends = list(accumulate(weight for _, weight in chosen))
    return chosen[min(bisect_right(ends, at * ends[-1]), len(chosen) - 1)][0]


def sample(seed: int, what: str, whose: str, among: Sequence[str], count: int) -> tuple[str, ...]:
    """`count` different ones of `among` (all if there are fewer), sorted by name.

    Each gets a number by its own name, and the lowest are taken: one more to choose from moves no other.
    """
    by_number = sorted(among, key=lambda one: (chance(seed, f"{what}\0{one}", whose), one))
    return tuple(sorted(by_number[:count]))
