"""Greedy passes and simulated annealing walks. Effort is measured in evaluations instead of time.

The cost of a step is `total + penalty * lack`, where `lack` is the relative excess over the limits. A large penalty
minimises the excess first. With a small penalty, a walk may pass through plans that violate constraints.

A cluster is a set of tables with the same home that are connected by shared jobs. If projects own tables, moving a
single table away from its project always worsens the objective, and moving the tables of one job covers only a few of
them, so a walk also moves whole clusters.
"""

import math
from typing import NamedTuple

import numpy as np

from domain.compiled import compiled
from tetris.kernels.layout import COUNT, F8, I4, KIND, MAGNITUDE, Fixed, PlanState, StepScratch, Work
from tetris.kernels.move_costs import weigh
from tetris.kernels.moves import apply, recompute
from tetris.kernels.terms import excess, objective

_MOST_JOBS = 64
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
        for index in range(min(jobs, _MOST_JOBS)):
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


EVALUATIONS, MOVES, BEST_LACK, BEST_TOTAL, LEAST_LACK = range(5)
"""Entries of a search's counters: evaluations, moved tables, excess and total of the best plan, and the least excess of
all best plans so far. A plan with a smaller total is accepted only if its excess does not exceed the least one, except
for rounding."""
N_TALLY = 5
_ML = 0
_JOBS, _SWAPS, _CLUSTERS = 0.25, 0.03, 0.03
"""Fractions of a walk's steps that move jobs, swap tables, or move clusters. All other steps move a single table. With
0.12 or 0.45 for jobs, or 0.15 for swaps, plans were 1 to 3% worse on dense instances. Without clusters, plans were 6 to
43% worse on each of seven instances of MAST's shape, and 1% better on dense instances."""
_LEAST = 1e-14
"""Smaller changes, as a fraction of the objective's magnitude, are rounding errors and do not count as gains."""
_LEAST_LACK = 1e-12
_CALL = 20
"""Fixed cost of evaluating or moving a table, in evaluations, in addition to its jobs and regions."""
_UNBROKEN = 1e-9
_COPIED = 4096
"""Maximum number of tables for copying the best plan after each step."""


@compiled
def _effort(fixed: Fixed, work: Work, table: int) -> int:
    return _CALL + 2 * (fixed.table_start[table + 1] - fixed.table_start[table]) + work.total.shape[0]


@compiled
def _cost(work: Work, region: int, penalty: float) -> float:
    """Returns the cost of moving the evaluated table to a region."""
    lack = work.lack[region]
    return work.total[region] + (penalty * lack if abs(lack) > _LEAST_LACK else 0.0)


@compiled
def best_region(fixed: Fixed, state: PlanState, work: Work, table: int, penalty: float, spent: F8) -> tuple[int, float]:
    """Returns the best region for a table that does not increase `broken`, and the cost (0: the table stays)."""
    weigh(fixed, state, work, table)
    spent[EVALUATIONS] += _effort(fixed, work, table)
    best, least = state.home[table], 0.0
    rounding = _LEAST * fixed.number[MAGNITUDE]
    for region in range(work.total.shape[0]):
        cost = _cost(work, region, penalty)
        if cost < least - rounding and work.broken[region] <= _LEAST_LACK:
            best, least = region, cost
    return best, least


@compiled
def weigh_moves(fixed: Fixed, state: PlanState, work: Work, tables: I4, to: I4, change: F8) -> None:
    """Computes the change of the objective for moving each table on its own to its region in `to` [T]."""
    for index in range(tables.shape[0]):
        weigh(fixed, state, work, tables[index])
        change[index] = work.total[to[tables[index]]]


@compiled
def rank(fixed: Fixed, state: PlanState, work: Work, tables: I4, penalty: float, spent: F8, gain: F8) -> None:
    """Computes the gain of each table's best move, each on its own from the current plan (MAST 3.4)."""
    for index in range(tables.shape[0]):
        _, change = best_region(fixed, state, work, tables[index], penalty, spent)
        gain[index] = -change


@compiled
def take(fixed: Fixed, state: PlanState, work: Work, queue: I4, penalty: float, spent: F8) -> int:
    """Moves each table of a queue to its current best region if that improves the cost; returns the number of moves."""
    moved = 0
    for index in range(queue.shape[0]):
        table = queue[index]
        region, change = best_region(fixed, state, work, table, penalty, spent)
        if change < 0.0:
            apply(fixed, state, work, table, region)
            moved += 1
    spent[MOVES] += moved
    return moved


