"""An instance and a plan in the form that the compiled code uses (`tetris.kernels.layout`)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from domain.instance import HIGH_PRIORITY, PlanScore, Violation
from tetris.columns import KINDS, ML, NONE, Columns, Floats, Ints, Longs
from tetris.kernels import layout
from tetris.kernels.layout import Fixed, PlanState, Work
from tetris.kernels.move_costs import weigh
from tetris.kernels.moves import apply, recompute
from tetris.kernels.terms import excess, gpu_term, objective, short_of_home, storage_cost

assert KINDS[ML] == "ml"
AnyArray = TypeVar("AnyArray", bound=npt.NDArray[Any])


@dataclass(frozen=True, slots=True)
class Weighed:
    """The changes, [R] each, if one table moved to each region."""

    total: Floats
    """Change of the objective."""
    lack: Floats
    """Change of the relative excess over all limits."""
    broken: Floats
    """Change of the relative excess over the allowed limits: a limit, or the value at the start if that is worse."""


_GIVEN = ("size_bytes", "home", "replica_start", "replica", "job_start", "job_table", "quota_h", "capacity_bytes")
"""Columns that the compiled code uses without conversion."""


class PlacementProblem:
    """A plan of an instance with exact incremental evaluation. Moving a table costs time in proportion to its jobs."""

    def __init__(self, columns: Columns, home: Ints | None = None) -> None:
        """Starts with the plan `home` [T], by default the homes at the start."""
        self.columns = columns
        self.fixed = _fixed(columns)
        self.state = _state(columns, self.fixed)
        self.work = _work(columns, self.fixed)
        recompute(self.fixed, self.state, self.work)
        self._allow_what_the_start_has()
        if home is not None:
            self.restart(home)

    def restart(self, home: Ints) -> None:
        """Replaces the plan by `home` [T]."""
        self.state.home[:] = home
        recompute(self.fixed, self.state, self.work)

    def move(self, table: int, region: int) -> None:
        """Moves one table to a region."""
        apply(self.fixed, self.state, self.work, table, region)

    def weigh(self, table: int) -> Weighed:
        """Returns the changes if one table moved to each region. The next call overwrites the returned arrays."""
        weigh(self.fixed, self.state, self.work, table)
        return Weighed(self.work.total, self.work.lack, self.work.broken)

    @property
    def home(self) -> Ints:
        """[T] home regions of the plan."""
        home: Ints = self.state.home
        return home

    @property
    def total(self) -> float:
        """Objective of the plan."""
        return float(objective(self.fixed, self.state))

    @property
    def terms(self) -> tuple[float, float, float]:
        """Read, GPU and storage term of the plan, without their weights."""
        now, number = self.state.now, self.fixed.number
        stored = now[layout.STORED], now[layout.STORED2], now[layout.STORED_SHARE]
        storage = storage_cost(*stored, number[layout.CAPACITY2])
        return float(now[layout.READ]), float(gpu_term(self.fixed, self.state)), float(storage)

    @property
    def magnitude(self) -> float:
        """Upper estimate of the weighted terms' sum. The rounding error of totals is proportional to it."""
        return float(self.fixed.number[layout.MAGNITUDE])

    @property
    def moved_bytes(self) -> float:
        """Bytes that the plan copies between regions."""
        return float(self.state.now[layout.MOVED])

    def score(self) -> PlanScore:
        """Returns the terms, the total and the violations, in time linear in the size of the plan."""
        c, number, now = self.columns, self.fixed.number, self.state.now
        found = [
            *_over("storage", c.regions, self.state.stored, c.capacity_bytes),
            *(
                violation
                for app, used, quota in zip(c.apps, self.state.cpu, c.quota_h, strict=True)
                for violation in _over("cpu_hours", [f"{r}/{app}" for r in c.regions], used, quota)
            ),
        ]
        short = short_of_home(now[layout.HOME_H], number)
        if short > 0:
            found.append(Violation("home_threshold", "all", float(short)))
        found += _over("move_quota", ["all"], now[layout.MOVED :][:1], np.array([c.move_quota_bytes]))
        return PlanScore(*self.terms, self.total, tuple(found))

    @property
    def excess(self) -> tuple[float, float]:
        """Relative excess over all limits, and over the allowed limits. A plan may be published if the latter is 0."""
        lack, broken = excess(self.fixed, self.state)
        return float(lack), float(broken)

    @property
    def bytes(self) -> int:
        """Size in bytes of the problem's own arrays, without those that it shares with the instance's columns."""
        arrays = {id(a): a.nbytes for group in (self.fixed, self.state, self.work) for a in group}
        for name in self.columns.__slots__:
            arrays.pop(id(getattr(self.columns, name)), None)
        return sum(arrays.values())

    def _allow_what_the_start_has(self) -> None:
        fixed, state, number = self.fixed, self.state, self.fixed.number
        np.maximum(fixed.capacity, state.stored, out=fixed.capacity_allowed)
        np.maximum(fixed.quota, state.cpu, out=fixed.quota_allowed)
        wanted = self.columns.home_threshold * number[layout.ALL_H]
        number[layout.WANTED_H] = min(wanted, state.now[layout.HOME_H])


