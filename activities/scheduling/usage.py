"""Use of tenants and people over the fair-share window, updated incrementally with each attempt (MAST 4.2).

The cumulative use is a piecewise linear function of the time that counts: the contested time of a tenant, or all time.
Its slope changes only when an attempt begins or ends. The use in the window is the cumulative use at its end minus that
at its start. Two cursors, one at each end, only move forward over the changes of slope. Times are whole microseconds,
so no rounding errors accumulate.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Owner = TypeVar("Owner")
Amount = tuple[int, int]
"""GPU slots and thousandths of a core."""


@dataclass
class _Line:
    """Cumulative use after the last change of slope: `slope * t + base`.

    The units are GPU-microseconds and thousandth-core-microseconds.
    """

    slope: list[int] = field(default_factory=lambda: [0, 0])
    base: list[int] = field(default_factory=lambda: [0, 0])

    def bend(self, at_us: int, by: Amount) -> None:
        for kind, change in enumerate(by):
            self.slope[kind] += change
            self.base[kind] -= change * at_us

    def at(self, t_us: int) -> Amount:
        gpus, cpus = (slope * t_us + base for slope, base in zip(self.slope, self.base, strict=True))
        return gpus, cpus


class _Cursor(Generic[Owner]):
    """The cumulative use of all owners at a time that only moves forward."""

    def __init__(self, clock: Callable[[Owner, int], float]) -> None:
        self._clock = clock
        self._lines: dict[Owner, _Line] = defaultdict(_Line)
        self._bends: list[tuple[int, Owner, Amount]] = []
        """The pending changes of slope, earliest first."""

    def bend(self, at_us: int, owner: Owner, by: Amount) -> None:
        heapq.heappush(self._bends, (at_us, owner, by))

    def go(self, t_us: int) -> None:
        while self._bends and self._bends[0][0] <= t_us:
            at_us, owner, by = heapq.heappop(self._bends)
            self._lines[owner].bend(self._of(owner, at_us), by)

    def used(self, owner: Owner, t_us: int) -> Amount:
        """Returns the cumulative use of an owner at `t_us`, to which the cursor has moved."""
        line = self._lines.get(owner)
        return (0, 0) if line is None else line.at(self._of(owner, t_us))

    def _of(self, owner: Owner, t_us: int) -> int:
        return int(self._clock(owner, t_us))


class Usage(Generic[Owner]):
    """The use of each owner, a tenant or a person, over a sliding window of `window_us` microseconds.

    Time never moves backward.
    """

    def __init__(self, window_us: int, clock: Callable[[Owner, int], float]) -> None:
        """`clock(owner, t_us)` returns the microseconds up to `t_us` that count for the owner; the past is fixed."""
        self._window_us = window_us
        self._now_us = 0
        self._end, self._start = _Cursor(clock), _Cursor(clock)

    def began(self, owner: Owner, at_us: int, holds: Amount) -> None:
        """Adds an attempt that holds resources since `at_us`, which may be in the past."""
        self._bend(owner, at_us, holds)

    def ended(self, owner: Owner, at_us: int, holds: Amount) -> None:
        """Counts an attempt's resources as released at `at_us`. If this is its start, it does not count at all."""
        self._bend(owner, at_us, (-holds[0], -holds[1]))

    def _bend(self, owner: Owner, at_us: int, by: Amount) -> None:
        if any(by):
            self._end.bend(at_us, owner, by)
            self._start.bend(at_us, owner, by)

    def averages(self, now_us: int, owners: Iterable[Owner]) -> dict[Owner, tuple[float, float]]:
        """Returns each owner's average use over the window: GPU slots and thousandths of a core."""
        self._now_us = max(self._now_us, now_us)
        start_us = self._now_us - self._window_us
        self._end.go(self._now_us)
        self._start.go(start_us)
        out = {}
        for owner in owners:
            upto, before = self._end.used(owner, self._now_us), self._start.used(owner, start_us)
            out[owner] = (upto[0] - before[0]) / self._window_us, (upto[1] - before[1]) / self._window_us
        return out
