"""When jobs start their checkpoints, and whether a final one can complete before a departure."""

import numpy as np
from numpy.typing import ArrayLike

from reclaim.arrays import Bools, Floats


def next_start_s(last_start_s: ArrayLike, interval_s: ArrayLike, offset_s: ArrayLike, stagger_s: float) -> Floats:
    """Returns when each job starts its next checkpoint: an interval after the last, moved to the job's offset.

    The time is moved by at most half of `stagger_s`, to the nearest time that is the job's offset after a multiple of
    `stagger_s`. So two jobs never start closer together than their offsets are, whatever their intervals. An interval
    shorter than two periods is not moved, because the move would change it too much.
    """
    last, interval = np.asarray(last_start_s, np.float64), np.asarray(interval_s, np.float64)
    offset = np.asarray(offset_s, np.float64)
    due = last + interval
    with np.errstate(invalid="ignore"):
        moved = np.round((due - offset) / stagger_s) * stagger_s + offset
    return np.where(np.isfinite(due) & (interval >= 2 * stagger_s), moved, due)


def final_feasible(
    checkpoint_bytes: ArrayLike, bandwidth_bytes_s: ArrayLike, after_s: ArrayLike, notice_s: ArrayLike
) -> Bools:
    """Returns where C / b + `after_s` <= tau: a final checkpoint can complete before the machine leaves (V-A).

    `after_s` is T_r in the paper's model, and the time of the commit with a store.
    """
    payload = np.asarray(checkpoint_bytes, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        write_s = np.where(payload > 0, payload / np.asarray(bandwidth_bytes_s, np.float64), 0.0)
    return np.asarray(write_s + np.asarray(after_s) <= np.asarray(notice_s))
