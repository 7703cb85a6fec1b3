"""Clusters: tables with the same home that are connected by shared jobs, so that a walk can move them together.

If projects own tables, moving a single table away from its project always worsens the objective, and moving the tables
of one job covers only a few of them.
"""

import numpy as np

from domain.compiled import compiled
from tetris.kernels.layout import I4, Fixed, PlanState

_JOBS = 64
"""Maximum number of jobs per table that are examined."""


@compiled
def cluster(fixed: Fixed, state: PlanState, table: int, most: int, members: I4, marks: I4) -> tuple[int, int]:
    """Writes a cluster of up to `most` tables to `members`: the table, then connected tables at its home, by distance.

    Returns the number of tables in the cluster, and the number of jobs and tables that were examined. `marks` is
    int32[T + 1]: the number of the last cluster in which each table was found, and the newest cluster number at the
    end.
    """
    tables = state.home.shape[0]
    marks[tables] += 1
    mark, home = marks[tables], state.home[table]
    table_start, table_job, job_start, job_table, homes = (
        fixed.table_start, fixed.table_job, fixed.job_start, fixed.job_table, state.home,
    )  # fmt: skip
    members[0] = table
    marks[table] = mark
    count, next_one, evaluations = 1, 0, 0
    while next_one < count and count < most:
        one = members[next_one]
        next_one += 1
        begin = table_start[one]
        jobs = table_start[one + 1] - begin
        # Start at a random job, so that the members of a full cluster vary.
        first = np.random.randint(jobs) if jobs > 0 else 0
        for index in range(min(jobs, _JOBS)):
            job = table_job[begin + (first + index) % jobs]
            evaluations += 1
            for entry in range(job_start[job], job_start[job + 1]):
                other = job_table[entry]
                evaluations += 1
                if count < most and marks[other] != mark and homes[other] == home:
                    marks[other] = mark
                    members[count] = other
                    count += 1
            if count >= most:
                break
    return count, evaluations


@compiled
def home_nearby(fixed: Fixed, state: PlanState, table: int) -> int:
    """Returns the home of a random table of a random job of this table, or the table's own home if it has no jobs."""
    begin, end = fixed.table_start[table], fixed.table_start[table + 1]
    if begin == end:
        return state.home[table]
    job = fixed.table_job[np.random.randint(begin, end)]
    return state.home[fixed.job_table[np.random.randint(fixed.job_start[job], fixed.job_start[job + 1])]]
