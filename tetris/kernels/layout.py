"""Data of the compiled code: the constants of an instance, the state of a plan, and scratch arrays.

Sizes: T tables, R regions, J jobs, E edges, A apps with quotas, and K keys. A *key* is a GPU type and a priority level.
Flows of hours between regions are stored by *channel*: the K keys (GPU hours), then the A apps (CPU hours).
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

F8: TypeAlias = npt.NDArray[np.float64]
I4: TypeAlias = npt.NDArray[np.int32]
I8: TypeAlias = npt.NDArray[np.int64]
B1: TypeAlias = npt.NDArray[np.bool_]

KIND, KEY, APP, COUNT = 0, 1, 2, 3
"""Columns of `Fixed.job`: the job's kind, key, app, and number of tables."""
READ_PER_BYTE, GPU_H, CPU_H, BYTES = 0, 1, 2, 3
"""Columns of `Fixed.job_amount`: read cost per byte, GPU hours, CPU hours, and bytes of the job's tables."""
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
"""Entries of `Fixed.number`. `WANTED_H` are the high-priority GPU hours that must be at home, out of `ALL_H`.
`MAGNITUDE` is an upper estimate of the weighted terms' sum; rounding errors are proportional to it."""
N_NUMBERS = 11
HOURS, HOURS2, HOURS_SHARE, STRAIN = 0, 1, 2, 3
"""Columns of `PlanState.sums`, sums over regions: demand D, D^2, D times the region's share of the supply, and
overload."""
READ, HOME_H, MOVED, STORED, STORED2, STORED_SHARE = range(6)
"""Entries of `PlanState.now`: read term, hours at home, moved bytes, and the sums over regions of the stored bytes U,
U^2, and U times the region's share of the capacity."""
N_NOW = 6
ROUNDING = 1e-9
"""Relative tolerance for rounding: an excess over a limit below this fraction of the limit is not a violation."""
NONE = -1


class Fixed(NamedTuple):
    """The constants of an instance."""

    size: F8
    """float64[T]: table sizes in bytes."""
    start: I4
    """int32[T]: home regions at the start."""
    replica_start: I8
    """int64[T + 1]: offset of each table's replicas in `replica`."""
    replica: I4
    """int32: regions of the replicas."""
    table_start: I8
    """int64[T + 1]: offset of each table's jobs in `table_job`."""
    table_job: I4
    """int32[E]: jobs, grouped by table."""
    job_start: I8
    """int64[J + 1]: offset of each job's tables in `job_table`."""
    job_table: I4
    """int32[E]: tables, grouped by job."""
    job: I4
    """int32[J, 4]: kind, key, app and number of tables of each job."""
    job_amount: F8
    """float64[J, 4]: read cost per byte, GPU hours, CPU hours and table bytes of each job."""
    supply: F8
    """float64[K, R]: supply in GPU hours."""
    share: F8
    """float64[K, R]: the region's share of the total supply."""
    share2: F8
    """float64[K]: sum of the squares of `share`."""
    mean: F8
    """float64[K]: mean supply of the regions with any supply."""
    importance: F8
    """float64[K]: weight of the priority level."""
    tiny: F8
    """float64[K]: demand below this is treated as a rounding error."""
    at_home: F8
    """float64[K, R]: 1 if hours of this key in this region count as at home."""
    quota: F8
    """float64[A, R]: quota in CPU hours."""
    quota_allowed: F8
    """float64[A, R]: the quota, or the usage at the start if that is larger."""
    quota_scale: F8
    """float64[A]: divisor of the excess over the quotas."""
    capacity: F8
    """float64[R]: storage capacity in bytes."""
    capacity_allowed: F8
    """float64[R]: the capacity, or the stored bytes at the start if that is more."""
    capacity_share: F8
    """float64[R]: the region's share of the total capacity."""
    number: F8
    """float64[N_NUMBERS]: see `READ_WEIGHT` and following."""


class PlanState(NamedTuple):
    """A plan and the values derived from it."""

    home: I4
    """int32[T]: home regions."""
    region: I4
    """int32[J]: the region where each job runs, or NONE."""
    read: F8
    """float64[J]: read term of each job."""
    homes: I8
    """int64[J, 2]: for ML jobs, the sum of the home numbers of the job's tables, and the sum of their squares. All
    homes are equal if and only if the count times the second sum equals the square of the first (Cauchy-Schwarz)."""
    demand: F8
    """float64[K, R]: demand in GPU hours."""
    sums: F8
    """float64[K, 4]: see `HOURS` and following."""
    cpu: F8
    """float64[A, R]: used CPU hours."""
    stored: F8
    """float64[R]: stored bytes."""
    now: F8
    """float64[N_NOW]: see `READ` and following."""


class Work(NamedTuple):
    """Scratch arrays for evaluating the moves of one table, and the result."""

    total: F8
    """float64[R]: change of the objective if the table moves to each region."""
    lack: F8
    """float64[R]: change of the relative excess over the limits."""
    broken: F8
    """float64[R]: change of the relative excess over the allowed limits."""
    left: F8
    """float64[K + A, R]: change of hours in each region, independent of the target region."""
    come: F8
    """float64[K + A, R]: additional hours in a region if the table moves to it."""
    follow: F8
    """float64[K + A]: hours that always move to the target region."""
    cross: F8
    """float64[R, K + A, R]: change of hours by target region of the move, channel, and affected region."""
    crossed: B1
    """bool[R, K + A]: whether `cross` has entries for the target and channel."""
    channels: I4
    """int32[K + A]: the channels with a flow, which `flags` marks."""
    flags: B1
    """bool[K + A]: whether a channel is in `channels`."""
    base: F8
    """float64[K, 5]: `sums` after applying `left`, and the resulting cost of the key."""
    read: F8
    """float64[R]: change of the read term by target region."""
    tables: I4
    """int32[R]: number of a job's tables at home in each region."""
    tallied: F8
    """float64[R]: bytes of a job's tables at home in each region."""


class StepScratch(NamedTuple):
    """Scratch arrays for walk steps that move several tables."""

    undo: I4
    """int32: homes of a job's tables before the step."""
    members: I4
    """int32: the tables of a cluster."""
    marks: I4
    """int32[T + 1]: see `tetris.kernels.search.cluster`."""
