"""Depth-first branch and bound. A node branches on the table with the largest bound, smallest child bound first."""

import math

from domain.compiled import compiled
from tetris.exact.kernels.decide_home import decide_home
from tetris.exact.kernels.layout import (
    BOUND,
    CLOSE,
    DEPTH,
    DONE,
    I8,
    LACK,
    NODES,
    NONE,
    ROUNDING,
    WORK,
    ExactConstants,
    Levels,
    Tree,
)


@compiled
def search(
    fixed: ExactConstants, levels: Levels, tree: Tree, order: I8, lack_only: bool, most_lack: float, budget: int
) -> None:
    """Continues the search from the state in `tree` for `budget` evaluated decisions, or to the end.

    With `lack_only` it minimises the relative excess; otherwise the objective, among plans whose excess is at most
    `most_lack`. `order` is the order in which tables are considered for branching.
    """
    number, tables = tree.number, tree.home.shape[0]
    stop = number[WORK] + budget
    while number[WORK] < stop:
        depth = number[DEPTH]
        if tree.children[depth] == NONE:
            _branch(fixed, levels, tree, order, depth, lack_only, most_lack)
        if tree.next[depth] == tree.children[depth]:
            tree.children[depth] = NONE
            if depth == 0:
                number[DONE] = 1
                return
            number[DEPTH] = depth - 1
            tree.home[tree.table[depth - 1]] = NONE
            continue
        index = tree.next[depth]
        tree.next[depth] += 1
        if _met(tree.bound[depth, index], tree.best[0]):
            tree.next[depth] = tree.children[depth]
            continue
        table = tree.table[depth]
        decide_home(fixed, levels, tree, depth, table, tree.child[depth, index], math.inf)
        number[WORK] += 1
        if depth + 1 == tables:
            tree.best[0] = tree.bound[depth, index]
            for other in range(tables):
                tree.best_home[other] = tree.home[other]
            tree.home[table] = NONE
            continue
        for other in range(tables):
            tree.domain[depth + 1, other] = tree.domain[depth, other]
        tree.children[depth + 1] = NONE
        number[DEPTH] = depth + 1


@compiled
def _met(bound: float, best: float) -> bool:
    return bound >= best - CLOSE * best or bound == math.inf


@compiled
def _branch(
    fixed: ExactConstants, levels: Levels, tree: Tree, order: I8, depth: int, lack_only: bool, most_lack: float
) -> None:
    """Chooses the table to decide at a depth and sorts its homes by bound; removes impossible homes from domains."""
    tree.number[NODES] += 1
    tree.next[depth], tree.children[depth] = 0, 0
    best_least, best_sum = -1.0, -1.0
    looked = 0
    for table in order:
        if tree.home[table] != NONE:
            continue
        least, total = _try(fixed, levels, tree, depth, table, lack_only, most_lack)
        if least > best_least or (least == best_least and total > best_sum):
            best_least, best_sum = least, total
            tree.table[depth] = table
            _take_children(tree, depth)
        if least == math.inf:
            return
        looked += 1
        if looked == 24:
            return


@compiled
def _try(
    fixed: ExactConstants, levels: Levels, tree: Tree, depth: int, table: int, lack_only: bool, most_lack: float
) -> tuple[float, float]:
    """Writes the lower bounds of the table's homes to `tree.tried`; returns their minimum and their sum."""
    regions = tree.tried.shape[0]
    first, last = 0, regions - 1
    before, after = fixed.twin[table, 0], fixed.twin[table, 1]
    if before != NONE and tree.home[before] != NONE:
        first = tree.home[before]
    if after != NONE and tree.home[after] != NONE:
        last = tree.home[after]
    least, total = math.inf, 0.0
    enough = math.inf if lack_only else tree.best[0]
    for region in range(regions):
        tree.tried[region] = math.inf
        if not (tree.domain[depth, table] >> region) & 1 or region < first or region > last:
            continue
        decide_home(fixed, levels, tree, depth, table, region, enough)
        tree.number[WORK] += 1
        now = levels.now[depth + 1]
        bound = now[LACK] if lack_only else now[BOUND]
        if now[LACK] > most_lack * (1.0 + ROUNDING) or _met(bound, tree.best[0]):
            tree.domain[depth, table] &= ~(1 << region)
            total += tree.best[0]
        else:
            tree.tried[region] = bound
            least = min(least, bound)
            total += bound
    tree.home[table] = NONE
    return least, total


@compiled
def _take_children(tree: Tree, depth: int) -> None:
    """Copies the possible homes in `tree.tried` to the children of a depth, smallest bound first."""
    count = 0
    for region in range(tree.tried.shape[0]):
        bound = tree.tried[region]
        if bound == math.inf:
            continue
        at = count
        while at > 0 and tree.bound[depth, at - 1] > bound:
            tree.bound[depth, at] = tree.bound[depth, at - 1]
            tree.child[depth, at] = tree.child[depth, at - 1]
            at -= 1
        tree.bound[depth, at] = bound
        tree.child[depth, at] = region
        count += 1
    tree.children[depth] = count
