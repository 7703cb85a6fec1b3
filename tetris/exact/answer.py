"""What the exact method is asked for and answers."""

from dataclasses import dataclass

from tetris.columns import Ints


class TooLarge(ValueError):
    """An instance that this method does not take; says what there is too much of, and what to use."""


@dataclass(frozen=True, slots=True)
class ExactProgress:
    """How far the search is."""

    elapsed_s: float
    excess: float
    """Of the best plan so far: what is minimised first."""
    total: float
    """Of the same."""
    bound: float
    """No plan that may be chosen costs less."""
    nodes: int


@dataclass(frozen=True, slots=True)
class ExactAnswer:
    """The best plan found, and what is known about all others."""

    home: Ints
    """[T]"""
    total: float
    excess: float
    """Relative excess of the plan over the limits; 0 where it breaks none."""
    bound: float
    """A lower bound of `total` over the allowed plans with no more excess than this one."""
    proved: bool
    """No allowed plan has less excess, and none with as little costs less (but for a part of 1e-9)."""
    limit: str
    """What ended the search before a proof: `time`, `stopped`, or nothing."""
    nodes: int
    """Tables decided by the branch and bound."""
