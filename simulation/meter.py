"""What a run measures: GPU hours, waits, objectives and preemptions, over the whole run and by the hour.

Every figure is kept by the hour in which it happened, so those of any span are sums over its hours.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from simulation.settings import LEVELS

HOUR_S = 3600.0
QUOTAS = ("within_quota", "over_quota", "all")
ALL = "all"
PERCENTILES = (50, 95, 99)


UNTIL = ("award", "start")
"""What waits end with: what the scheduler decides, and when all tasks work, which is what users feel."""


@dataclass
class Waits:
    """Waits from submission, or from the notice of an eviction, until one of `UNTIL`. Keys are (level, over quota)."""

    judged: dict[tuple[int, bool], int] = field(default_factory=lambda: defaultdict(int))
    """Objectives that were met or missed."""
    missed: dict[tuple[int, bool], int] = field(default_factory=lambda: defaultdict(int))
    waits_s: dict[tuple[int, bool], list[float]] = field(default_factory=lambda: defaultdict(list))


@dataclass
class Hour:
    """One hour of a run."""

    held_gpu_s: float = 0.0
    supply_gpu_s: float = 0.0
    saturated_held_gpu_s: float = 0.0
    saturated_supply_gpu_s: float = 0.0
    queued_gpu_s: float = 0.0
    until: dict[str, Waits] = field(default_factory=lambda: {until: Waits() for until in UNTIL})
    arrived: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Level to workloads that arrived, `non_colocated` of them (MAST 5.3)."""
    non_colocated: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    preemptions: int = 0
    interruptions: int = 0
    """Of workloads, since a machine of theirs went: its cloud took it, or its pool ended it."""
    usd: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By kind of capacity, what machines cost."""
    lost_gpu_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By what was lost: `work` done anew, slots held through an `eviction`, or through a `restart`'s provisioning."""


class Meter:
    """Adds up. Only what happens in `from_s <= t < to_s` counts in the totals; the hours have all."""

    def __init__(self, supply: Mapping[str, int], from_s: float = 0.0, to_s: float = inf) -> None:
        self.supply = dict(supply)
        """Slots by type at the start; every type that there may be is named."""
        self.types = tuple(self.supply)
        self.slots = [self.supply[t] for t in self.types]
        """Slots that there are, by type; whoever changes it calls `advance` first. So are `held`, `queued` and the
        costs."""
        self._from_s, self._to_s = from_s, to_s
        self._now_s = 0.0
        self.held = [0] * len(self.types)
        """Slots that somebody holds, by type."""
        self.queued = [0] * len(self.types)
        """Slots that pending workloads ask for, by type; one that may run on several types asks for each."""
        self.queued_gpus = 0
        """The same, each workload counted once."""
        self.usd_per_h: dict[str, float] = defaultdict(float)
        """By kind of capacity, what an hour of all machines costs that are there."""
        self.hours: list[Hour] = []
        self.total = Hour()

    def advance(self, now_s: float) -> None:
        """Time passes, with what is held and queued as it has been."""
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
        """A workload is there; `non_colocated`: no region has both its data and its hardware."""
        for hour in self._into(now_s):
            hour.arrived[level] += 1
            hour.non_colocated[level] += non_colocated

    def judge(self, now_s: float, until: str, level: int, over_quota: bool, missed: bool) -> None:
        """A workload with an objective was awarded (or started) in time, or its time ran out."""
        for hour in self._into(now_s):
            hour.until[until].judged[level, over_quota] += 1
            hour.until[until].missed[level, over_quota] += missed

    def wait(self, now_s: float, until: str, level: int, over_quota: bool, wait_s: float) -> None:
        """A workload was awarded (or started) that had waited so long."""
        for hour in self._into(now_s):
            hour.until[until].waits_s[level, over_quota].append(wait_s)

    def preempt(self, now_s: float, work_gpu_s: float, eviction_gpu_s: float, *, by_machine: bool = False) -> None:
        """A workload was evicted; or (`by_machine`) a machine of its own goes."""
        for hour in self._into(now_s):
            hour.preemptions += not by_machine
            hour.interruptions += by_machine
            hour.lost_gpu_s["work"] += work_gpu_s
            hour.lost_gpu_s["eviction"] += eviction_gpu_s

    def restart(self, now_s: float, gpu_s: float) -> None:
        """Slots were held while a workload was provisioned that had been before."""
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
    """`part / whole`, rounded to 6 digits; None where there is no whole."""
    return round(part / whole, 6) if whole else None


def allocation_rate(hour: Hour) -> float | None:
    """GPU hours held over GPU hours available."""
    return ratio(hour.held_gpu_s, hour.supply_gpu_s)


def saturated_allocation_rate(hour: Hour) -> float | None:
    """The same, only of a GPU type's slots while more of it is queued for than is free."""
    return ratio(hour.saturated_held_gpu_s, hour.saturated_supply_gpu_s)


def cells(quota: str, level: str) -> list[tuple[int, bool]]:
    """The (level, over quota) keys that a cell of a table adds up."""
    levels: Sequence[int] = LEVELS if level == ALL else (int(level),)
    overs = {"within_quota": (False,), "over_quota": (True,), ALL: (False, True)}[quota]
    return [(number, over) for number in levels for over in overs]


def table_keys() -> list[tuple[str, str]]:
    """All cells of a table by quota status and priority."""
    return [(quota, level) for quota in QUOTAS for level in (*map(str, LEVELS), ALL)]


def count(of: Mapping[tuple[int, bool], int], quota: str, level: str) -> int:
    """A cell of a table of counts."""
    return sum(of.get(key, 0) for key in cells(quota, level))


def by_level(of: Mapping[int, int]) -> dict[str, int]:
    """A count for each priority, and for `all`."""
    return {**{str(level): of.get(level, 0) for level in LEVELS}, ALL: sum(of.values())}


def miss_rate(waits: Waits, quota: str, level: str) -> float | None:
    """Missed objectives over judged ones; None where none was judged."""
    return ratio(count(waits.missed, quota, level), count(waits.judged, quota, level))


def wait_percentiles(of: Waits, quota: str, level: str) -> dict[str, float | None]:
    """Waits in seconds: the smallest that so many percent do not exceed; None where there was none."""
    waits: list[float] = []
    for key in cells(quota, level):
        waits.extend(of.waits_s.get(key, ()))
    if not waits:
        return {f"p{p}": None for p in PERCENTILES}
    values = np.percentile(np.array(waits), PERCENTILES, method="inverted_cdf")
    return {f"p{p}": round(float(value), 3) for p, value in zip(PERCENTILES, values, strict=True)}
