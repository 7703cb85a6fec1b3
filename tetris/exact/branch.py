"""The branch and bound search: the incumbent, the lower bound, and running the search in slices up to a time limit."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tetris.columns import NONE, Columns, Ints, Longs
from tetris.exact.kernels.decide_home import decide_home, weigh
from tetris.exact.kernels.layout import BOUND, DEPTH, DONE, LACK, MOST_REGIONS, NODES, ROUNDING, ExactConstants
from tetris.exact.kernels.search import search
from tetris.exact.prepare import cells_of, fixed_of, groups_of, levels_of, tree_of
from tetris.problem import PlacementProblem


class TooLarge(ValueError):
    """The instance is too large for the exact method. The message names the exceeded limit and an alternative."""


@dataclass(frozen=True, slots=True)
class ExactProgress:
    """Progress of the search."""

    elapsed_s: float
    excess: float
    """Relative excess of the best plan so far, which is minimised first."""
    total: float
    """Objective of the best plan so far."""
    bound: float
    """Lower bound of the objective of all allowed plans with at most this excess."""
    nodes: int


@dataclass(frozen=True, slots=True)
class ExactAnswer:
    """The best plan found, and a lower bound for all other plans."""

    home: Ints
    """[T] home regions."""
    total: float
    excess: float
    """Relative excess of the plan over the limits; 0 if it violates none."""
    bound: float
    """Lower bound of the total of all allowed plans with at most this excess."""
    proved: bool
    """Whether it is proved that no allowed plan has less excess, or equal excess and a smaller total (within 1e-9)."""
    limit: str
    """What ended the search before a proof: `time`, `stopped`, or an empty string."""
    nodes: int
    """Number of branching decisions."""


_PROVED = 1e-9
"""Relative gap between total and bound at which the total counts as proved."""
MOST_CELLS = 40_000_000
"""Maximum number of values in all levels (320 MB)."""
_SLICE = 20_000_000
"""Number of state values that are copied in one slice, which takes a few tenths of a second."""


@dataclass(frozen=True, slots=True)
class Weight:
    """Cost of a plan: plans are compared by excess, then by total."""

    excess: float
    total: float

    def better(self, other: "Weight") -> bool:
        """Returns whether this cost is smaller by more than a rounding error of the excess."""
        if abs(self.excess - other.excess) > ROUNDING * max(self.excess, other.excess):
            return self.excess < other.excess
        return self.total < other.total


class Branching:
    """A resumable branch and bound. It first minimises the excess (if the start has any), then the total."""

    def __init__(self, columns: Columns) -> None:
        """Prepares the search, with the homes at the start as incumbent.

        Raises:
            TooLarge: the instance has too many regions or needs too much state.
        """
        tables, regions = len(columns.home), len(columns.regions)
        if regions > MOST_REGIONS:
            raise TooLarge(f"regions: {regions}: the exact method supports up to {MOST_REGIONS}; use climb")
        given = PlacementProblem(columns).fixed
        groups = groups_of(columns, given)
        cells = cells_of(columns, given, groups)
        if cells > MOST_CELLS:
            raise TooLarge(
                f"tables: {tables} with {len(groups)} groups of jobs: the exact method supports up to "
                f"{MOST_CELLS} values of state, but this instance needs {cells}; use climb"
            )
        self.fixed = fixed_of(columns, given, groups)
        self.levels = levels_of(self.fixed, tables)
        weigh(self.fixed, self.levels, 0, 0, math.inf)
        self.nodes = 0
        self.done = False
        self._budget = _SLICE // (400 + cells // (tables + 1))
        self._order = _by_influence(self.fixed)
        self.best = self.weigh(self.fixed.start)
        self._start(self.fixed.start, is_least_excess=self.best.excess == 0.0)

    @property
    def home(self) -> Ints:
        """[T] home regions of the best plan."""
        home: Ints = self.tree.best_home.astype(np.int32)
        return home

    def offer(self, home: Ints) -> bool:
        """Makes the plan `home` [T] the incumbent if it is allowed and better; returns whether it is.

        Call it only before the search.
        """
        weight = self.weigh(home.astype(np.int64))
        if math.isinf(weight.excess) or not weight.better(self.best):
            return False
        self.best = weight
        self._start(home.astype(np.int64), is_least_excess=weight.excess == 0.0)
        return True

    def weigh(self, home: Longs) -> Weight:
        """Returns the cost of the plan `home` [T]. The excess is infinite if the plan is not allowed."""
        levels, tree = levels_of(self.fixed, 1), tree_of(self.fixed, 1)
        weigh(self.fixed, levels, 0, 0, math.inf)
        for table, region in enumerate(home):
            decide_home(self.fixed, levels, tree, 0, table, int(region), math.inf)
            levels.floats[0], levels.ints[0] = levels.floats[1], levels.ints[1]
        return Weight(float(levels.now[0, LACK]), float(levels.now[0, BOUND]))

    def go_on(self) -> None:
        """Continues the search for one slice. Sets `done` when the search is complete."""
        tree, lack_only = self.tree, not self.is_least_excess
        most = math.inf if lack_only else self.best.excess
        nodes, best = int(tree.number[NODES]), float(tree.best[0])
        search(self.fixed, self.levels, tree, self._order, lack_only, most, self._budget)
        self.nodes += int(tree.number[NODES]) - nodes
        if tree.best[0] < best:
            self.best = self.weigh(tree.best_home)
        if not tree.number[DONE]:
            return
        if lack_only:
            self._start(tree.best_home, is_least_excess=True)
        else:
            self.done = True

    @property
    def bound(self) -> float:
        """Lower bound of the total of all allowed plans with at most the excess of the best plan."""
        if self.done:
            return self.best.total
        if not self.is_least_excess:
            return min(self.best.total, float(self.levels.now[0, BOUND]))
        tree, depth = self.tree, int(self.tree.number[DEPTH])
        open_bounds = [
            tree.bound[level, index]
            for level in range(depth + 1)
            for index in range(tree.next[level], tree.children[level])
        ]
        if tree.children[depth] == NONE:
            path = tree.bound[depth - 1, tree.next[depth - 1] - 1] if depth else self.levels.now[0, BOUND]
            open_bounds.append(path)
        return float(min([*open_bounds, self.best.total]))

    def _start(self, home: Longs, is_least_excess: bool) -> None:
        """Starts a search with the incumbent `home`.

        It minimises the total if `is_least_excess` is true, else the excess.
        """
        self.is_least_excess = is_least_excess
        self.tree = tree_of(self.fixed, len(home))
        self.tree.best_home[:] = home
        self.tree.best[0] = self.best.total if is_least_excess else self.best.excess


def _by_influence(fixed: ExactConstants) -> Longs:
    """Returns the tables sorted by descending influence on the objective."""
    keys = len(fixed.supply)
    part = np.divide(1.0, fixed.whole, out=np.zeros_like(fixed.whole), where=fixed.whole > 0)
    influence = fixed.size * part[keys] * fixed.weight[keys]
    for table in range(len(fixed.size)):
        for group in fixed.table_group[fixed.table_start[table] : fixed.table_start[table + 1]]:
            tables = fixed.group_table[fixed.group_start[group] : fixed.group_start[group + 1]]
            influence[table] += fixed.per_byte[group] * fixed.size[tables].sum()
            entries = slice(fixed.amount_start[group], fixed.amount_start[group + 1])
            for channel, amount in zip(fixed.channel[entries], fixed.amount[entries], strict=True):
                if channel < keys:
                    influence[table] += fixed.weight[channel] * amount * part[channel]
    return np.argsort(-influence, kind="stable")


def solve(
    columns: Columns,
    *,
    time_s: float,
    upper: Ints | None = None,
    progress: Callable[[ExactProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.process_time,
) -> ExactAnswer:
    """Returns the best allowed plan: no constraint is violated by more than at the start.

    The relative excess over the limits (`Problem.excess`) is minimised first, then the total. `upper` is an initial
    plan [T]; a good one saves time. `progress` and `stop` are called several times per second. A search that ends
    before `time_s` (on `clock`, in seconds of CPU time) is reproducible.

    Raises:
        TooLarge: the instance is too large for the exact method.
    """
    begin = clock()
    branching = Branching(columns)
    if upper is not None:
        branching.offer(upper)
    limit = ""
    while not branching.done and not limit:
        best = branching.best
        if progress is not None:
            progress(ExactProgress(clock() - begin, best.excess, best.total, branching.bound, branching.nodes))
        if stop is not None and stop():
            limit = "stopped"
        elif clock() - begin >= time_s:
            limit = "time"
        else:
            branching.go_on()
    best, bound = branching.best, branching.bound
    proved = branching.is_least_excess and best.total - bound <= _PROVED * best.total
    return ExactAnswer(
        home=branching.home,
        total=best.total,
        excess=best.excess,
        bound=bound,
        proved=proved,
        limit="" if proved else limit,
        nodes=branching.nodes,
    )
