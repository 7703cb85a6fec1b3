"""What the compiled loops work on: what never changes, the state of a plan, and room to work in.

T tables, R regions, J jobs, E edges, A apps with quotas; K keys: a GPU type and a priority level each. Flows of hours
between regions are kept by *channel*: the K keys (GPU hours), then the A apps (CPU hours).
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

F8: TypeAlias = npt.NDArray[np.float64]
I4: TypeAlias = npt.NDArray[np.int32]
I8: TypeAlias = npt.NDArray[np.int64]
B1: TypeAlias = npt.NDArray[np.bool_]

KIND, KEY, APP, COUNT = 0, 1, 2, 3
"""Columns of `Fixed.job`."""
READ_PER_BYTE, GPU_H, CPU_H, BYTES = 0, 1, 2, 3
"""Columns of `Fixed.job_amount`."""
(
    READ_WEIGHT,
    GPU_WEIGHT,
    STORAGE_WEIGHT,
    OVERLOAD,
    WANTED_H,
    ALL_H,
    MOVE_QUOTA,
    ALL_BYTES,
    STORED_SCALE,
    CAPACITY2,
    MAGNITUDE,
) = range(11)
"""Entries of `Fixed.number`. WANTED_H: high-priority GPU hours that must be at home, of ALL_H. MAGNITUDE: what the
parts of the objective may come to, by their weights; the rounding of its sums goes with it."""
N_NUMBERS = 11
HOURS, HOURS2, HOURS_SHARE, STRAIN = 0, 1, 2, 3
"""Columns of `State.sums`: over regions, of demand D, D^2, D times the region's share of the supply, and strain."""
READ, HOME_H, MOVED, STORED, STORED2, STORED_SHARE = range(6)
"""Entries of `State.now`: the read term, hours at home, bytes moved; sums of U, U^2, U times the share of capacity."""
N_NOW = 6
ROUNDING = 1e-9
"""As in `tetris.score`."""
NONE = -1


class Fixed(NamedTuple):
    """An instance."""

    size: F8
    """float64[T]"""
    start: I4
    """int32[T]: homes at the start."""
    replica_start: I8
    """int64[T + 1]"""
    replica: I4
    """int32: regions."""
    table_start: I8
    """int64[T + 1]: where a table's jobs begin in `table_job`."""
    table_job: I4
    """int32[E]: jobs."""
    job_start: I8
    """int64[J + 1]: where a job's tables begin in `job_table`."""
    job_table: I4
    """int32[E]: tables."""
    job: I4
    """int32[J, 4]"""
    job_amount: F8
    """float64[J, 4]"""
    supply: F8
    """float64[K, R] GPU hours."""
    share: F8
    """float64[K, R]: the region's part of the supply of all."""
    share2: F8
    """float64[K]: sum of its squares."""
    mean: F8
    """float64[K]: mean supply of the regions that have any."""
    importance: F8
    """float64[K]: the level's weight."""
    tiny: F8
    """float64[K]: demand below this is rounding."""
    at_home: F8
    """float64[K, R]: 1 where the key's hours count as at home."""
    quota: F8
    """float64[A, R] CPU hours."""
    quota_allowed: F8
    """float64[A, R]: the quota, or what the start used of it if that is more."""
    quota_scale: F8
    """float64[A]: what an excess is measured by."""
    capacity: F8
    """float64[R] bytes."""
    capacity_allowed: F8
    """float64[R]: as `quota_allowed`."""
    capacity_share: F8
    """float64[R]"""
    number: F8
    """float64[N_NUMBERS]"""


class State(NamedTuple):
    """A plan, and what follows from it."""

    home: I4
    """int32[T]"""
    region: I4
    """int32[J]: where each job runs, or NONE."""
    read: F8
    """float64[J]: each job's read term."""
    homes: I8
    """int64[J, 2]: of an ML job the sum of its tables' homes, and of their squares: all are at one home exactly if the
    count times the second is the first squared (Cauchy and Schwarz)."""
    demand: F8
    """float64[K, R] GPU hours."""
    sums: F8
    """float64[K, 4]"""
    cpu: F8
    """float64[A, R] CPU hours."""
    stored: F8
    """float64[R] bytes."""
    now: F8
    """float64[N_NOW]"""


class Work(NamedTuple):
    """Room for one table's weighing, and its result."""

    total: F8
    """float64[R]: by how much the objective changes if the table moves there."""
    lack: F8
    """float64[R]: by how much the relative excess over the limits changes."""
    broken: F8
    """float64[R]: the same, over what the start allows."""
    left: F8
    """float64[K + A, R]: hours that come or go wherever the table moves."""
    come: F8
    """float64[K + A, R]: hours that come to a region if the table moves there."""
    follow: F8
    """float64[K + A]: hours that go with the table to wherever it moves."""
    cross: F8
    """float64[R, K + A, R]: hours that leave the last region if the table moves to the first."""
    crossed: B1
    """bool[R, K + A]: whether there are such."""
    channels: I4
    """int32[K + A]: those with a flow; `flags` marks them."""
    flags: B1
    """bool[K + A]"""
    base: F8
    """float64[K, 5]: `sums` after `left`, and the key's cost then."""
    read: F8
    """float64[R]: read term by region moved to."""
    tables: I4
    """int32[R]"""
    tallied: F8
    """float64[R]"""


class Room(NamedTuple):
    """Room for a walk's steps of several tables."""

    undo: I4
    """int32: homes of a job's tables before a step."""
    members: I4
    """int32: tables of a cluster."""
    marks: I4
    """int32[T + 1]: see `tetris.kernels.clusters.cluster`."""
