"""A simple simulated annealing of tables' homes, the baseline for `climb` in the suite `tetris-annealing`.

It uses the Metropolis rule with geometric cooling over the whole budget, in one thread. A proposal moves one table to
another region, moves all tables of a job to one region, or swaps the regions of two tables. The code shares the
instance's arrays (`tetris.kernels.layout.Fixed`) and the terms of the objective with Tetris, but not its moves. It
keeps the tables and bytes of each job in each region, so a proposal costs a few operations for each job of its tables.
This needs memory for jobs times regions, which is too much at the full size of Tetris.

The energy is the objective plus a penalty for the excess over the limits. The best plan without excess is kept; until
there is one, the plan with the least excess.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from domain.compiled import compiled
from tetris.columns import Columns, Ints
from tetris.kernels import layout
from tetris.kernels.layout import F8, I4, NONE, Fixed
from tetris.kernels.terms import key_cost, over, short_of_home, storage_cost, strain
from tetris.problem import PlacementProblem

_READ, _STORED2, _STORED_SHARE, _HOME_H, _CPU_LACK, _STORED_LACK, _CPU_BROKEN, _STORED_BROKEN = range(8)
_BEST_LACK, _BEST_TOTAL, _PROPOSED = 0, 1, 2
_JOBS, _SWAPS = 0.15, 0.25
"""Fractions of the proposals that move whole jobs, and that swap two tables. The rest move single tables."""
HOT, COLD = 3e-3, 1e-5
"""First and last temperature, relative to the objective after a short descent.

Two pairs were tried with 10 s; this one was better over all shapes.
"""
_PENALTY = 3.0
"""Weight of the relative excess, relative to the same objective."""
_DESCENT = 0.03
"""Fraction of the time that the descent takes."""
_CHUNK = 2000
"""Number of proposals at one temperature."""
_MOST_TABLES = 64
_FEASIBLE = 1e-9


class AnnealedPlan(NamedTuple):
    """A plan with its derived values. K: GPU type and priority level; A: app."""

    home: I4
    """int32[T]: home of each table."""
    where: I4
    """int32[J]: region of each job, or NONE."""
    read: F8
    """float64[J]: read term of each job."""
    tables: I4
    """int32[J, R]: number of the job's tables in the region."""
    size: F8
    """float64[J, R]: bytes of the job's tables in the region."""
    demand: F8
    """float64[K, R]: GPU hours."""
    strained: F8
    """float64[K, R]: overload term."""
    sums: F8
    """float64[K, 4]: as `tetris.kernels.layout.PlanState.sums`."""
    cpu: F8
    """float64[A, R]: CPU hours."""
    stored: F8
    """float64[R]: stored bytes."""
    now: F8
    """float64[8]: running sums, indexed by `_READ` to `_STORED_BROKEN`."""


def anneal(
    columns: Columns,
    *,
    time_s: float,
    seed: int = 0,
    hot: float = HOT,
    cold: float = COLD,
    clock: Callable[[], float] = time.thread_time,
) -> Ints:
    """Returns the best plan ([T]) found from the instance's homes in `time_s` seconds of `clock`.

    Raises:
        ValueError: the instance has replicas or a quota of moved bytes, which are not supported.
    """
    if len(columns.replica) or np.isfinite(columns.move_quota_bytes):
        raise ValueError("columns: replicas and quotas of moved bytes are not supported")
    problem = PlacementProblem(columns)
    fixed, plan = problem.fixed, _plan(problem)
    best, tally, undo = columns.home.copy(), np.array([np.inf, np.inf, 0.0]), np.zeros(_MOST_TABLES, np.int32)
    penalty, frozen = _PENALTY * problem.total, 1e-12 * problem.magnitude
    tables = fixed.job[:, layout.COUNT]
    jobs = np.flatnonzero((tables >= 2) & (tables <= _MOST_TABLES)).astype(np.int32)
    _seed(seed)
    began_s = clock()
    while clock() - began_s < time_s * _DESCENT:
        _anneal(fixed, plan, jobs, frozen, penalty, best, tally, undo)
    scale = float(tally[_BEST_TOTAL]) if np.isfinite(tally[_BEST_TOTAL]) else problem.total
    plan = _plan(problem)
    done = _DESCENT
    while done < 1.0:
        heat = scale * hot * (cold / hot) ** ((done - _DESCENT) / (1.0 - _DESCENT))
        _anneal(fixed, plan, jobs, heat, _PENALTY * scale, best, tally, undo)
        done = (clock() - began_s) / time_s
    return best