def _over(constraint: Any, where: Sequence[str], amount: Floats, limit: Floats) -> list[Violation]:
    beyond = amount - limit
    broken = np.flatnonzero(beyond > layout.ROUNDING * np.maximum(amount, limit))
    return [Violation(constraint, where[int(i)], float(beyond[i])) for i in broken]


def _as_compiled(array: AnyArray) -> AnyArray:
    """Returns a contiguous, writable array, copied if necessary. Other arrays would make numba compile again."""
    required: AnyArray = np.require(array, requirements=("C", "W"))
    return required


def _fixed(columns: Columns) -> Fixed:
    c = replace(columns, **{name: _as_compiled(getattr(columns, name)) for name in _GIVEN})
    levels = np.unique(c.priority) if len(c.priority) else np.zeros(0, np.int8)
    types = len(c.gpu_types)
    keys = types * len(levels)
    level = np.searchsorted(levels, c.priority)
    key = np.where(c.gpu_type == NONE, NONE, c.gpu_type * len(levels) + level)
    # Jobs without hours do not use a key.
    key = np.where(c.gpu_h > 0, key, NONE)
    app = np.where(c.cpu_h > 0, c.app, NONE)
    count = np.diff(c.job_start)
    edge_bytes = c.size_bytes[c.job_table]
    job_bytes = _sums(edge_bytes, c.job_start)
    all_bytes = float(c.size_bytes.sum())
    replica_bytes = float((c.size_bytes * np.diff(c.replica_start)).sum())
    per_byte = c.weight / all_bytes if all_bytes else np.zeros_like(c.weight)
    all_h = np.bincount(key[key >= 0], weights=c.gpu_h[key >= 0], minlength=keys)[:keys]
    supply = np.repeat(c.supply_h, len(levels), axis=0)
    totals = supply.sum(axis=1, keepdims=True)
    share = np.divide(supply, totals, out=np.zeros_like(supply), where=totals > 0)
    with_any = (supply > 0).sum(axis=1)
    mean = np.divide(totals[:, 0], with_any, out=np.zeros(keys), where=with_any > 0)
    by_level = np.array([c.weights.by_priority.get(int(p), 1.0) for p in levels])
    high = np.tile(levels <= HIGH_PRIORITY, types)
    capacity = c.capacity_bytes
    capacity_share = capacity / capacity.sum() if capacity.sum() > 0 else np.zeros_like(capacity)
    table_start, table_job = _reversed(c)
    number = np.zeros(layout.N_NUMBERS)
    number[layout.READ_WEIGHT] = c.weights.read
    number[layout.GPU_WEIGHT] = c.weights.gpu
    number[layout.STORAGE_WEIGHT] = c.weights.storage
    number[layout.OVERLOAD] = c.weights.overload
    # Includes jobs that have no region.
    wanted = (c.priority <= HIGH_PRIORITY) & (c.gpu_type != NONE)
    number[layout.ALL_H] = c.gpu_h[wanted].sum()
    number[layout.MOVE_QUOTA] = c.move_quota_bytes
    number[layout.ALL_BYTES] = all_bytes or 1.0
    number[layout.STORED_SCALE] = (all_bytes + replica_bytes) / len(c.regions) or 1.0
    number[layout.CAPACITY2] = (capacity_share**2).sum()
    importance = np.tile(by_level, types)
    number[layout.MAGNITUDE] = (
        c.weights.read * float((per_byte * job_bytes).sum())
        + c.weights.gpu * (1.0 + c.weights.overload) * float(importance.sum())
        + c.weights.storage
    ) or 1.0
    return Fixed(
        size=c.size_bytes,
        start=c.home,
        replica_start=c.replica_start,
        replica=c.replica,
        table_start=table_start,
        table_job=table_job,
        job_start=c.job_start,
        job_table=c.job_table,
        job=np.column_stack((c.kind.astype(np.int32), key, app, count)).astype(np.int32),
        job_amount=np.column_stack((per_byte, c.gpu_h, c.cpu_h, job_bytes)),
        supply=supply,
        share=share,
        share2=(share**2).sum(axis=1),
        mean=mean,
        importance=importance,
        tiny=np.asarray(all_h * layout.ROUNDING, np.float64),
        at_home=(high[:, None] & (supply > 0)).astype(np.float64),
        quota=c.quota_h,
        quota_allowed=np.zeros_like(c.quota_h),
        quota_scale=np.array([_mean_quota(row) for row in c.quota_h], np.float64),
        capacity=capacity,
        capacity_allowed=np.zeros_like(capacity),
        capacity_share=capacity_share,
        number=number,
    )


