"""The expected start of each waiting workload: sampled futures of a list schedule, corrected by past errors."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf, log
from typing import Any

import numpy as np

from domain.priority import OVER_QUOTA_RANK
from gms.starts.calibration import Calibration, Interval, Key
from gms.starts.kernels import F8, I8, FreeMachines, RunningColumns, WaitingColumns, list_schedule
from gms.starts.run_history import Groups, RunHistory

FUTURES = 16
HORIZON_S = 14 * 86400.0
"""Futures end here."""
MOST_ELEMENTS = 10_000
"""Of more elements of an array that are not in the queue, several count as one with their run times together."""
_UNLIMITED = 2**62
NO_MACHINES = FreeMachines(np.empty(0, np.int64), np.empty(0, np.int64))
MOST_OPEN = 2000
"""Maximum number of waiting workloads whose first forecast is kept, to learn from its error."""


@dataclass(frozen=True)
class WaitingDemand:
    """A waiting workload."""

    id: str
    groups: Groups
    rank: int
    level: int
    """Its priority level, which is also its rank while it is within quota."""
    needs: int
    """GPUs, or thousandths of a core without GPUs."""
    pools: int
    """Mask of the pools that may hold it."""
    array: str | None = None
    """The array whose throttle limits it, if it is an element of one."""
    size: int = 0
    """The GPUs of its largest task, which need one machine; 0: it fits wherever its pool has enough."""


@dataclass(frozen=True)
class HeldAmount:
    """A workload that holds slots."""

    id: str
    groups: Groups
    pool: int
    """The number of its pool: a region's slots of one GPU type."""
    amount: int
    since_s: float
    """The time of its award, in seconds since the epoch."""
    ends_by_s: float = inf
    """When its maximum runtime ends, in seconds since the epoch."""
    array: str | None = None
    """The array whose throttle counts it, if it is an element of one."""
    on: tuple[tuple[int, int], ...] | None = None
    """The GPUs that it holds on each machine, as (machine, GPUs); None: its pool has no machines. GPUs on machines
    that are closed to new workloads are not included, because nobody gets them at its end."""


@dataclass(frozen=True)
class ArrayElements:
    """Waiting elements of an array that are not in the queue, because only the next ones are ranked."""

    demand: WaitingDemand
    """What each of them needs."""
    place: int
    """The number of workloads of the queue that come before them."""
    elements: int
    free: int | None = None
    """How many elements of the array, in the queue or not, may start now; None: there is no throttle."""


@dataclass
class _First:
    """The first forecast of a workload that still waits."""

    at_s: float
    key: Key
    median_s: float
    interval: Interval
    late: bool = False