def _plan(problem: PlacementProblem) -> AnnealedPlan:
    fixed, regions = problem.fixed, len(problem.columns.regions)
    jobs, keys = len(fixed.job), len(fixed.supply)
    plan = AnnealedPlan(
        home=problem.home.copy(),
        where=np.full(jobs, NONE, np.int32),
        read=np.zeros(jobs),
        tables=np.zeros((jobs, regions), np.int32),
        size=np.zeros((jobs, regions)),
        demand=np.zeros((keys, regions)),
        strained=np.zeros((keys, regions)),
        sums=np.zeros((keys, 4)),
        cpu=np.zeros_like(fixed.quota),
        stored=np.zeros(regions),
        now=np.zeros(8),
    )
    _recompute(fixed, plan)
    return plan


@compiled
def _seed(number: int) -> None:
    np.random.seed(number)


@compiled
def _recompute(fixed: Fixed, plan: AnnealedPlan) -> None:
    for table in range(plan.home.shape[0]):
        _store(fixed, plan, plan.home[table], fixed.size[table])
    for job in range(plan.where.shape[0]):
        for entry in range(fixed.job_start[job], fixed.job_start[job + 1]):
            table = fixed.job_table[entry]
            plan.tables[job, plan.home[table]] += 1
            plan.size[job, plan.home[table]] += fixed.size[table]
        _place(fixed, plan, job)


@compiled
def _store(fixed: Fixed, plan: AnnealedPlan, region: int, size: float) -> None:
    """Adds bytes to a region; negative bytes are removed."""
    now, before = plan.now, plan.stored[region]
    after = before + size
    scale = fixed.number[layout.STORED_SCALE]
    now[_STORED2] += after * after - before * before
    now[_STORED_SHARE] += size * fixed.capacity_share[region]
    limit, allowed = fixed.capacity[region], fixed.capacity_allowed[region]
    now[_STORED_LACK] += over(after, limit, scale) - over(before, limit, scale)
    now[_STORED_BROKEN] += over(after, allowed, scale) - over(before, allowed, scale)
    plan.stored[region] = after


@compiled
def _flow(fixed: Fixed, plan: AnnealedPlan, job: int, region: int, sign: float) -> None:
    """Adds a job's hours to a region (sign 1), or removes them (-1)."""
    key, app = fixed.job[job, layout.KEY], fixed.job[job, layout.APP]
    if key != NONE:
        hours, sums = sign * fixed.job_amount[job, layout.GPU_H], plan.sums
        before = plan.demand[key, region]
        after = before + hours
        strained = strain(after, fixed.supply[key, region], fixed.mean[key], fixed.tiny[key])
        sums[key, layout.HOURS] += hours
        sums[key, layout.HOURS2] += after * after - before * before
        sums[key, layout.HOURS_SHARE] += hours * fixed.share[key, region]
        sums[key, layout.STRAIN] += strained - plan.strained[key, region]
        plan.strained[key, region] = strained
        plan.demand[key, region] = after
        plan.now[_HOME_H] += hours * fixed.at_home[key, region]
    if app != NONE:
        before, scale = plan.cpu[app, region], fixed.quota_scale[app]
        after = before + sign * fixed.job_amount[job, layout.CPU_H]
        limit, allowed = fixed.quota[app, region], fixed.quota_allowed[app, region]
        plan.now[_CPU_LACK] += over(after, limit, scale) - over(before, limit, scale)
        plan.now[_CPU_BROKEN] += over(after, allowed, scale) - over(before, allowed, scale)
        plan.cpu[app, region] = after


@compiled
def _place(fixed: Fixed, plan: AnnealedPlan, job: int) -> None:
    """Updates the region of a job after a change of its tables' regions, with all derived values."""
    tables, count, size = fixed.job[job, layout.COUNT], plan.tables, plan.size
    if tables == 0:
        return
    region = 0
    for other in range(1, count.shape[1]):
        if count[job, other] > count[job, region] or (
            count[job, other] == count[job, region] and size[job, other] > size[job, region]
        ):
            region = other
    afar = fixed.job_amount[job, layout.BYTES] - size[job, region]
    if fixed.job[job, layout.KIND] == 0 and count[job, region] < tables:
        region, afar = NONE, fixed.job_amount[job, layout.BYTES]
    read = fixed.job_amount[job, layout.READ_PER_BYTE] * afar
    plan.now[_READ] += read - plan.read[job]
    plan.read[job] = read
    before = plan.where[job]
    if region != before:
        if before != NONE:
            _flow(fixed, plan, job, before, -1.0)
        if region != NONE:
            _flow(fixed, plan, job, region, 1.0)
        plan.where[job] = region


