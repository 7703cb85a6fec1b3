"""What a search may spend: effort, which is counted, and the time by which it must end.

Effort ends a search on a machine that is as fast as `EVALUATIONS_PER_S`: its plan is then the same in every run. On a
slower or busier machine the clock ends it, and its plan is not reproducible.
"""

import time
from collections.abc import Callable
from pathlib import Path

EVALUATIONS_PER_S = 20e6
"""Jobs and regions that one core weighs in a second: turns seconds into effort."""
OVERRUN = 1.1
"""A search ends by the clock after this many times its budget, unless it is told to end earlier."""
_PROCESS = 1.35
"""The same for a whole process: what follows the search has to fit below 1.5."""
_AFTER = 0.25
"""The time reserved for what follows the search, in parts of the time from the process's start to the search."""
_LEAST_S = 1.0
"""A search gets this time, or its whole budget if that is less, even if starting took all there was."""


class Budget:
    """The effort and the time of one search."""

    def __init__(self, time_s: float, clock: Callable[[], float], ends_s: float | None = None) -> None:
        """`ends_s`: when to end at the latest, on `clock`."""
        self.evaluations = time_s * EVALUATIONS_PER_S
        self._clock = clock
        self._began_s = clock()
        latest_s = self._began_s + time_s * OVERRUN
        self._ends_s = latest_s if ends_s is None else min(ends_s, latest_s)

    def part(self, evaluations: float) -> float:
        """How much of the budget is spent: of the effort or of the time, whichever is more; 1 or more at its end."""
        return max(evaluations / self.evaluations, self.part_of_time) if self.evaluations else 1.0

    def left(self, evaluations: float) -> float:
        """The effort that is left, or that there is time for if that is less."""
        return max(1.0 - self.part(evaluations), 0.0) * self.evaluations

    @property
    def part_of_time(self) -> float:
        """How much of the time is over; 1 or more at its end."""
        whole_s = self._ends_s - self._began_s
        return self.elapsed_s / whole_s if whole_s > 0 else 1.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds until the search must end; 0 if that has passed."""
        return max(self._ends_s - self._clock(), 0.0)


def process_deadline_s(time_s: float) -> float:
    """When a search must end, on `time.monotonic()`, so that its process ends within 1.5 times `time_s` of its start.

    What follows the search (explaining moves, writing) takes longer on a busy machine, as starting did: the time
    reserved for it is in proportion to that.
    """
    now_s, age_s = time.monotonic(), _process_age_s()
    return max(now_s - age_s + _PROCESS * time_s - _AFTER * age_s, now_s + min(time_s, _LEAST_S))


def _process_age_s() -> float:
    """Seconds since this process was started, its interpreter's start and imports included."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = float(fields[19]) / _TICKS_PER_S
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began_s, 0.0)
    except (OSError, AttributeError):
        # Not Linux: the start of the interpreter is missing.
        return time.monotonic() - _IMPORTED_S


_TICKS_PER_S = 100.0
"""USER_HZ: what Linux counts starts of processes in, on every architecture that Python runs on."""
_IMPORTED_S = time.monotonic()
