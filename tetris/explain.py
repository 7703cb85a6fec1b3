"""What each move of a plan is for: what it gains in each term, and which jobs gain or lose a region."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tetris.columns import NONE, Columns, Ints
from tetris.kernels.search import weigh_moves
from tetris.problem import Problem

_NEAR = 64
"""Tables whose moves are weighed anew after a move that shares jobs with them."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move, and what it changes after those before it: negative numbers are gains."""

    table: str
    source: str
    target: str
    copied_bytes: float
    """0 where the target holds a replica."""
    read: float
    gpu: float
    storage: float
    """Each term before its weight."""
    total: float
    """The weighted sum."""
    gain_region: tuple[str, ...]
    """Jobs that had no region, and have one."""
    lose_region: tuple[str, ...]
    """Jobs that had one, and have none."""
    change_region: tuple[str, ...]


def explain(columns: Columns, home: Ints) -> Iterator[Move]:
    """The moves of a plan ([T]), the one that gains the most first, each as things are after those before it.

    What a move gains is weighed again when its turn comes, and when a table that shares jobs with it has moved. A gain
    that grew only because regions have become emptier or fuller meanwhile is seen when its turn comes, not before.
    """
    problem = Problem(columns)
    left = home != columns.home
    queue = _weighed(problem, home, np.flatnonzero(left).astype(np.int32))
    heapq.heapify(queue)
    while queue:
        _, table = heapq.heappop(queue)
        if not left[table]:
            # It came earlier with a gain that was weighed later.
            continue
        (now,) = _weighed(problem, home, np.array([table], np.int32))
        if queue and now > queue[0]:
            heapq.heappush(queue, now)
            continue
        left[table] = False
        near = _near(problem, table, left)
        yield _move(problem, table, int(home[table]))
        for again in _weighed(problem, home, near):
            heapq.heappush(queue, again)


def _weighed(problem: Problem, home: Ints, tables: Ints) -> list[tuple[float, int]]:
    """What moving each table by itself changes, beside its number."""
    change = np.zeros(len(tables))
    weigh_moves(problem.fixed, problem.state, problem.work, tables, home, change)
    return list(zip(change.tolist(), tables.tolist(), strict=True))


def _near(problem: Problem, table: int, left: npt.NDArray[np.bool_]) -> Ints:
    """Tables that are still to move and share a job with this one, the first of them."""
    fixed = problem.fixed
    found: dict[int, None] = {}
    for job in fixed.table_job[fixed.table_start[table] : fixed.table_start[table + 1]]:
        others = fixed.job_table[fixed.job_start[job] : fixed.job_start[job + 1]]
        found.update(dict.fromkeys(others[left[others]].tolist()))
        if len(found) >= _NEAR:
            break
    return np.array(list(found)[:_NEAR], np.int32)


def _move(problem: Problem, table: int, to: int) -> Move:
    columns, fixed = problem.columns, problem.fixed
    jobs = fixed.table_job[fixed.table_start[table] : fixed.table_start[table + 1]]
    source = int(problem.home[table])
    before, total, regions = problem.terms, problem.total, problem.state.region[jobs].copy()
    problem.move(table, to)
    after = problem.state.region[jobs]
    names = columns.job_names
    replicas = fixed.replica[fixed.replica_start[table] : fixed.replica_start[table + 1]]
    read, gpu, storage = np.subtract(problem.terms, before)
    return Move(
        table=columns.table_names[table],
        source=columns.regions[source],
        target=columns.regions[to],
        copied_bytes=0.0 if to in replicas else float(fixed.size[table]),
        read=float(read),
        gpu=float(gpu),
        storage=float(storage),
        total=problem.total - total,
        gain_region=tuple(names[j] for j in jobs[(regions == NONE) & (after != NONE)]),
        lose_region=tuple(names[j] for j in jobs[(regions != NONE) & (after == NONE)]),
        change_region=tuple(names[j] for j in jobs[(regions != NONE) & (after != NONE) & (regions != after)]),
    )
