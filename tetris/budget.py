"""The cooling of a walk, and the budget of a search: an effort limit in evaluations, and a limit of CPU time.

Usually the effort limit ends the search, and a seed and a budget determine the plan. Only on a machine that needs more
than `OVERRUN` times the budget for this effort, the CPU time ends the search, and the plan is not reproducible. CPU
time does not depend on what else the machine does; with a clock of real time, a search on a busy machine would end
before it has begun.
"""

from collections.abc import Callable
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


EVALUATIONS_PER_S = 20e6
"""Evaluations (jobs and regions) per second on one core; converts seconds to effort."""
OVERRUN = 2.0
"""Limit of the CPU time of a search as a multiple of its budget, unless the caller gives an earlier one. A core that
shares its caches and units with busy cores needed 1.7 times the budget for the effort."""


class Budget:
    """Effort limit and time limit of one search."""

    def __init__(self, time_s: float, clock: Callable[[], float], ends_s: float | None = None) -> None:
        """`ends_s`: deadline on `clock`."""
        self.evaluations = time_s * EVALUATIONS_PER_S
        self._clock = clock
        self._began_s = clock()
        latest_s = self._began_s + time_s * OVERRUN
        self._ends_s = latest_s if ends_s is None else min(ends_s, latest_s)

    def part(self, evaluations: float) -> float:
        """Returns the spent fraction of the effort or of the time, whichever is larger; 1 or more at the end."""
        return max(evaluations / self.evaluations, self.part_of_time) if self.evaluations else 1.0

    def left(self, evaluations: float) -> float:
        """Returns the remaining effort in evaluations, reduced if the remaining time is shorter."""
        return max(1.0 - self.part(evaluations), 0.0) * self.evaluations

    @property
    def part_of_time(self) -> float:
        """Elapsed fraction of the time limit; 1 or more at its end."""
        whole_s = self._ends_s - self._began_s
        return self.elapsed_s / whole_s if whole_s > 0 else 1.0

    @property
    def elapsed_s(self) -> float:
        """Seconds of the clock since the search began."""
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds until the time limit; 0 after it."""
        return max(self._ends_s - self._clock(), 0.0)
