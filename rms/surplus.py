"""Removes redundant victims: resources freed by one job's victims may make another job's victims unnecessary."""

from collections.abc import Sequence

import numpy as np

from domain.compiled import compiled
from domain.scheduling import JobRequest
from rms.arrays import I8
from rms.gang import Planner, Undo, undoing
from rms.holders import Holders
from rms.job_planner import candidate_groups
from rms.machines import CPUS_MILLI, GPUS, MEMORY_BYTES
from rms.packing import Need, capacity
from rms.plans import GangPlan, JobPlan, need_of
from rms.region import RegionColumns


def without_surplus(planner: Planner, plan: GangPlan) -> GangPlan:
    """Returns the plan without the victims that the gang as a whole does not need.

    The region must be in its state before the plan. First all jobs are planned again with exactly these victims
    evicted. Then each victim in turn, highest priority first and smallest first within a rank, is dropped if the jobs
    can be planned again without it or if the current plan still fits. This repeats until no victim can be dropped.
    Planning again can fail, because an earlier job may take resources that a later job needs; the current plan is kept
    then.
    """
    if not plan.victims:
        return plan
    region, requests = planner.region, [job.job for job in plan.jobs]
    running, holders = region.running, region.holders
    victims = list(plan.victims)
    with undoing(region) as undo:
        for victim in victims:
            undo.release(victim)
        jobs = planner.all_free(requests) or plan.jobs
        hopes = _FitCheck(region, requests)
        dropped = True
        while dropped:
            dropped = False
            for victim in sorted(victims, key=lambda v: (holders.rank[v], holders.gpus[v], running[v])):
                undo.withhold(victim)
                without = None
                if hopes.shift(victim, -1):
                    without = planner.all_free(requests) or (jobs if _hold(region, jobs) else None)
                if without is None:
                    hopes.shift(victim, 1)
                    undo.release(victim)
                else:
                    victims.remove(victim)
                    jobs, dropped = without, True
    return GangPlan(jobs, tuple(victims))


class _FitCheck:
    """A cheap necessary condition for dropping a victim: each job, on its own, still fits into a group of machines.

    The check does not change the result: if all jobs fit together, each fits on its own. It avoids nearly all planning
    again, because nearly every victim is needed.
    """

    def __init__(self, region: RegionColumns, jobs: Sequence[JobRequest]) -> None:
        self._region = region
        # Dropping a victim frees nothing, so groups that cannot hold the job now are excluded for good.
        groups = [
            (number, *rows)
            for number, job in enumerate(jobs)
            for rows in candidate_groups(region.machines, need_of(job), region.choices(job))
        ]
        # For a job that may span clusters, the whole region is one more group.
        groups += [(number, 0, len(region.ids)) for number, job in enumerate(jobs) if job.span_clusters]
        self._groups = np.array(groups, np.int64).reshape(-1, 3)
        self._needs = np.array([need_of(job) for job in jobs], np.int64)
        self._fits = _all_fits(region.machines.free, self._groups, self._needs)

    def shift(self, victim: int, sign: int) -> bool:
        """Updates the counts after a victim's holdings are freed (`sign` 1) or withheld (`sign` -1).

        The region's free amounts must not include the victim's holdings. Returns whether each job still fits into a
        group.
        """
        free, holders = self._region.machines.free, self._region.holders
        hope: bool = _shift_fits(holders, victim, sign, free, self._groups, self._needs, self._fits)
        return hope


@compiled
def _need(needs: I8, job: int) -> Need:
    return Need(needs[job, 0], needs[job, 1], needs[job, 2], needs[job, 3], needs[job, 4], 1)


@compiled
def _all_fits(free: I8, groups: I8, needs: I8) -> I8:
    """Returns for each group of machines how many tasks of the group's job fit into it.

    A row of `groups` is (job, first row, last row), a row of `needs` is (amounts per task, tasks, tasks per machine and
    per rack). Racks are ignored, so the numbers are upper bounds.
    """
    fits = np.zeros(len(groups), np.int64)
    for g in range(len(groups)):
        need = _need(needs, groups[g, 0])
        for row in range(groups[g, 1], groups[g, 2]):
            fits[g] += capacity(need, free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row])
    return fits


@compiled
def _shift_fits(holders: Holders, holder: int, sign: int, free: I8, groups: I8, needs: I8, fits: I8) -> bool:
    """Updates `fits` for removing a holder's amounts from the free resources (`sign` -1) or for adding them (1).

    `free` does not include these amounts. Returns whether every job fits into at least one group afterwards.
    """
    for k in range(holders.first[holder], holders.last[holder]):
        row = holders.machine[k]
        for g in range(len(groups)):
            if groups[g, 1] <= row < groups[g, 2]:
                need = _need(needs, groups[g, 0])
                without = capacity(need, free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row])
                having = capacity(
                    need,
                    free[GPUS, row] + holders.held[k, GPUS],
                    free[CPUS_MILLI, row] + holders.held[k, CPUS_MILLI],
                    free[MEMORY_BYTES, row] + holders.held[k, MEMORY_BYTES],
                )
                fits[g] += sign * (having - without)
    hopes = np.zeros(len(needs), np.bool_)
    for g in range(len(groups)):
        if fits[g] >= needs[groups[g, 0], 3]:
            hopes[groups[g, 0]] = True
    return bool(hopes.all())


def _hold(region: RegionColumns, jobs: Sequence[JobPlan]) -> bool:
    """Returns whether the plans of all jobs still fit into the free resources."""
    undo = Undo(region)
    for plan in jobs:
        undo.take(plan)
    rows = np.concatenate([plan.rows for plan in jobs])
    holds = bool((region.machines.free[:, rows] >= 0).all())
    undo()
    return holds
