"""The temperatures of annealed walks."""

from dataclasses import dataclass

_HOT, _COLD = 0.8, 0.016
"""The long walk's temperatures, in parts of the mean change of the objective by a table's move, in the plan of greedy
passes. Of the pairs that were tried with 4 s on three shapes (300 and 2,000 dense tables, 2,000 with projects) the best
were 0.2 to 1 and 0.010 to 0.02 of it, though they differed by a factor of 15 in parts of the total."""
_TAIL, _TAIL_RANGE = 0.15, 1 / 30
"""The part of a walk that cools on below `cold`, quickly, and to what part of it."""


@dataclass(frozen=True, slots=True)
class Cooling:
    """A walk's temperatures, geometric: from `hot` to `cold` for most of it, then quickly further down."""

    hot: float
    cold: float

    @classmethod
    def of_long_walk(cls, change: float) -> "Cooling":
        """Those for a long walk, by what a table's move changes in the plan of greedy passes, on average."""
        return cls(_HOT * change, _COLD * change)

    def at(self, done: float) -> float:
        """The temperature when so much of the walk (0..1) is done."""
        if done < 1 - _TAIL:
            return float(self.hot * (self.cold / self.hot) ** (done / (1 - _TAIL)))
        return float(self.cold * _TAIL_RANGE ** ((min(done, 1.0) - 1 + _TAIL) / _TAIL))
