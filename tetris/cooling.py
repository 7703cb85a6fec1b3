"""Cooling schedules of simulated annealing walks."""

from dataclasses import dataclass

_HOT, _COLD = 0.8, 0.016
"""First and last temperature of a long walk, as fractions of the mean change of the objective when one table moves in
the plan of the greedy passes. Pairs were compared with 4 s on three shapes (300 and 2,000 dense tables, 2,000 tables
with projects). The best were 0.2 to 1 and 0.010 to 0.02, although as fractions of the total they differed by a factor
of 15.
"""
_TAIL, _TAIL_RANGE = 0.15, 1 / 30
"""Fraction of a walk that cools quickly below `cold`, and its last temperature as a fraction of `cold`."""


@dataclass(frozen=True, slots=True)
class Cooling:
    """A geometric cooling schedule: from `hot` to `cold` for most of the walk, then quickly below `cold`."""

    hot: float
    cold: float

    @classmethod
    def of_long_walk(cls, change: float) -> "Cooling":
        """Returns the schedule of a long walk.

        `change` is the mean change of the objective when one table moves in the plan of the greedy passes.
        """
        return cls(_HOT * change, _COLD * change)

    def at(self, done: float) -> float:
        """Returns the temperature at a fraction `done` (0 to 1) of the walk."""
        if done < 1 - _TAIL:
            return float(self.hot * (self.cold / self.hot) ** (done / (1 - _TAIL)))
        return float(self.cold * _TAIL_RANGE ** ((min(done, 1.0) - 1 + _TAIL) / _TAIL))
