"""What tenants used over the window that fair shares are about, kept up to date attempt by attempt (MAST 4.2).

Use up to a moment grows on straight lines that bend only where an attempt begins or ends. Use in the window is that up
to its end less that up to its start, and each of the two only ever has to pass the bends that time brought. Everything
is counted in whole microseconds: nothing is lost, however long it goes on.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Amount = tuple[int, int]
"""GPU slots and thousandths of a core."""


@dataclass
class _Line:
    """A tenant's use from the last bend on: `slope * t + base`, in GPU- and thousandth-core-microseconds."""

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
    """All tenants' use up to a moment that only goes forward."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = defaultdict(_Line)
        self._bends: list[tuple[int, str, Amount]] = []
        """To come, soonest first."""

    def bend(self, at_us: int, tenant: str, by: Amount) -> None:
        heapq.heappush(self._bends, (at_us, tenant, by))

    def go(self, t_us: int) -> Mapping[str, _Line]:
        while self._bends and self._bends[0][0] <= t_us:
            at_us, tenant, by = heapq.heappop(self._bends)
            self._lines[tenant].bend(at_us, by)
        return self._lines


class Usage:
    """Use by tenant over a moving window of `window_us` microseconds. Time never goes back."""

    def __init__(self, window_us: int) -> None:
        self._window_us = window_us
        self._now_us = 0
        self._end, self._start = _Cursor(), _Cursor()

    def began(self, tenant: str, at_us: int, holds: Amount) -> None:
        """An attempt began to hold something, whenever that was."""
        self._bend(tenant, at_us, holds)

    def ended(self, tenant: str, at_us: int, holds: Amount) -> None:
        """An attempt that began holds nothing any more. At the time of its beginning: it never was."""
        self._bend(tenant, at_us, (-holds[0], -holds[1]))

    def _bend(self, tenant: str, at_us: int, by: Amount) -> None:
        if any(by):
            self._end.bend(at_us, tenant, by)
            self._start.bend(at_us, tenant, by)

    def shares(self, now_us: int, fleet: Amount, tenants: Iterable[str]) -> dict[str, float]:
        """Each tenant's use averaged over the window: the larger of its share of the fleet's GPUs and of its CPUs.

        A fleet without GPUs (CPUs) has no share of them.
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
