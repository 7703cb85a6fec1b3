"""Compiled sorting of the queue: the order of workloads within each tenant and level, and of the whole queue."""

import numpy as np
import numpy.typing as npt

from domain.compiled import compiled
from domain.priority import LOWEST_RANK

F8 = npt.NDArray[np.float64]
I4 = npt.NDArray[np.int32]
I1 = npt.NDArray[np.int8]

_BUCKETS = 1 << 17
_LARGE = 64
"""A larger bucket is merge-sorted. Equal submission times or capped ages can put any number of rows into one bucket."""


@compiled
def take_places(tenant: I4, level: I1, credit: F8, preference: F8, tenants: int) -> I4:
    """Reorders the workloads within each tenant and level by descending credit plus preference.

    A row stands for a workload; its credit gives a place in the queue. Returns, for each place, the row that takes it.
    `level` is 0 for rows that are not ranked, which keep their places. Equal rows keep their order.
    """
    n, groups = tenant.size, tenants * 8
    taker = np.empty(n, np.int32)
    size = np.zeros(groups, np.int64)
    first, mixed = np.zeros(groups, np.float64), np.zeros(groups, np.bool_)
    low, high = np.full(groups, np.inf), np.full(groups, -np.inf)
    value = np.empty(n, np.float64)
    for row in range(n):
        taker[row], value[row] = row, credit[row] + preference[row]
        group = 8 * tenant[row] + level[row]
        if size[group] == 0:
            first[group] = preference[row]
        elif level[row] and preference[row] != first[group]:
            mixed[group] = True
        size[group] += 1
        low[group], high[group] = min(low[group], value[row]), max(high[group], value[row])
    begin = np.zeros(groups + 1, np.int64)
    scale = np.zeros(groups, np.float64)
    for group in range(groups):
        begin[group + 1] = begin[group] + (size[group] if mixed[group] else 0)
        scale[group] = _scale(low[group], high[group], size[group])
    if begin[groups] == 0:
        return taker
    bucket = np.full(n, -1, np.int32)
    for row in range(n):
        group = 8 * tenant[row] + level[row]
        if mixed[group]:
            bucket[row] = begin[group] + int((high[group] - value[row]) * scale[group])
    ordered = _sorted_by(bucket, begin[groups], value)
    for row in range(n):
        if bucket[row] >= 0:
            group = 8 * tenant[row] + level[row]
            taker[row] = ordered[begin[group]]
            begin[group] += 1
    return taker


@compiled
def order_queue(rank: I1, credit: F8) -> I4:
    """Returns the rows with a rank above 0, sorted by rank, then descending credit, then row.

    This is a bucket sort on rank and rounded credit.
    """
    n = rank.size
    low, high = np.inf, -np.inf
    waiting = 0
    for row in range(n):
        if rank[row]:
            low, high = min(low, credit[row]), max(high, credit[row])
            waiting += 1
    buckets = min(_BUCKETS, max(16, waiting))
    scale = _scale(low, high, buckets)
    bucket = np.empty(n, np.int32)
    for row in range(n):
        bucket[row] = (rank[row] - 1) * buckets + int((high - credit[row]) * scale) if rank[row] else -1
    return _sorted_by(bucket, LOWEST_RANK * buckets, credit)


@compiled
def _scale(low: float, high: float, buckets: int) -> float:
    """Returns how many buckets cover a unit of credit, so that the credits from `low` to `high` fill `buckets`."""
    scale = (buckets - 1) / (high - low) if high > low else 0.0
    return scale if np.isfinite(scale) else 0.0  # The credits may be too close together to separate: one bucket.


@compiled
def _sorted_by(bucket: I4, buckets: int, value: F8) -> I4:
    """Returns the rows whose bucket is not negative, sorted by bucket, then by descending value, then by row.

    The rounding of values to buckets does not affect the order.
    """
    ends = np.zeros(buckets + 1, np.int32)
    for row in range(bucket.size):
        if bucket[row] >= 0:
            ends[bucket[row] + 1] += 1
    for k in range(1, ends.size):
        ends[k] += ends[k - 1]
    out = np.empty(ends[buckets], np.int32)
    for row in range(bucket.size):
        if bucket[row] >= 0:
            out[ends[bucket[row]]] = row
            ends[bucket[row]] += 1
    start = 0
    for k in range(buckets):
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
