"""Tenants' contested use over the fair-share window, updated incrementally with each attempt (MAST 4.2).

A tenant's cumulative use is a piecewise linear function of its contested time. Its slope changes only when an attempt
begins or ends. The use in the window is the cumulative use at its end minus that at its start. Two cursors, one at each
end, only move forward over the changes of slope. Times are whole microseconds, so no rounding errors accumulate.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from gms.shares import ContestedTime

Amount = tuple[int, int]
"""GPU slots and thousandths of a core."""


@dataclass
class _Line:
    """A tenant's cumulative use after the last change of slope: `slope * t + base`.

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


class _Cursor:
    """The cumulative use of all tenants at a time that only moves forward."""

    def __init__(self, contested: ContestedTime) -> None:
        self._contested = contested
        self._lines: dict[str, _Line] = defaultdict(_Line)
        self._bends: list[tuple[int, str, Amount]] = []
        """The pending changes of slope, earliest first."""

    def bend(self, at_us: int, tenant: str, by: Amount) -> None:
        heapq.heappush(self._bends, (at_us, tenant, by))

    def go(self, t_us: int) -> None:
        while self._bends and self._bends[0][0] <= t_us:
            at_us, tenant, by = heapq.heappop(self._bends)
            self._lines[tenant].bend(self._of(tenant, at_us), by)

    def used(self, tenant: str, t_us: int) -> Amount:
        """Returns the cumulative use of a tenant at `t_us`, to which the cursor has moved."""
        line = self._lines.get(tenant)
        return (0, 0) if line is None else line.at(self._of(tenant, t_us))

    def _of(self, tenant: str, t_us: int) -> int:
        return int(self._contested.at(tenant, t_us))


class Usage:
    """The use of each tenant over a sliding window of `window_us` microseconds. Time never moves backward."""

    def __init__(self, window_us: int, contested: ContestedTime) -> None:
        """`contested`: use at other times does not count. It may be continued, but not changed for past times."""
        self._window_us = window_us
        self._now_us = 0
        self._end, self._start = _Cursor(contested), _Cursor(contested)

    def began(self, tenant: str, at_us: int, holds: Amount) -> None:
        """Adds an attempt that holds resources since `at_us`, which may be in the past."""
        self._bend(tenant, at_us, holds)

    def ended(self, tenant: str, at_us: int, holds: Amount) -> None:
        """Counts an attempt's resources as released at `at_us`. If this is its start, it does not count at all."""
        self._bend(tenant, at_us, (-holds[0], -holds[1]))

    def _bend(self, tenant: str, at_us: int, by: Amount) -> None:
        if any(by):
            self._end.bend(at_us, tenant, by)
            self._start.bend(at_us, tenant, by)

    def averages(self, now_us: int, tenants: Iterable[str]) -> dict[str, tuple[float, float]]:
        """Returns each tenant's average contested use over the window: GPU slots and thousandths of a core."""
        self._now_us = max(self._now_us, now_us)
        start_us = self._now_us - self._window_us
        self._end.go(self._now_us)
        self._start.go(start_us)
        out = {}
        for tenant in tenants:
            upto, before = self._end.used(tenant, self._now_us), self._start.used(tenant, start_us)
            out[tenant] = (upto[0] - before[0]) / self._window_us, (upto[1] - before[1]) / self._window_us
        return out
