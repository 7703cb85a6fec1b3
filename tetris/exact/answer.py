"""Progress, result and error of the exact method."""

from dataclasses import dataclass

from tetris.columns import Ints


class TooLarge(ValueError):
    """The instance is too large for the exact method. The message names the exceeded limit and an alternative."""


@dataclass(frozen=True, slots=True)
class ExactProgress:
    """Progress of the search."""

    elapsed_s: float
    excess: float
    """Relative excess of the best plan so far, which is minimised first."""
    total: float
    """Objective of the best plan so far."""
    bound: float
    """Lower bound of the objective of all allowed plans with at most this excess."""
    nodes: int


@dataclass(frozen=True, slots=True)
class ExactAnswer:
    """The best plan found, and a lower bound for all other plans."""

    home: Ints
    """[T] home regions."""
    total: float
    excess: float
    """Relative excess of the plan over the limits; 0 if it violates none."""
    bound: float
    """Lower bound of the total of all allowed plans with at most this excess."""
    proved: bool
    """Whether it is proved that no allowed plan has less excess, or equal excess and a smaller total (within 1e-9)."""
    limit: str
    """What ended the search before a proof: `time`, `stopped`, or an empty string."""
    nodes: int
    """Number of branching decisions."""
