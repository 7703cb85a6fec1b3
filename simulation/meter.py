"""The metrics of a run: GPU hours, waits, objectives and preemptions, in total and per hour.

Each event is counted in the hour in which it happens, so the figures of a span are sums over its hours.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

import numpy as np

from simulation.settings import LEVELS

HOUR_S = 3600.0
QUOTAS = ("within_quota", "over_quota", "all")
ALL = "all"
PERCENTILES = (50, 95, 99)


UNTIL = ("award", "start")
"""The events that end waits: the award is the scheduler's decision; at the start, all tasks run."""

StopCause = Literal["preemptions", "interruptions", "moves", "growths"]
"""Why a workload was stopped: an eviction, the loss of a machine, or a move. Each is a count of `Hour`."""


@dataclass
class MeasuredWaits:
    """Waits from the submission, or from the notice of an eviction, until an event of `UNTIL`.

    Keys are (level, over quota).
    """

    judged: dict[tuple[int, bool], int] = field(default_factory=lambda: defaultdict(int))
    """Number of objectives that were met or missed."""
    missed: dict[tuple[int, bool], int] = field(default_factory=lambda: defaultdict(int))
    waits_s: dict[tuple[int, bool], list[float]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class Hour:
    """The figures of one hour of a run, or of the whole measured span."""

    held_gpu_s: float = 0.0
    supply_gpu_s: float = 0.0
    saturated_held_gpu_s: float = 0.0
    saturated_supply_gpu_s: float = 0.0
    queued_gpu_s: float = 0.0
    until: dict[str, MeasuredWaits] = field(default_factory=lambda: {until: MeasuredWaits() for until in UNTIL})
    arrived: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Number of workloads that arrived, by level."""
    non_colocated: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Number of arrived workloads for which no region has both data and hardware, by level (MAST 5.3)."""
    preemptions: int = 0
    interruptions: int = 0
    """Number of workloads that left because a cloud reclaimed, or a pool terminated, one of their machines."""
    growths: int = 0
    """Number of elastic workloads that were stopped to continue with more tasks."""
    moves: int = 0
    """Number of workloads that were moved, so that whole machines became free."""
    usd: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Cost of machines in US dollars, by capacity kind."""
    lost_gpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """GPU-seconds by cause: repeated `work`, slots held during an `eviction`, or during a `restart`'s provisioning."""


class Meter:
    """Accumulates the figures. Totals cover `from_s <= t < to_s`; the hours cover the whole run."""

    def __init__(self, supply: Mapping[str, int], from_s: float = 0.0, to_s: float = inf) -> None:
        self.supply = dict(supply)
        """Slots at the start by GPU type, with an entry for every type that may appear later."""
        self.types = tuple(self.supply)
        self.slots = [self.supply[t] for t in self.types]
        """Present slots, in the order of `types`.

        Call `advance` before each change of `slots`, `held`, `queued`, `queued_gpus` or `usd_per_h`.
        """
        self._from_s, self._to_s = from_s, to_s
        self._now_s = 0.0
        self.held = [0] * len(self.types)
        """Slots that workloads hold, in the order of `types`."""
        self.queued = [0] * len(self.types)
        """Slots that queued workloads request, in the order of `types`; a workload counts for each type it accepts."""
        self.queued_gpus = 0
        """Slots that queued workloads request; each workload is counted once."""
        self.usd_per_h: dict[str, float] = defaultdict(float)
        """Hourly cost of all present machines, by capacity kind."""
        self.hours: list[Hour] = []
        self.total = Hour()

    def advance(self, now_s: float) -> None:
        """Advances the clock, and adds the GPU time and costs since the last call at the present amounts."""
        while self._now_s < now_s:
            hour_ends_s = (int(self._now_s // HOUR_S) + 1) * HOUR_S
            edge_s = next((e for e in (self._from_s, self._to_s) if self._now_s < e < hour_ends_s), hour_ends_s)
            until_s = min(now_s, edge_s)
            span_s = until_s - self._now_s
            for hour in self._into(self._now_s):
                hour.queued_gpu_s += self.queued_gpus * span_s
                for kind, usd_per_h in self.usd_per_h.items():
                    hour.usd[kind] += usd_per_h * span_s / HOUR_S
                for slots, held, queued in zip(self.slots, self.held, self.queued, strict=True):
                    hour.held_gpu_s += held * span_s
                    hour.supply_gpu_s += slots * span_s
                    if queued > slots - held:
                        hour.saturated_held_gpu_s += held * span_s
                        hour.saturated_supply_gpu_s += slots * span_s
            self._now_s = until_s

    def arrive(self, now_s: float, level: int, non_colocated: bool) -> None:
        """Counts the arrival of a workload; `non_colocated`: no region has both its data and its hardware."""
        for hour in self._into(now_s):
            hour.arrived[level] += 1
            hour.non_colocated[level] += non_colocated

    def judge(self, now_s: float, until: str, level: int, over_quota: bool, missed: bool) -> None:
        """Counts an objective that was met (the workload was awarded, or started, in time) or missed."""
        for hour in self._into(now_s):
            hour.until[until].judged[level, over_quota] += 1
            hour.until[until].missed[level, over_quota] += missed

    def wait(self, now_s: float, until: str, level: int, over_quota: bool, wait_s: float) -> None:
        """Records the wait of a workload that was awarded (or started)."""
        for hour in self._into(now_s):
            hour.until[until].waits_s[level, over_quota].append(wait_s)

    def stop(self, now_s: float, what: StopCause, work_gpu_s: float, eviction_gpu_s: float) -> None:
        """Counts a workload that was stopped before its end."""
        for hour in self._into(now_s):
            setattr(hour, what, getattr(hour, what) + 1)
            hour.lost_gpu_s["work"] += work_gpu_s
            hour.lost_gpu_s["eviction"] += eviction_gpu_s

    def restart(self, now_s: float, gpu_s: float) -> None:
        """Adds the GPU-seconds during which a restarted workload was provisioned."""
        for hour in self._into(now_s):
            hour.lost_gpu_s["restart"] += gpu_s

    def _into(self, at_s: float) -> Iterable[Hour]:
        number = int(at_s // HOUR_S)
        while len(self.hours) <= number:
            self.hours.append(Hour())
        yield self.hours[number]
        if self._from_s <= at_s < self._to_s:
            yield self.total


# ------------------------------------------------------------------------------------------------------------- figures


def ratio(part: float, whole: float) -> float | None:
    """Returns `part / whole`, rounded to 6 digits; None if `whole` is 0."""
    return round(part / whole, 6) if whole else None


def allocation_rate(hour: Hour) -> float | None:
    """Returns the GPU hours held divided by the GPU hours available."""
    return ratio(hour.held_gpu_s, hour.supply_gpu_s)


def saturated_allocation_rate(hour: Hour) -> float | None:
    """Returns the allocation rate of GPU types, while more slots of a type are requested than free."""
    return ratio(hour.saturated_held_gpu_s, hour.saturated_supply_gpu_s)


def cells(quota: str, level: str) -> list[tuple[int, bool]]:
    """Returns the (level, over quota) keys whose values a table cell sums up."""
    levels: Sequence[int] = LEVELS if level == ALL else (int(level),)
    overs = {"within_quota": (False,), "over_quota": (True,), ALL: (False, True)}[quota]
    return [(number, over) for number in levels for over in overs]


def table_keys() -> list[tuple[str, str]]:
    """Returns the (quota status, priority) pairs of all cells of a table."""
    return [(quota, level) for quota in QUOTAS for level in (*map(str, LEVELS), ALL)]


def count(of: Mapping[tuple[int, bool], int], quota: str, level: str) -> int:
    """Returns the value of a cell in a table of counts."""
    return sum(of.get(key, 0) for key in cells(quota, level))


def by_level(of: Mapping[int, int]) -> dict[str, int]:
    """Returns the count of each priority, and of `all`."""
    return {**{str(level): of.get(level, 0) for level in LEVELS}, ALL: sum(of.values())}


def miss_rate(waits: MeasuredWaits, quota: str, level: str) -> float | None:
    """Returns the missed objectives divided by the judged ones; None if none was judged."""
    return ratio(count(waits.missed, quota, level), count(waits.judged, quota, level))


def wait_percentiles(of: MeasuredWaits, quota: str, level: str) -> dict[str, float | None]:
    """Returns the percentiles of waits in seconds, each an observed wait (no interpolation); None if there is none."""
    waits: list[float] = []
    for key in cells(quota, level):
        waits.extend(of.waits_s.get(key, ()))
    if not waits:
        return {f"p{p}": None for p in PERCENTILES}
    values = np.percentile(np.array(waits), PERCENTILES, method="inverted_cdf")
    return {f"p{p}": round(float(value), 3) for p, value in zip(PERCENTILES, values, strict=True)}