@compiled
def seed(number: int) -> None:
    """Seeds the random number generator of the compiled code."""
    np.random.seed(number)


@compiled
def _price(fixed: Fixed, state: PlanState, penalty: float) -> float:
    lack, _ = excess(fixed, state)
    return objective(fixed, state) + penalty * lack


@compiled
def keep(fixed: Fixed, state: PlanState, best: I4, spent: F8) -> bool:
    """Copies the plan to `best` if it is allowed and better: less excess first, then a smaller total."""
    lack, broken = excess(fixed, state)
    if broken > _UNBROKEN:
        return False
    total = objective(fixed, state)
    if lack < spent[BEST_LACK] - _UNBROKEN or (
        lack <= spent[LEAST_LACK] + _UNBROKEN and total < spent[BEST_TOTAL] - _LEAST * fixed.number[MAGNITUDE]
    ):
        best[:] = state.home
        spent[BEST_LACK] = lack
        spent[LEAST_LACK] = min(lack, spent[LEAST_LACK])
        spent[BEST_TOTAL] = total
        return True
    return False


@compiled
def _draw_region(work: Work, stay: int, penalty: float, heat: float) -> int:
    """Draws a region by the heat bath rule: the probability decreases exponentially with the cost of the move."""
    regions = work.total.shape[0]
    least = math.inf
    for region in range(regions):
        least = min(least, _cost(work, region, penalty))
    odds = 0.0
    for region in range(regions):
        odds += math.exp(-(_cost(work, region, penalty) - least) / heat)
    left = np.random.random() * odds
    for region in range(regions):
        left -= math.exp(-(_cost(work, region, penalty) - least) / heat)
        if left <= 0.0:
            return region
    return stay


@compiled
def _move_job(fixed: Fixed, state: PlanState, work: Work, job: int, region: int, undo: I4, spent: F8) -> bool:
    """Moves all tables of a job to one region; returns whether any table moved. The old homes are written to `undo`."""
    begin = fixed.job_start[job]
    moved = False
    for entry in range(begin, fixed.job_start[job + 1]):
        table = fixed.job_table[entry]
        undo[entry - begin] = state.home[table]
        if state.home[table] != region:
            moved = True
            spent[EVALUATIONS] += 2 * _effort(fixed, work, table)
            apply(fixed, state, work, table, region)
    return moved


@compiled
def _back(fixed: Fixed, state: PlanState, work: Work, job: int, undo: I4) -> None:
    begin = fixed.job_start[job]
    for entry in range(begin, fixed.job_start[job + 1]):
        apply(fixed, state, work, fixed.job_table[entry], undo[entry - begin])


@compiled
def _move_all(fixed: Fixed, state: PlanState, work: Work, members: I4, count: int, region: int) -> int:
    """Moves the first `count` tables of `members` to a region; returns the effort."""
    effort = 0
    for index in range(count):
        effort += _effort(fixed, work, members[index])
        apply(fixed, state, work, members[index], region)
    return effort


@compiled
def _accepts(more: float, heat: float) -> bool:
    """Metropolis criterion: accepts improvements, and a worsening by `more` with probability exp(-more / heat)."""
    return more <= 0.0 or np.random.random() < math.exp(-more / heat)


class Movable(NamedTuple):
    """The tables that may be moved, and the jobs all of whose tables may be moved together."""

    tables: I4
    jobs: I4


class Annealing(NamedTuple):
    """A walk from temperature `hot` to `cold` of `budget` evaluations, with a penalty of the relative excess."""

    budget: float
    hot: float
    cold: float
    penalty: float


