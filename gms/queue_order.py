"""Compiled sorting of the queue: the order of workloads within each tenant and level, and of the whole queue."""

import numpy as np
import numpy.typing as npt

from domain.compiled import compiled
from domain.priority import LOWEST_RANK

F8 = npt.NDArray[np.float64]
I4 = npt.NDArray[np.int32]
I1 = npt.NDArray[np.int8]

_LARGE = 64
"""A larger bucket is merge-sorted. Equal submission times or capped ages can put any number of rows into one bucket."""


@compiled
def take_places(tenant: I4, level: I1, value: F8, tenants: int) -> I4:
    """Reorders the workloads within each tenant and level by descending value.

    A row stands for a workload; its credit gives a place in the queue. Returns, for each place, the row that takes it.
    `level` is 0 for rows that are not ranked, which keep their places. Equal rows keep their order.
    """
    n, groups = tenant.size, tenants * 8
    taker, group = np.empty(n, np.int32), np.empty(n, np.int32)
    size, last = np.zeros(groups, np.int32), np.full(groups, np.inf)
    unsorted = np.zeros(groups, np.bool_)
    for row in range(n):
        taker[row] = row
        own = 8 * tenant[row] + level[row]
        unsorted[own] |= level[row] > 0 and value[row] > last[own]
        last[own] = value[row]
        size[own] += 1
    if not unsorted.any():
        return taker
    for row in range(n):
        own = 8 * tenant[row] + level[row]
        group[row] = own if unsorted[own] else -1
    ordered = _sorted_by(group, groups, value)
    begin = np.zeros(groups + 1, np.int32)
    for own in range(groups):
        begin[own + 1] = begin[own] + (size[own] if unsorted[own] else 0)
    for row in range(n):
        own = 8 * tenant[row] + level[row]
        if unsorted[own]:
            taker[row] = ordered[begin[own]]
            begin[own] += 1
    return taker


@compiled
def order_queue(rank: I1, credit: F8) -> I4:
    """Returns the rows with a rank above 0, sorted by rank, then descending credit, then row."""
    group = np.empty(rank.size, np.int32)
    for row in range(rank.size):
        group[row] = rank[row] - 1
    return _sorted_by(group, LOWEST_RANK, credit)


@compiled
def _sorted_by(group: I4, groups: int, value: F8) -> I4:
    """Returns the rows whose group is not negative, sorted by group, then by descending value, then by row.

    This is a bucket sort on group and rounded value; the rounding does not affect the order. `group` is overwritten.
    """
    n = group.size
    size, low, high = np.zeros(groups, np.int32), np.full(groups, np.inf), np.full(groups, -np.inf)
    for row in range(n):
        own = group[row]
        if own >= 0:
            size[own] += 1
            low[own], high[own] = min(low[own], value[row]), max(high[own], value[row])
    begin, scale = np.zeros(groups + 1, np.int32), np.zeros(groups, np.float64)
    for own in range(groups):
        begin[own + 1] = begin[own] + size[own]  # One row in each bucket on average.
        scale[own] = _scale(low[own], high[own], size[own])
    ends = np.zeros(begin[groups] + 1, np.int32)
    for row in range(n):
        own = group[row]
        if own >= 0:
            group[row] = begin[own] + int((high[own] - value[row]) * scale[own])  # From here on the bucket.
            ends[group[row] + 1] += 1
    for k in range(1, ends.size):
        ends[k] += ends[k - 1]
    out = np.empty(ends[-1], np.int32)
    for row in range(n):
        bucket = group[row]
        if bucket >= 0:
            out[ends[bucket]] = row
            ends[bucket] += 1
    start = 0
    for k in range(ends.size - 1):
        end = ends[k]
        if end - start > _LARGE:
            rows = out[start:end].copy()
            by_value = np.argsort(-value[rows], kind="mergesort")
            for i in range(rows.size):
                out[start + i] = rows[by_value[i]]
        else:
            for i in range(start + 1, end):
                row, place = out[i], i
                while place > start and value[out[place - 1]] < value[row]:
                    out[place] = out[place - 1]
                    place -= 1
                out[place] = row
        start = end
    return out


@compiled
def _scale(low: float, high: float, buckets: int) -> float:
    """Returns how many buckets cover a unit of credit, so that the credits from `low` to `high` fill `buckets`."""
    scale = (buckets - 1) / (high - low) if high > low else 0.0
    return scale if np.isfinite(scale) else 0.0  # The credits may be too close together to separate: one bucket.
