"""The budget of a search: an effort limit in evaluations, and a limit of CPU time.

Usually the effort limit ends the search, and a seed and a budget determine the plan. Only on a machine that needs more
than `OVERRUN` times the budget for this effort, the CPU time ends the search, and the plan is not reproducible. CPU
time does not depend on what else the machine does; with a clock of real time, a search on a busy machine would end
before it has begun.
"""

from collections.abc import Callable

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
