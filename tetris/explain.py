"""What each move of a plan is for: what it gains in each term, and which jobs gain or lose a region."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tetris.columns import NONE, Columns, Ints
from tetris.problem import Problem

_RANKED = 2000
"""Plans of more moves are explained in the order of what each gains by itself at the start."""


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
    """The moves of a plan ([T]), the one that gains the most first, each as things are after those before it."""
    problem = Problem(columns)
    left = [int(t) for t in np.flatnonzero(home != columns.home)]
    if len(left) > _RANKED:
        left.sort(key=lambda t: (problem.weigh(t).total[home[t]], t))
        for table in left:
            yield _move(problem, table, int(home[table]))
        return
    while left:
        table = min(left, key=lambda t: (problem.weigh(t).total[home[t]], t))
        left.remove(table)
        yield _move(problem, table, int(home[table]))


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