@compiled
def walk(
    fixed: Fixed, state: PlanState, work: Work, movable: Movable, annealing: Annealing, best: I4, spent: F8,
    room: StepScratch,
) -> None:  # fmt: skip
    """Simulated annealing from the current plan.

    A step moves one table (heat bath), all tables of a job, or a cluster of tables, or swaps two tables. A job must not
    have more tables than `room.undo` has entries.
    """
    tables, jobs = movable
    budget, hot, cold, penalty = annealing
    begin = spent[EVALUATIONS]
    price = _price(fixed, state, penalty)
    undo, members, marks = room.undo, room.members, room.marks
    regions = work.total.shape[0]
    small = best.shape[0] <= _COPIED
    while True:
        done = (spent[EVALUATIONS] - begin) / budget
        if done >= 1.0:
            return
        spent[EVALUATIONS] += 1
        heat = hot * (cold / hot) ** done
        kind = np.random.random()
        if kind < _JOBS and jobs.shape[0] > 0:
            job = jobs[np.random.randint(jobs.shape[0])]
            entry = np.random.randint(fixed.job_start[job], fixed.job_start[job + 1])
            region = state.home[fixed.job_table[entry]]
            if np.random.random() < 0.5:
                region = np.random.randint(regions)
            if not _move_job(fixed, state, work, job, region, undo, spent):
                continue
            after = _price(fixed, state, penalty)
            if not _accepts(after - price, heat):
                _back(fixed, state, work, job, undo)
                continue
            price = after
        elif kind < _JOBS + _SWAPS:
            one = tables[np.random.randint(tables.shape[0])]
            two = tables[np.random.randint(tables.shape[0])]
            here, there = state.home[one], state.home[two]
            if here == there:
                continue
            spent[EVALUATIONS] += 2 * (_effort(fixed, work, one) + _effort(fixed, work, two))
            apply(fixed, state, work, one, there)
            apply(fixed, state, work, two, here)
            after = _price(fixed, state, penalty)
            if not _accepts(after - price, heat):
                apply(fixed, state, work, one, here)
                apply(fixed, state, work, two, there)
                continue
            price = after
        elif kind < _JOBS + _SWAPS + _CLUSTERS:
            one = tables[np.random.randint(tables.shape[0])]
            # The size is log-uniform: each order of magnitude is equally likely.
            most = int(2.0 * (members.shape[0] / 2.0) ** np.random.random())
            count, evaluations = cluster(fixed, state, one, most, members, marks)
            spent[EVALUATIONS] += evaluations
            here, region = state.home[one], np.random.randint(regions)
            if np.random.random() < 0.5:
                region = home_nearby(fixed, state, members[np.random.randint(count)])
            if here == region:
                continue
            spent[EVALUATIONS] += 2 * _move_all(fixed, state, work, members, count, region)
            after = _price(fixed, state, penalty)
            if not _accepts(after - price, heat):
                _move_all(fixed, state, work, members, count, here)
                continue
            price = after
        else:
            table = tables[np.random.randint(tables.shape[0])]
            weigh(fixed, state, work, table)
            spent[EVALUATIONS] += _effort(fixed, work, table)
            region = _draw_region(work, state.home[table], penalty, heat)
            if region == state.home[table]:
                continue
            price += _cost(work, region, penalty)
            apply(fixed, state, work, table, region)
            spent[MOVES] += 1
        # Large plans are not copied after each step; the caller keeps the final plan of a walk. While the best plan has
        # an excess, any plan may be better; afterwards only one with a smaller cost.
        if small and (price < spent[BEST_TOTAL] or spent[BEST_LACK] > 0.0):
            keep(fixed, state, best, spent)


@compiled
def spread(fixed: Fixed, state: PlanState, work: Work, tables: I4, count: int, penalty: float, spent: F8) -> float:
    """Returns the mean absolute cost of moves of `count` random tables: the scale of a walk's temperatures."""
    total, number = 0.0, 0
    for _ in range(count):
        table = tables[np.random.randint(tables.shape[0])]
        weigh(fixed, state, work, table)
        spent[EVALUATIONS] += _effort(fixed, work, table)
        for region in range(work.total.shape[0]):
            if region != state.home[table]:
                total += abs(_cost(work, region, penalty))
                number += 1
    return total / max(number, 1)


@compiled
def refresh(fixed: Fixed, state: PlanState, work: Work, home: I4) -> None:
    """Replaces the plan by `home` and recomputes the state."""
    state.home[:] = home
    recompute(fixed, state, work)


@compiled
def joined_jobs(fixed: Fixed, most: int) -> I4:
    """Returns the ML jobs with two to `most` tables. An ML job has no region unless all its tables have the same home.

    For Spark and Presto jobs, every table that moves to the job's region reduces remote reads, so single moves suffice.
    """
    jobs = np.empty(fixed.job.shape[0], np.int32)
    count = 0
    for job in range(fixed.job.shape[0]):
        if fixed.job[job, KIND] == _ML and 2 <= fixed.job[job, COUNT] <= most:
            jobs[count] = job
            count += 1
    return jobs[:count].copy()
