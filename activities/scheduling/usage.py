"""Tenants' resource use over the fair-share window, updated incrementally with each attempt (MAST 4.2).

A tenant's cumulative use is a piecewise linear function of time. Its slope changes only when an attempt begins or ends.
The use in the window is the cumulative use at its end minus that at its start. Two cursors, one at each end, only move
forward over the changes of slope. Times are whole microseconds, so no rounding errors accumulate.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = defaultdict(_Line)
        self._bends: list[tuple[int, str, Amount]] = []
        """The pending changes of slope, earliest first."""

    def bend(self, at_us: int, tenant: str, by: Amount) -> None:
        heapq.heappush(self._bends, (at_us, tenant, by))

    def go(self, t_us: int) -> Mapping[str, _Line]:
        while self._bends and self._bends[0][0] <= t_us:
            at_us, tenant, by = heapq.heappop(self._bends)
            self._lines[tenant].bend(at_us, by)
        return self._lines


class Usage:
    """The use of each tenant over a sliding window of `window_us` microseconds. Time never moves backward."""

    def __init__(self, window_us: int) -> None:
        self._window_us = window_us
        self._now_us = 0
        self._end, self._start = _Cursor(), _Cursor()

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

    def shares(self, now_us: int, fleet: Amount, tenants: Iterable[str]) -> dict[str, float]:
        """Returns each tenant's average use over the window: the larger of its shares of the fleet's GPUs and CPUs.

        The share of a resource that the fleet does not have is 0.
        """
        self._now_us = max(self._now_us, now_us)
        start_us = self._now_us - self._window_us
        end, start, none = self._end.go(self._now_us), self._start.go(start_us), _Line()
        out = {}
        for tenant in tenants:
            upto, before = end.get(tenant, none).at(self._now_us), start.get(tenant, none).at(start_us)
            used = (after - earlier for after, earlier in zip(upto, before, strict=True))
            out[tenant] = max(u / (self._window_us * has) if has else 0.0 for u, has in zip(used, fleet, strict=True))
        return out
