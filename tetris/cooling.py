"""The temperatures of annealed walks."""

from dataclasses import dataclass

_HOT, _COLD = 5e-3, 5e-6
"""The long walk's temperatures, in parts of the total that greedy passes reach, for `_TABLES` tables: the best of five
pairs that were tried with 10 s, not each on every shape of the suite `tetris-annealing`."""
_TABLES = 1000.0
_TAIL, _TAIL_RANGE = 0.15, 1 / 30
"""The part of a walk that cools on below `cold`, quickly, and to what part of it."""


@dataclass(frozen=True, slots=True)
class Cooling:
    """A walk's temperatures, geometric: from `hot` to `cold` for most of it, then quickly further down."""

    hot: float
    cold: float

    @classmethod
    def of_long_walk(cls, total: float, tables: int) -> "Cooling":
        """Those for a long walk over so many tables, by the total that greedy passes reach.

        What one table's move changes is a smaller part of the total where there are more tables.
        """
        scale = total * (_TABLES / tables) ** 0.5
        return cls(_HOT * scale, _COLD * scale)

    def at(self, done: float) -> float:
        """The temperature when so much of the walk (0..1) is done."""
        if done < 1 - _TAIL:
            return float(self.hot * (self.cold / self.hot) ** (done / (1 - _TAIL)))
        return float(self.cold * _TAIL_RANGE ** ((min(done, 1.0) - 1 + _TAIL) / _TAIL))
