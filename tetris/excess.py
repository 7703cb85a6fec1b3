"""How far a plan is over the hard constraints of an instance, and how far it may be (MAST 3.3).

A plan may break no constraint that the start keeps, and none by more than the start does. Excesses are added up after
each was divided by a scale of its own, so that bytes, hours and fractions count alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from domain.instance import HIGH_PRIORITY
from tetris.columns import ML, NONE, Columns, Floats, Ints

ROUNDING = 1e-9
"""Sums of floating-point numbers: a limit is kept by what is over it by less than this part of it."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """What the constraints are about: what a plan uses, or what it may use (of hours at home: what it must have)."""

    storage_bytes: Floats
    """[R]"""
    cpu_h: Floats
    """[A, R] CPU hours of an app's jobs; as limits inf where there is none."""
    home_h: float
    """GPU hours of high-priority jobs whose region has their hardware."""
    moved_bytes: float


@dataclass(frozen=True, slots=True)
class Scales:
    """What excesses are divided by."""

    storage_bytes: float
    cpu_h: Floats
    """[A]"""
    home_h: float
    moved_bytes: float


def excess(columns: Columns, home: Ints) -> float:
    """The relative excess of the plan `home` ([T]) over the limits of the instance; 0 where it breaks none."""
    return relative_excess(amounts(columns, home), limits(columns), scales(columns))


def relative_excess(used: Amounts, limit: Amounts, scale: Scales) -> float:
    """The sum over constraints of what is over the limit, in parts of the scale."""
    cpu = _over(used.cpu_h, limit.cpu_h).sum(axis=1)
    short = limit.home_h - used.home_h
    return float(
        _over(used.storage_bytes, limit.storage_bytes).sum() / scale.storage_bytes
        + (cpu / scale.cpu_h).sum()
        + (short / scale.home_h if short > ROUNDING * scale.home_h else 0.0)
        + _over(np.array([used.moved_bytes]), np.array([limit.moved_bytes]))[0] / scale.moved_bytes
    )


def amounts(columns: Columns, home: Ints) -> Amounts:
    """What the plan `home` ([T]) uses."""
    regions = len(columns.regions)
    where = job_regions(columns, home)
    cpu = np.zeros((len(columns.apps), regions))
    counted = (columns.app != NONE) & (where != NONE)
    np.add.at(cpu, (columns.app[counted], where[counted]), columns.cpu_h[counted])
    at_home = _high(columns) & (where != NONE)
    at_home[at_home] = columns.supply_h[columns.gpu_type[at_home], where[at_home]] > 0
    replica_of = np.repeat(np.arange(len(home)), np.diff(columns.replica_start))
    holds = np.zeros(len(home), np.bool_)
    holds[replica_of[columns.replica == home[replica_of]]] = True
    stored = np.zeros(regions)
    np.add.at(stored, columns.replica, columns.size_bytes[replica_of])
    np.add.at(stored, home[~holds], columns.size_bytes[~holds])
    moved = (home != columns.home) & ~holds
    return Amounts(stored, cpu, float(columns.gpu_h[at_home].sum()), float(columns.size_bytes[moved].sum()))


def limits(columns: Columns) -> Amounts:
    """What a plan may use by the constraints as they are written."""
    at_start = amounts(columns, columns.home).home_h
    wanted = min(columns.home_threshold * _high_hours(columns), at_start)
    return Amounts(columns.capacity_bytes, columns.quota_h, wanted, columns.move_quota_bytes)


def allowed(columns: Columns) -> Amounts:
    """The limits, or what the start uses where that is more."""
    written, start = limits(columns), amounts(columns, columns.home)
    return Amounts(
        np.maximum(written.storage_bytes, start.storage_bytes),
        np.maximum(written.cpu_h, start.cpu_h),
        written.home_h,
        written.moved_bytes,
    )


def scales(columns: Columns) -> Scales:
    """Mean bytes that a region stores at the start, mean quota of the app where it has one, all hours, all bytes."""
    all_bytes = float(columns.size_bytes.sum())
    replica_of = np.repeat(np.arange(len(columns.home)), np.diff(columns.replica_start))
    stored = (all_bytes + float(columns.size_bytes[replica_of].sum())) / len(columns.regions)
    quota = np.array([_mean(row[np.isfinite(row)]) for row in columns.quota_h], np.float64)
    return Scales(stored or 1.0, quota, _high_hours(columns) or 1.0, all_bytes or 1.0)


def job_regions(columns: Columns, home: Ints) -> Ints:
    """[J] where each job runs, or NONE, by the rules of `domain.instance.job_region`."""
    out = np.full(len(columns.kind), NONE, np.int32)
    for job, kind in enumerate(columns.kind):
        tables = columns.job_table[columns.job_start[job] : columns.job_start[job + 1]]
        out[job] = _job_region(kind == ML, home[tables].tolist(), columns.size_bytes[tables].tolist())
    return out


def _job_region(is_ml: bool, homes: Sequence[int], sizes: Sequence[float]) -> int:
    if is_ml:
        return homes[0] if len(set(homes)) == 1 else NONE
    count = {r: homes.count(r) for r in homes}
    size = {r: sum(s for h, s in zip(homes, sizes, strict=True) if h == r) for r in homes}
    return min(count, key=lambda r: (-count[r], -size[r], r), default=NONE)


def _high(columns: Columns) -> npt.NDArray[np.bool_]:
    high: npt.NDArray[np.bool_] = (columns.priority <= HIGH_PRIORITY) & (columns.gpu_type != NONE)
    return high


def _high_hours(columns: Columns) -> float:
    return float(columns.gpu_h[_high(columns)].sum())


def _over(amount: Floats, limit: Floats) -> Floats:
    beyond = amount - limit
    return np.where(beyond > ROUNDING * np.maximum(amount, limit), beyond, 0.0)


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) and values.mean() > 0 else 1.0
