"""Data of the branch and bound: the constants of an instance, the state at each depth, and the search tree.

Sizes: T tables, R regions (at most 62, because sets of regions are bit masks), N groups of jobs that read the same
tables in the same way, K keys (a GPU type and a priority level each), and A apps with quotas. Amounts in regions are
stored by *channel*: the K keys (GPU hours), then storage (bytes), then the A apps (CPU hours); C = K + 1 + A.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F8 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int64]
B1 = npt.NDArray[np.bool_]

MOST_REGIONS = 62
ROUNDING = 1e-9
"""The tolerance `tetris.kernels.layout.ROUNDING` for limits."""
SLACK = 1e-12
"""Maximum rounding error of a channel's running sums, as a fraction of its total amount."""
CLOSE = 5e-10
"""Relative gap to the best total below which a bound is pruned."""
READ, HOME_H, MOVED, BOUND, LACK = range(5)
"""Entries of `Levels.now`: a lower bound of the read term, an upper bound of the hours at home, the bytes moved, and
lower bounds of the objective and of the relative excess."""
N_NOW = 5
SURE, MAY = 0, 1
"""Columns of `Levels.sums`: amounts that certainly are, and that may be, in some region."""
ALIVE, OPEN, CHANGED = 0, 1, 2
"""Columns of `Levels.counts`: amounts that may be in some region, amounts with an open region, and a changed flag."""
DEPTH, NODES, WORK, DONE = range(4)
"""Entries of `Tree.number`: depth, branching decisions, evaluated decisions, and whether the search is complete."""
N_NUMBERS = 4
NONE = -1


class ExactConstants(NamedTuple):
    """The constants of an instance."""

    size: F8
    """[T]: table sizes in bytes."""
    start: I8
    """[T]: home regions at the start."""
    replicas: I8
    """[T]: bit mask of the regions with a replica of the table."""
    twin: I8
    """[T, 2]: the previous and the next interchangeable table, or NONE."""
    table_start: I8
    """[T + 1]: offset of each table's groups in `table_group`."""
    table_group: I8
    """The groups of all tables."""
    group_start: I8
    """[N + 1]: offset of each group's tables in `group_table`."""
    group_table: I8
    """The tables of all groups. A group keeps the table order of its jobs, because bytes are summed in that order."""
    is_ml: B1
    """[N]: whether the group runs only in a region that is the home of all its tables."""
    per_byte: F8
    """[N]: cost of a remotely read byte in the objective."""
    amount_start: I8
    """[N + 1]: offset of each group's amounts in `amount` and `channel`."""
    amount: F8
    """The hours of all groups; all are positive."""
    channel: I8
    """Channel of each amount."""
    whole: F8
    """[C]: total amount of each channel."""
    base: F8
    """[R]: bytes of the replicas in each region."""
    share: F8
    """[K + 1, R]: the region's share of the total supply, or of the total capacity in the last row."""
    supply: F8
    """[K, R]: supply in GPU hours."""
    mean: F8
    """[K]: mean supply of the regions with any supply."""
    weight: F8
    """[K + 1]: weight of the channel's term in the objective."""
    overload: float
    """Weight of the overload relative to the squared term."""
    at_home: I8
    """[K]: bit mask of the regions where the key's hours count as at home."""
    limit: F8
    """[1 + A, R]: limits of storage and of the apps."""
    allowed: F8
    """[1 + A, R]: the limit, or the usage at the start if that is larger."""
    scale: F8
    """[1 + A]: divisor of the excess."""
    wanted_h: float
    """High-priority GPU hours that must be at home."""
    move_quota: float
    """Maximum number of moved bytes."""


class Levels(NamedTuple):
    """The state after the first decisions, for each depth 0 to T.

    A decision copies a level and changes the copy. So nothing has to be undone, and rounding errors do not accumulate.
    """

    floats: F8
    """[T + 1, F]: the storage of all float arrays below, which are views of it."""
    ints: I8
    """[T + 1, I]: the storage of all integer arrays below."""
    low: F8
    """[T + 1, C, R]: amount that is certainly in the region."""
    high: F8
    """[T + 1, C, R]: amount that may be in the region."""
    sums: F8
    """[T + 1, C, 2]: total amount that is certainly in some region, and total amount that may be in one."""
    counts: I8
    """[T + 1, C, 3]: number of amounts that may be in some region, number of amounts with an open region, and 1 if the
    last decision changed the channel."""
    cost: F8
    """[T + 1, K + 1]: lower bound of the channel's term."""
    lack: F8
    """[T + 1, 1 + A]: lower bound of the channel's relative excess."""
    mask: I8
    """[T + 1, N]: bit mask of the regions in which a group may run."""
    settled: I8
    """[T + 1, N]: 1 if the region of the group, or that it has none, is final."""
    read: F8
    """[T + 1, N]: lower bound of the group's read term."""
    now: F8
    """[T + 1, N_NOW]: see `READ` and following."""


class Tree(NamedTuple):
    """The current path of the depth-first search, and the best plan."""

    home: I8
    """[T]: decided home of each table, or NONE."""
    domain: I8
    """[T + 1, T]: bit mask of the regions that are still possible for a table."""
    table: I8
    """[T + 1]: the table that is decided at each depth."""
    child: I8
    """[T + 1, R]: possible regions of that table, the smallest bound first."""
    bound: F8
    """[T + 1, R]: lower bounds for the regions in `child`."""
    children: I8
    """[T + 1]: number of entries in `child`; NONE before branching."""
    next: I8
    """[T + 1]: index in `child` of the next region to search."""
    tried: F8
    """[R]: scratch array for bounds; inf for impossible regions."""
    room: F8
    """[2, R]: scratch array for counting a job's tables and bytes."""
    best_home: I8
    """[T]: homes of the best plan."""
    best: F8
    """[1]: cost of the best plan (the excess or the total, whichever is minimised)."""
    number: I8
    """[N_NUMBERS]: see `DEPTH` and following."""
