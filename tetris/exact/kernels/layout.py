"""What the branch and bound works on: what never changes, the state of each depth, and the tree.

T tables, R regions (at most 62: sets of regions are bit masks), N groups of jobs that read the same tables in the same
way, K keys (a GPU type and a priority level each), A apps with quotas. Amounts go to regions by *channel*: the K keys
(GPU hours), then storage (bytes), then the A apps (CPU hours); C = K + 1 + A.
"""

from typing import Any, NamedTuple

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
DEPTH, NODES, WORK, DONE = range(4)
"""Entries of `Tree.number`: where the search is, tables decided, moves tried, and whether all was searched."""
N_NUMBERS = 4
NONE = -1


class Fixed(NamedTuple):
    """An instance."""

    size: Any
    """float64[T] bytes."""
    start: Any
    """int64[T]: homes at the start."""
    replicas: Any
    """int64[T]: the set of regions that hold one."""
    twin: Any
    """int64[T, 2]: the tables before and after this one among its equals, or NONE."""
    table_start: Any
    """int64[T + 1]: where a table's groups begin in `table_group`."""
    table_group: Any
    """int64"""
    group_start: Any
    """int64[N + 1]: where a group's tables begin in `group_table`."""
    group_table: Any
    """int64: in the order that the job names them, in which bytes are added up."""
    is_ml: Any
    """bool[N]: it runs only where all its tables are."""
    per_byte: Any
    """float64[N]: what a byte read from afar adds to the objective."""
    amount_start: Any
    """int64[N + 1]: where a group's amounts begin in `amount` and `channel`."""
    amount: Any
    """float64: hours, positive."""
    channel: Any
    """int64"""
    whole: Any
    """float64[C]: the amount of all."""
    base: Any
    """float64[R]: bytes of replicas."""
    share: Any
    """float64[K + 1, R]: the region's part of the supply or capacity."""
    supply: Any
    """float64[K, R] GPU hours."""
    mean: Any
    """float64[K]: mean supply of the regions that have any."""
    weight: Any
    """float64[K + 1]: what the channel's term weighs in the objective."""
    overload: float
    at_home: Any
    """int64[K]: regions in which the key's hours count as at home."""
    limit: Any
    """float64[1 + A, R]: what storage and apps may use."""
    allowed: Any
    """float64[1 + A, R]: the limit, or what the start uses if that is more."""
    scale: Any
    """float64[1 + A]: what an excess is divided by."""
    wanted_h: float
    """High-priority GPU hours that must be at home."""
    move_quota: float
    """Bytes."""


class Levels(NamedTuple):
    """What follows from the first decisions, for each depth 0..T: a step copies a level and changes the copy, so that
    nothing is undone and no rounding adds up."""

    floats: Any
    """float64[T + 1, F]: all arrays of floats below are views of it."""
    ints: Any
    """int64[T + 1, I]: the same of integers."""
    low: Any
    """float64[T + 1, C, R]: what is in the region for certain."""
    high: Any
    """float64[T + 1, C, R]: what may be there."""
    sure: Any
    """float64[T + 1, C]: what is in some region for certain."""
    may: Any
    """float64[T + 1, C]: what may be in some region."""
    alive: Any
    """int64[T + 1, C]: how many amounts may be in some region."""
    open: Any
    """int64[T + 1, C]: how many are not settled."""
    cost: Any
    """float64[T + 1, K + 1]: lower bound of the channel's term."""
    lack: Any
    """float64[T + 1, 1 + A]: lower bound of the channel's relative excess."""
    mask: Any
    """int64[T + 1, N]: regions in which a group may run."""
    settled: Any
    """int64[T + 1, N]: 1 if its region, or that it has none, is certain."""
    read: Any
    """float64[T + 1, N]: the least that it may read."""
    now: Any
    """float64[T + 1, N_NOW]"""


class Tree(NamedTuple):
    """The path that is searched, and what was found."""

    home: Any
    """int64[T], or NONE."""
    domain: Any
    """int64[T + 1, T]: where a table may still go."""
    table: Any
    """int64[T + 1]: which table is decided at a depth."""
    child: Any
    """int64[T + 1, R]: its regions, the most promising first."""
    bound: Any
    """float64[T + 1, R]: lower bounds of them."""
    count: Any
    """int64[T + 1]: how many there are."""
    next: Any
    """int64[T + 1]: the one to be tried next."""
    tried: Any
    """float64[R]: room for bounds; inf is out of the question."""
    room: Any
    """float64[2, R]: room to count a job's tables and bytes."""
    best_home: Any
    """int64[T]"""
    best: Any
    """float64[1]: what the best plan costs."""
    number: Any
    """int64[N_NUMBERS]"""
