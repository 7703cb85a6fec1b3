"""What the branch and bound works on: what never changes, the state of each depth, and the tree.

T tables, R regions (at most 62: sets of regions are bit masks), N groups of jobs that read the same tables in the same
way, K keys (a GPU type and a priority level each), A apps with quotas. Amounts go to regions by *channel*: the K keys
(GPU hours), then storage (bytes), then the A apps (CPU hours); C = K + 1 + A.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F8 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int64]
B1 = npt.NDArray[np.bool_]

MOST_REGIONS = 62
ROUNDING = 1e-9
"""As in `tetris.score`: of a limit."""
SLACK = 1e-12
"""Of a channel's whole amount: what its running sums may be off by."""
CLOSE = 5e-10
"""A bound that is this part of the best total below it is met."""
READ, HOME_H, MOVED, BOUND, LACK = range(5)
"""Entries of `Levels.now`: the read term so far, hours that may still be at home, bytes moved, a lower bound of the
objective, and one of the relative excess."""
N_NOW = 5
SURE, MAY = 0, 1
"""Columns of `Levels.sums`."""
ALIVE, OPEN, CHANGED = 0, 1, 2
"""Columns of `Levels.counts`."""
DEPTH, NODES, WORK, DONE = range(4)
"""Entries of `Tree.number`: where the search is, tables decided, moves tried, and whether all was searched."""
N_NUMBERS = 4
NONE = -1


class Fixed(NamedTuple):
    """An instance."""

    size: F8
    """[T] bytes."""
    start: I8
    """[T]: homes at the start."""
    replicas: I8
    """[T]: the set of regions that hold one."""
    twin: I8
    """[T, 2]: the tables before and after this one among its equals, or NONE."""
    table_start: I8
    """[T + 1]: where a table's groups begin in `table_group`."""
    table_group: I8
    """Groups."""
    group_start: I8
    """[N + 1]: where a group's tables begin in `group_table`."""
    group_table: I8
    """Tables, in the order that the job names them, in which bytes are added up."""
    is_ml: B1
    """[N]: it runs only where all its tables are."""
    per_byte: F8
    """[N]: what a byte read from afar adds to the objective."""
    amount_start: I8
    """[N + 1]: where a group's amounts begin in `amount` and `channel`."""
    amount: F8
    """Hours, positive."""
    channel: I8
    """Of each amount."""
    whole: F8
    """[C]: the amount of all."""
    base: F8
    """[R]: bytes of replicas."""
    share: F8
    """[K + 1, R]: the region's part of the supply or capacity."""
    supply: F8
    """[K, R] GPU hours."""
    mean: F8
    """[K]: mean supply of the regions that have any."""
    weight: F8
    """[K + 1]: what the channel's term weighs in the objective."""
    overload: float
    at_home: I8
    """[K]: regions in which the key's hours count as at home."""
    limit: F8
    """[1 + A, R]: what storage and apps may use."""
    allowed: F8
    """[1 + A, R]: the limit, or what the start uses if that is more."""
    scale: F8
    """[1 + A]: what an excess is divided by."""
    wanted_h: float
    """High-priority GPU hours that must be at home."""
    move_quota: float
    """Bytes."""


class Levels(NamedTuple):
    """What follows from the first decisions, for each depth 0..T: a step copies a level and changes the copy, so that
    nothing is undone and no rounding adds up.
    """

    floats: F8
    """[T + 1, F]: all arrays of floats below are views of it."""
    ints: I8
    """[T + 1, I]: the same of integers."""
    low: F8
    """[T + 1, C, R]: what is in the region for certain."""
    high: F8
    """[T + 1, C, R]: what may be there."""
    sums: F8
    """[T + 1, C, 2]: what is in some region for certain, and what may be."""
    counts: I8
    """[T + 1, C, 3]: how many amounts may be in some region, how many are not settled; 1 if the step changed it."""
    cost: F8
    """[T + 1, K + 1]: lower bound of the channel's term."""
    lack: F8
    """[T + 1, 1 + A]: lower bound of the channel's relative excess."""
    mask: I8
    """[T + 1, N]: regions in which a group may run."""
    settled: I8
    """[T + 1, N]: 1 if its region, or that it has none, is certain."""
    read: F8
    """[T + 1, N]: the least that it may read."""
    now: F8
    """[T + 1, N_NOW]"""


class Tree(NamedTuple):
    """The path that is searched, and what was found."""

    home: I8
    """[T], or NONE."""
    domain: I8
    """[T + 1, T]: where a table may still go."""
    table: I8
    """[T + 1]: which table is decided at a depth."""
    child: I8
    """[T + 1, R]: its regions, the most promising first."""
    bound: F8
    """[T + 1, R]: lower bounds of them."""
    children: I8
    """[T + 1]: how many there are."""
    next: I8
    """[T + 1]: the one to be tried next."""
    tried: F8
    """[R]: room for bounds; inf is out of the question."""
    room: F8
    """[2, R]: room to count a job's tables and bytes."""
    best_home: I8
    """[T]"""
    best: F8
    """[1]: what the best plan costs."""
    number: I8
    """[N_NUMBERS]"""
