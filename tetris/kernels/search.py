"""Searching: greedy passes, and walks that also take steps up. What a search costs is counted, not timed.

A step is judged by `total + penalty * lack`: with a large penalty what the limits lack comes first, with a small one a
walk may cross plans that cannot be published.
"""

import math

import numpy as np

from domain.compiled import compiled
from tetris.kernels.clusters import cluster, home_nearby
from tetris.kernels.layout import COUNT, F8, I4, KIND, MAGNITUDE, Fixed, Room, State, Work
from tetris.kernels.moves import apply, settle
from tetris.kernels.terms import excess, objective
from tetris.kernels.weigh import weigh

EVALUATIONS, MOVES, BEST_LACK, BEST_TOTAL, LEAST_LACK = range(5)
"""Entries of the tally of a search: jobs and regions looked at, tables moved, the best plan's lack and total, and the
least lack of all that were kept: a better total never costs more of it than rounding."""
N_TALLY = 5
_ML = 0
_JOBS, _SWAPS, _CLUSTERS = 0.25, 0.03, 0.03
"""Parts of a walk's steps. The rest are single tables. With 0.12 or 0.45 for jobs or 0.15 for swaps plans were 1 to 3%
worse on dense instances. Without clusters plans of MAST's shape were 6 to 43% worse (each of seven instances), those of
dense instances 1% better."""
_LEAST = 1e-14
"""What is less than this part of the objective's magnitude is its rounding, and no gain."""
_LEAST_LACK = 1e-12
_CALL = 20
"""What weighing or moving a table costs beside its jobs and regions, in evaluations."""
_UNBROKEN = 1e-9
_COPIED = 4096
"""Tables of a plan that is small enough to be copied at any step."""


@compiled
def _effort(fixed: Fixed, work: Work, table: int) -> int:
    return _CALL + 2 * (fixed.table_start[table + 1] - fixed.table_start[table]) + work.total.shape[0]


@compiled
def _cost(work: Work, region: int, penalty: float) -> float:
    """What moving the weighed table to a region costs."""
    lack = work.lack[region]
    return work.total[region] + (penalty * lack if abs(lack) > _LEAST_LACK else 0.0)


@compiled
def best_region(fixed: Fixed, state: State, work: Work, table: int, penalty: float, spent: F8) -> tuple[int, float]:
    """The best region for a table among those that break nothing more, and what moving there changes (0: stay)."""
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
def weigh_moves(fixed: Fixed, state: State, work: Work, tables: I4, to: I4, change: F8) -> None:
    """Set what moving each table by itself to its region in `to` ([T]) changes of the objective."""
    for index in range(tables.shape[0]):
        weigh(fixed, state, work, tables[index])
        change[index] = work.total[to[tables[index]]]


@compiled
def rank(fixed: Fixed, state: State, work: Work, tables: I4, penalty: float, spent: F8, gain: F8) -> None:
    """Set each table's gain by its best region (MAST 3.4: each by itself, from the plan as it is)."""
    for index in range(tables.shape[0]):
        _, change = best_region(fixed, state, work, tables[index], penalty, spent)
        gain[index] = -change


@compiled
def take(fixed: Fixed, state: State, work: Work, queue: I4, penalty: float, spent: F8) -> int:
    """Move each table of a queue to its best region as the plan is by then, if it still gains; how many moved."""
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
    """Seed the compiled code's generator."""
    np.random.seed(number)


@compiled
def _price(fixed: Fixed, state: State, penalty: float) -> float:
    lack, _ = excess(fixed, state)
    return objective(fixed, state) + penalty * lack


@compiled
def keep(fixed: Fixed, state: State, best: I4, spent: F8) -> bool:
    """Keep the plan in `best` if it may be published and is better: less lack first, then a smaller total."""
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
    """A region by the heat bath: with odds that fall exponentially in what moving there costs."""
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
def _move_job(fixed: Fixed, state: State, work: Work, job: int, region: int, undo: I4, spent: F8) -> bool:
    """Move all tables of a job to one region; whether any was elsewhere. Remembers where they were."""
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
def _back(fixed: Fixed, state: State, work: Work, job: int, undo: I4) -> None:
    begin = fixed.job_start[job]
    for entry in range(begin, fixed.job_start[job + 1]):
        apply(fixed, state, work, fixed.job_table[entry], undo[entry - begin])


@compiled
def _move_all(fixed: Fixed, state: State, work: Work, members: I4, count: int, region: int) -> int:
    """Move the first `count` of some tables; returns the effort."""
    effort = 0
    for index in range(count):
        effort += _effort(fixed, work, members[index])
        apply(fixed, state, work, members[index], region)
    return effort


@compiled
def _accepts(more: float, heat: float) -> bool:
    """Metropolis."""
    return more <= 0.0 or np.random.random() < math.exp(-more / heat)


@compiled
def walk(
    fixed: Fixed, state: State, work: Work, tables: I4, jobs: I4, budget: float, hot: float, cold: float,
    penalty: float, best: I4, spent: F8, room: Room,
) -> None:  # fmt: skip
    """Anneal from the plan as it is, from heat `hot` to `cold`, until `budget` evaluations are spent.

    Steps: one table by the heat bath; all tables of a job to one region; a cluster of tables to one region; two tables
    that change places. `tables` and `jobs` are those that may be moved; a job has at most as many tables as `room.undo`
    has room.
    """
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
            # Small clusters as often as large ones, by orders of magnitude.
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
        # A large plan is not copied at each step: what a walk ends with is kept by its caller. A plan that lacks less
        # may be a better one whatever it costs; of two that lack nothing it is the one with the smaller total.
        if small and (price < spent[BEST_TOTAL] or spent[BEST_LACK] > 0.0):
            keep(fixed, state, best, spent)


@compiled
def spread(fixed: Fixed, state: State, work: Work, tables: I4, count: int, penalty: float, spent: F8) -> float:
    """The mean of what moves of some tables drawn at random cost or gain: the scale of a walk's heat."""
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
def refresh(fixed: Fixed, state: State, work: Work, home: I4) -> None:
    """Take a plan as a whole."""
    state.home[:] = home
    settle(fixed, state, work)


@compiled
def joined_jobs(fixed: Fixed, most: int) -> I4:
    """ML jobs of two to `most` tables: only they lose everything while one table is elsewhere.

    What a Spark or Presto job reads afar shrinks with each table that comes, so moves of single tables suffice.
    """
    jobs = np.empty(fixed.job.shape[0], np.int32)
    count = 0
    for job in range(fixed.job.shape[0]):
        if fixed.job[job, KIND] == _ML and 2 <= fixed.job[job, COUNT] <= most:
            jobs[count] = job
            count += 1
    return jobs[:count].copy()