@compiled
def _move(fixed: Fixed, plan: AnnealedPlan, table: int, to: int) -> None:
    at, size = plan.home[table], fixed.size[table]
    if at == to:
        return
    plan.home[table] = to
    _store(fixed, plan, at, -size)
    _store(fixed, plan, to, size)
    for entry in range(fixed.table_start[table], fixed.table_start[table + 1]):
        job = fixed.table_job[entry]
        plan.tables[job, at] -= 1
        plan.tables[job, to] += 1
        plan.size[job, at] -= size
        plan.size[job, to] += size
        _place(fixed, plan, job)


@compiled
def _total(fixed: Fixed, plan: AnnealedPlan) -> float:
    number, sums, gpu = fixed.number, plan.sums, 0.0
    for key in range(sums.shape[0]):
        gpu += key_cost(
            sums[key, layout.HOURS], sums[key, layout.HOURS2], sums[key, layout.HOURS_SHARE],
            sums[key, layout.STRAIN], fixed.share2[key], fixed.importance[key], number[layout.OVERLOAD],
            fixed.tiny[key],
        )  # fmt: skip
    storage = storage_cost(
        number[layout.ALL_BYTES], plan.now[_STORED2], plan.now[_STORED_SHARE], number[layout.CAPACITY2]
    )
    read_weight, gpu_weight, storage_weight = (
        number[layout.READ_WEIGHT], number[layout.GPU_WEIGHT], number[layout.STORAGE_WEIGHT],
    )  # fmt: skip
    total: float = read_weight * plan.now[_READ] + gpu_weight * gpu + storage_weight * storage
    return total


@compiled
def _lack(fixed: Fixed, plan: AnnealedPlan) -> tuple[float, float]:
    """Returns the relative excess over the limits, and the excess over what the start keeps."""
    short = short_of_home(plan.now[_HOME_H], fixed.number)
    lack = plan.now[_CPU_LACK] + plan.now[_STORED_LACK] + short
    return lack, plan.now[_CPU_BROKEN] + plan.now[_STORED_BROKEN] + short


@compiled
def _energy(fixed: Fixed, plan: AnnealedPlan, penalty: float) -> float:
    lack, _ = _lack(fixed, plan)
    return _total(fixed, plan) + penalty * lack


@compiled
def _keep(fixed: Fixed, plan: AnnealedPlan, best: I4, tally: F8) -> None:
    lack, broken = _lack(fixed, plan)
    lack = max(lack, 0.0) if lack > _FEASIBLE else 0.0
    if broken > _FEASIBLE:
        return
    total = _total(fixed, plan)
    if lack < tally[_BEST_LACK] or (lack == tally[_BEST_LACK] and total < tally[_BEST_TOTAL]):
        for table in range(best.shape[0]):  # Numba takes four seconds to compile a whole-array assignment.
            best[table] = plan.home[table]
        tally[_BEST_LACK], tally[_BEST_TOTAL] = lack, total


@compiled
def _anneal(
    fixed: Fixed, plan: AnnealedPlan, jobs: I4, heat: float, penalty: float, best: I4, tally: F8, undo: I4
) -> None:
    """Makes `_CHUNK` proposals at one temperature."""
    tables, regions = plan.home.shape[0], plan.stored.shape[0]
    energy = _energy(fixed, plan, penalty)
    lowest = energy
    for _ in range(_CHUNK):
        kind = np.random.random()
        bound = energy - heat * np.log(1.0 - np.random.random())
        if kind < _JOBS and jobs.shape[0] > 0:
            job = jobs[np.random.randint(jobs.shape[0])]
            begin, end = fixed.job_start[job], fixed.job_start[job + 1]
            to = np.random.randint(regions)
            if np.random.random() < 0.5:
                to = plan.home[fixed.job_table[np.random.randint(begin, end)]]
            for entry in range(begin, end):
                undo[entry - begin] = plan.home[fixed.job_table[entry]]
                _move(fixed, plan, fixed.job_table[entry], to)
            after = _energy(fixed, plan, penalty)
            if after > bound:
                for entry in range(begin, end):
                    _move(fixed, plan, fixed.job_table[entry], undo[entry - begin])
                continue
        else:
            one, two = np.random.randint(tables), NONE
            at, to = plan.home[one], np.random.randint(regions)
            if kind < _JOBS + _SWAPS:
                two = np.random.randint(tables)
                to = plan.home[two]
            if at == to:
                continue
            _move(fixed, plan, one, to)
            if two != NONE:
                _move(fixed, plan, two, at)
            after = _energy(fixed, plan, penalty)
            if after > bound:
                _move(fixed, plan, one, at)
                if two != NONE:
                    _move(fixed, plan, two, to)
                continue
        energy = after
        if energy < lowest:
            lowest = energy
            if energy < tally[_BEST_TOTAL] or tally[_BEST_LACK] > 0.0:
                _keep(fixed, plan, best, tally)
    tally[_PROPOSED] += _CHUNK