def _mean_quota(quotas: Floats) -> float:
    """Returns the scale of the excess over an app's quotas: their mean, or 1 if there are none."""
    given = quotas[np.isfinite(quotas)]
    return float(given.mean()) if len(given) and given.mean() > 0 else 1.0


def _state(columns: Columns, fixed: Fixed) -> PlanState:
    keys, regions = fixed.supply.shape
    jobs = len(columns.kind)
    return PlanState(
        home=columns.home.copy(),
        region=np.full(jobs, NONE, np.int32),
        read=np.zeros(jobs),
        homes=np.zeros((jobs, 2), np.int64),
        demand=np.zeros((keys, regions)),
        sums=np.zeros((keys, 4)),
        cpu=np.zeros((len(columns.apps), regions)),
        stored=np.zeros(regions),
        now=np.zeros(layout.N_NOW),
    )


def _work(columns: Columns, fixed: Fixed) -> Work:
    keys, regions = fixed.supply.shape
    channels = keys + len(columns.apps)
    return Work(
        total=np.zeros(regions),
        lack=np.zeros(regions),
        broken=np.zeros(regions),
        left=np.zeros((channels, regions)),
        come=np.zeros((channels, regions)),
        follow=np.zeros(channels),
        cross=np.zeros((regions, channels, regions)),
        crossed=np.zeros((regions, channels), np.bool_),
        channels=np.zeros(channels, np.int32),
        flags=np.zeros(channels, np.bool_),
        base=np.zeros((keys, 5)),
        read=np.zeros(regions),
        tables=np.zeros(regions, np.int32),
        tallied=np.zeros(regions),
    )


def _sums(values: Floats, starts: Longs) -> Floats:
    """Returns the sum of each segment `values[starts[i]:starts[i + 1]]`."""
    lengths = np.diff(starts)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return np.asarray(np.bincount(rows, weights=values, minlength=len(lengths)), np.float64)


def _reversed(c: Columns) -> tuple[Longs, Ints]:
    """Returns offsets and job numbers of the jobs of each table, in order."""
    order = np.argsort(c.job_table, kind="stable")
    jobs = np.repeat(np.arange(len(c.kind), dtype=np.int32), np.diff(c.job_start))[order]
    start = np.zeros(len(c.home) + 1, np.int64)
    np.cumsum(np.bincount(c.job_table, minlength=len(c.home)), out=start[1:])
    return start, jobs
