"""Explains a plan move by move: the change of each term, and the jobs that gain or lose a region."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tetris.columns import NONE, Columns, Ints
from tetris.kernels.search import weigh_moves
from tetris.problem import PlacementProblem

_NEAR = 64
"""Maximum number of tables whose moves are evaluated again after the move of a table that shares jobs with them."""


@dataclass(frozen=True, slots=True)
class Move:
    """One move, and the changes that it makes after all earlier moves. Negative changes are improvements."""

    table: str
    source: str
    target: str
    copied_bytes: float
    """0 if the target holds a replica."""
    read: float
    gpu: float
    storage: float
    """Changes of the three terms, without their weights."""
    total: float
    """Change of the weighted sum."""
    gain_region: tuple[str, ...]
    """Jobs that had no region before the move and have one after it."""
    lose_region: tuple[str, ...]
    """Jobs that had a region before the move and have none after it."""
    change_region: tuple[str, ...]
    """Jobs that change from one region to another."""


def explain(columns: Columns, home: Ints) -> Iterator[Move]:
    """Yields the moves of the plan `home` [T], the largest gain first; each gain counts after the earlier moves.

    The gain of a move is evaluated again when it reaches the head of the queue, and when a table that shares jobs with
    it has moved. If a gain has grown only because the load of regions changed, that is noticed only at the head of the
    queue.
    """
    problem = PlacementProblem(columns)
    left = home != columns.home
    queue = _weighed(problem, home, np.flatnonzero(left).astype(np.int32))
    heapq.heapify(queue)
    while queue:
        _, table = heapq.heappop(queue)
        if not left[table]:
            # A newer queue entry of this table was already used.
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


def _weighed(problem: PlacementProblem, home: Ints, tables: Ints) -> list[tuple[float, int]]:
    """Returns (change of the objective, table) for moving each table on its own."""
    change = np.zeros(len(tables))
    weigh_moves(problem.fixed, problem.state, problem.work, tables, home, change)
    return list(zip(change.tolist(), tables.tolist(), strict=True))


def _near(problem: PlacementProblem, table: int, left: npt.NDArray[np.bool_]) -> Ints:
    """Returns up to `_NEAR` tables that have not moved yet and share a job with this table."""
    fixed = problem.fixed
    found: dict[int, None] = {}
    for job in fixed.table_job[fixed.table_start[table] : fixed.table_start[table + 1]]:
        others = fixed.job_table[fixed.job_start[job] : fixed.job_start[job + 1]]
        found.update(dict.fromkeys(others[left[others]].tolist()))
        if len(found) >= _NEAR:
            break
    return np.array(list(found)[:_NEAR], np.int32)


def _move(problem: PlacementProblem, table: int, to: int) -> Move:
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
