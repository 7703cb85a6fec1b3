"""The budget of a search: an effort limit in evaluations, and a time limit.

If the machine is at least as fast as `EVALUATIONS_PER_S`, the effort limit ends the search and the plan is
reproducible. On a slower or busier machine the time limit ends the search, and the plan is not reproducible.
"""

import time
from collections.abc import Callable
from pathlib import Path

EVALUATIONS_PER_S = 20e6
"""Evaluations (jobs and regions) per second on one core; converts seconds to effort."""
OVERRUN = 1.1
"""Time limit of a search as a multiple of its budget, unless the caller gives an earlier one."""
_PROCESS = 1.35
"""The same multiple for a whole process. The work after the search must end before 1.5 times the budget."""
_AFTER = 0.25
"""Time reserved for the work after the search, as a fraction of the time from process start to the search."""
_LEAST_S = 1.0
"""Minimum time of a search (or its whole budget if less), even if starting the process took longer than planned."""


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
        """Seconds since the search began."""
        return self._clock() - self._began_s

    @property
    def left_s(self) -> float:
        """Seconds until the time limit; 0 after it."""
        return max(self._ends_s - self._clock(), 0.0)


def process_deadline_s(time_s: float) -> float:
    """Returns the deadline of a search on `time.monotonic()`, so that the process ends within 1.5 times `time_s`.

    The work after the search (explaining moves, writing files) is slower on a busy machine, as is the start of the
    process. So the time reserved for it is proportional to the duration of the start.
    """
    now_s, age_s = time.monotonic(), _process_age_s()
    return max(now_s - age_s + _PROCESS * time_s - _AFTER * age_s, now_s + min(time_s, _LEAST_S))


def _process_age_s() -> float:
    """Returns the seconds since the process was started, including the start of the interpreter and imports."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = float(fields[19]) / _TICKS_PER_S
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began_s, 0.0)
    except (OSError, AttributeError):
        # Not Linux: the time before this module was imported is not included.
        return time.monotonic() - _IMPORTED_S


_TICKS_PER_S = 100.0
"""USER_HZ, the unit of process start times in `/proc` on all Linux architectures that Python supports."""
_IMPORTED_S = time.monotonic()
