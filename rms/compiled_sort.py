"""A sort for compiled code. numba takes seconds to compile `numpy.argsort`, once per array type and call site."""

import numpy as np

from domain.compiled import compiled
from rms.arrays import I8


@compiled
def order_of(keys: I8) -> I8:
    """Returns the row numbers of `keys` in ascending lexicographic order of the rows.

    This is a stable merge sort with O(n log n) row comparisons.
    """
    size = keys.shape[0]
    order, merged = np.empty(size, np.int64), np.empty(size, np.int64)
    for i in range(size):
        order[i] = i
    width = 1
    while width < size:
        for left in range(0, size, 2 * width):
            middle, end = min(left + width, size), min(left + 2 * width, size)
            i, j = left, middle
            for k in range(left, end):
                if j >= end or (i < middle and not _before(keys, order[j], order[i])):
                    merged[k] = order[i]
                    i += 1
                else:
                    merged[k] = order[j]
                    j += 1
        order, merged = merged, order
        width *= 2
    return order


@compiled
def _before(keys: I8, a: int, b: int) -> bool:
    for column in range(keys.shape[1]):
        if keys[a, column] != keys[b, column]:
            return bool(keys[a, column] < keys[b, column])
    return False
