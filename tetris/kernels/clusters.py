"""Clusters: tables at one home that are joined by jobs, to be moved together.

Where projects own tables, no single table leaves its project without a loss, and a job takes a few of them only.
"""

import numpy as np

from domain.compiled import compiled
from tetris.kernels.layout import I4, Fixed, State

_JOBS = 64
"""Jobs of a table that are looked at."""


@compiled
def cluster(fixed: Fixed, state: State, table: int, most: int, members: I4, marks: I4) -> tuple[int, int]:
    """Set `members` to up to `most` tables: the given one, then what jobs join to it within its home, nearest first.

    Returns how many there are, and how many jobs and tables were looked at. `marks`, int32[T + 1], has the number of
    the last cluster that each table was met in, and the newest number at its end.
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
        # From a random job on: a cluster that is full has another part of the neighbours each time.
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
def home_nearby(fixed: Fixed, state: State, table: int) -> int:
    """The home of a random table that shares a random job with this one; its own without jobs."""
    begin, end = fixed.table_start[table], fixed.table_start[table + 1]
    if begin == end:
        return state.home[table]
    job = fixed.table_job[np.random.randint(begin, end)]
    return state.home[fixed.job_table[np.random.randint(fixed.job_start[job], fixed.job_start[job + 1])]]