class StartForecaster:
    """Forecasts starts, and learns from the errors of its forecasts."""

    def __init__(self, reserves: bool = True) -> None:
        """`reserves`: a within-quota workload that does not fit keeps slots from those behind it."""
        self._reserves = reserves
        self._history, self._calibration = RunHistory(), Calibration()
        self._first: dict[str, _First] = {}

    def ended(self, groups: Groups, ran_s: float) -> None:
        """Records how many seconds a workload that ended by itself held its slots."""
        self._history.add(groups, ran_s)

    def forecast(
        self, now_s: float, waiting: Sequence[WaitingDemand], held: Sequence[HeldAmount], free: Sequence[int],
        behind: Sequence[ArrayElements] = (), machines: FreeMachines = NO_MACHINES,
    ) -> F8:  # fmt: skip
        """Returns the first and last seconds from now of each interval, shape (waiting, 2); NaN: nothing can be said.

        `waiting` is the queue in its order, `held` are all workloads that hold slots, and `free` has the free amount of
        each pool. `behind` are the elements of arrays that are not in the queue. The amount of a pool with `machines`
        is the sum of their free GPUs.
        """
        self._learn(now_s, {w.id for w in waiting}, {h.id: h for h in held})
        if not waiting:
            return np.empty((0, 2))
        medians_s = self._medians_s(now_s, waiting, held, _amounts(free, machines), behind, machines)
        out = np.full((len(waiting), 2), np.nan)
        for k, (w, median_s) in enumerate(zip(waiting, medians_s.tolist(), strict=True)):
            if median_s >= HORIZON_S:
                continue
            key = _size(w.needs), w.level, int(log(median_s + 60.0) / log(4.0))
            out[k] = interval = self._calibration.interval(key, median_s)
            if w.id not in self._first and len(self._first) < MOST_OPEN:
                self._first[w.id] = _First(now_s, key, median_s, interval)
        return out

    def _learn(self, now_s: float, waiting: set[str], held: dict[str, HeldAmount]) -> None:
        for id_, first in list(self._first.items()):
            waited_s, (low_s, high_s) = now_s - first.at_s, first.interval
            started = held.get(id_)
            if started is not None:
                waited_s = max(0.0, started.since_s - first.at_s)
                self._calibration.learn(first.key, first.median_s, waited_s)
                self._calibration.judge(0, waited_s < low_s)
            if not first.late and (started is not None or waited_s > high_s):
                # A miss counts as soon as it is certain, because the start may be far away.
                first.late = waited_s > high_s
                self._calibration.judge(1, first.late)
            if id_ not in waiting:
                del self._first[id_]
        self._calibration.set_open((f.key, f.median_s, now_s - f.at_s) for f in self._first.values())

    def _medians_s(
        self, now_s: float, waiting: Sequence[WaitingDemand], held: Sequence[HeldAmount], free: I8,
        behind: Sequence[ArrayElements], machines: FreeMachines,
    ) -> F8:  # fmt: skip
        """Returns the median of each start over the futures, in seconds from now."""
        random = np.random.default_rng(int(now_s))
        ages_s = np.array([max(0.0, now_s - h.since_s) for h in held])
        ends_s = self._history.draw([h.groups for h in held], ages_s, random, FUTURES)
        ends_s = np.minimum(ends_s, np.array([max(0.0, h.ends_by_s - now_s) for h in held]))
        # Elements of an array stand behind the workloads before their place.
        every = [*waiting, *(one.demand for one in behind)]
        order = np.argsort([*range(len(waiting)), *(one.place - 0.5 for one in behind)], kind="stable")
        together = [max(1, ceil(one.elements / MOST_ELEMENTS)) for one in behind]
        counts = [*(1 for _ in waiting), *(ceil(b.elements / n) for b, n in zip(behind, together, strict=True))]
        runs_s = self._history.draw([w.groups for w in every], np.zeros(len(every)), random, FUTURES)
        runs_s[:, len(waiting) :] *= together
        # An over-quota workload reserves nothing.
        kinds: dict[tuple[int, int, int, bool, str | None], int] = {}
        keys = [(w.pools, w.needs, w.size, self._reserves and w.rank < OVER_QUOTA_RANK, w.array) for w in every]
        classes = np.array([kinds.setdefault(key, len(kinds)) for key in keys], np.int32)
        allowed, needs, sizes, reserves = np.array([kind[:4] for kind in kinds], np.int64).T.copy()
        limits: dict[str | None, int] = {one.demand.array: one.free for one in behind if one.free is not None}
        places = np.array([limits.get(kind[4], _UNLIMITED) for kind in kinds], np.int64)
        of_array: dict[str | None, int] = {kind[4]: number for kind, number in kinds.items() if kind[4] is not None}
        running = [(h.pool, _frees(h), of_array.get(h.array, -1), len(h.on or ())) for h in held]
        pools, amounts, counted, parts = np.array(running, np.int64).reshape(-1, 4).T.copy()
        first = np.concatenate(([0], np.cumsum(parts)))
        on, gpus = np.array([part for h in held for part in h.on or ()], np.int64).reshape(-1, 2).T.copy()
        shown = order < len(waiting)
        starts_s = [
            list_schedule(
                free, machines, RunningColumns(ends_s[k], pools, amounts, counted, first, on, gpus),
                WaitingColumns(
                    classes[order], allowed, needs, sizes, reserves > 0, places, np.array(counts)[order], shown,
                    np.roll(runs_s, -k, axis=0).take(order, axis=1),  # An index would change the layout of the array.
                ), HORIZON_S,
            )[shown]
            for k in range(FUTURES)
        ]  # fmt: skip
        medians_s: F8 = np.median(np.minimum(starts_s, HORIZON_S), axis=0)
        return medians_s

    def to_json(self) -> dict[str, Any]:
        """Returns the learned values, to store them."""
        return {"history": self._history.to_json(), "calibration": self._calibration.to_json()}

    def restore(self, body: dict[str, Any]) -> None:
        """Restores the result of `to_json`."""
        self._history = RunHistory.from_json(body["history"])
        self._calibration = Calibration.from_json(body["calibration"])


def _amounts(free: Sequence[int], machines: FreeMachines) -> I8:
    amounts = np.array(free, np.int64)
    if len(machines.pool):
        sums = np.bincount(machines.pool, machines.free, len(amounts)).astype(np.int64)
        amounts = np.where(np.bincount(machines.pool, minlength=len(amounts)) > 0, sums, amounts)
    return amounts


def _frees(held: HeldAmount) -> int:
    return held.amount if held.on is None else sum(gpus for _, gpus in held.on)


def _size(needs: int) -> int:
    """Returns the class of a size: 1, up to 7, 8, or more GPUs."""
    return 0 if needs <= 1 else 1 if needs < 8 else 2 if needs == 8 else 3
