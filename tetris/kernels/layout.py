"""What the compiled loops work on: what never changes, the state of a plan, and room to work in.

T tables, R regions, J jobs, E edges, A apps with quotas; K keys: a GPU type and a priority level each. Flows of hours
between regions are kept by *channel*: the K keys (GPU hours), then the A apps (CPU hours).
"""

from typing import Any, NamedTuple

KIND, KEY, APP, COUNT = 0, 1, 2, 3
"""Columns of `Fixed.job`."""
READ_PER_BYTE, GPU_H, CPU_H, BYTES = 0, 1, 2, 3
"""Columns of `Fixed.job_amount`."""
READ_WEIGHT, GPU_WEIGHT, STORAGE_WEIGHT, OVERLOAD, WANTED_H, ALL_H, MOVE_QUOTA, ALL_BYTES, STORED_SCALE, CAPACITY2 = (
    range(10)
)
"""Entries of `Fixed.number`. WANTED_H: high-priority GPU hours that must be at home, of ALL_H."""
N_NUMBERS = 10
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

    size: Any
    """float64[T]"""
    start: Any
    """int32[T]: homes at the start."""
    replica_start: Any
    """int64[T + 1]"""
    replica: Any
    """int32: regions."""
    table_start: Any
    """int64[T + 1]: where a table's jobs begin in `table_job`."""
    table_job: Any
    """int32[E]: jobs."""
    job_start: Any
    """int64[J + 1]: where a job's tables begin in `job_table`."""
    job_table: Any
    """int32[E]: tables."""
    job: Any
    """int32[J, 4]"""
    job_amount: Any
    """float64[J, 4]"""
    supply: Any
    """float64[K, R] GPU hours."""
    share: Any
    """float64[K, R]: the region's part of the supply of all."""
    share2: Any
    """float64[K]: sum of its squares."""
    mean: Any
    """float64[K]: mean supply of the regions that have any."""
    importance: Any
    """float64[K]: the level's weight."""
    tiny: Any
    """float64[K]: demand below this is rounding."""
    at_home: Any
    """float64[K, R]: 1 where the key's hours count as at home."""
    quota: Any
    """float64[A, R] CPU hours."""
    quota_allowed: Any
    """float64[A, R]: the quota, or what the start used of it if that is more."""
    quota_scale: Any
    """float64[A]: what an excess is measured by."""
    capacity: Any
    """float64[R] bytes."""
    capacity_allowed: Any
    """float64[R]: as `quota_allowed`."""
    capacity_share: Any
    """float64[R]"""
    number: Any
    """float64[N_NUMBERS]"""


class State(NamedTuple):
    """A plan, and what follows from it."""

    home: Any
    """int32[T]"""
    region: Any
    """int32[J]: where each job runs, or NONE."""
    homes: Any
    """int64[J, 2]: of an ML job the sum of its tables' homes, and of their squares: all are at one home exactly if the
    count times the second is the first squared (Cauchy and Schwarz)."""
    demand: Any
    """float64[K, R] GPU hours."""
    sums: Any
    """float64[K, 4]"""
    cpu: Any
    """float64[A, R] CPU hours."""
    stored: Any
    """float64[R] bytes."""
    now: Any
    """float64[N_NOW]"""


class Work(NamedTuple):
    """Room for one table's weighing, and its result."""

    total: Any
    """float64[R]: by how much the objective changes if the table moves there."""
    lack: Any
    """float64[R]: by how much the relative excess over the limits changes."""
    broken: Any
    """float64[R]: the same, over what the start allows."""
    left: Any
    """float64[K + A, R]: hours that come or go wherever the table moves."""
    come: Any
    """float64[K + A, R]: hours that come to a region if the table moves there."""
    follow: Any
    """float64[K + A]: hours that go with the table to wherever it moves."""
    cross: Any
    """float64[R, K + A, R]: hours that leave the last region if the table moves to the first."""
    crossed: Any
    """bool[R, K + A]: whether there are such."""
    channels: Any
    """int32[K + A]: those with a flow; `flags` marks them."""
    flags: Any
    """bool[K + A]"""
    base: Any
    """float64[K, 5]: `sums` after `left`, and the key's cost then."""
    read: Any
    """float64[R]: read term by region moved to."""
    count: Any
    """int32[R]"""
    bytes: Any
    """float64[R]"""
