"""No victim too many: what one job's victims give up may spare another job's."""

from collections.abc import Sequence

import numpy as np

from domain.compiled import compiled
from domain.scheduling import JobRequest
from rms.arrays import I8
from rms.gang import Planner, Undo, undoing
from rms.holders import Holders
from rms.machines import CPUS_MILLI, GPUS, MEMORY_BYTES
from rms.packing import Need, capacity
from rms.planning import hopeful_groups
from rms.plans import GangPlan, JobPlan, need_of
from rms.region import Region


def without_surplus(planner: Planner, plan: GangPlan) -> GangPlan:
    """The plan without victims that the gang as a whole does not need. The region is as it was before the plan.

    The jobs are planned anew, from the start, with just the victims gone. Then each victim in turn, from the highest
    priority and the smallest, is dropped where the jobs can be planned anew without it, or stay as they are without
    it, until none can be dropped. Planned anew, an earlier job may take what a later one has to have: then the plan
    that is there stays.
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
        hopes = _Hopes(region, requests)
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


class _Hopes:
    """A quick look before planning anew: whether each job, by itself, would fit somewhere without a victim.

    Changes no outcome: a plan for all jobs has room for each of them. Spares nearly all of the planning, because nearly
    every victim is needed.
    """

    def __init__(self, region: Region, jobs: Sequence[JobRequest]) -> None:
        self._region = region
        # Dropping a victim frees nothing: groups that do not hold their job now never will.
        groups = [
            (number, *rows)
            for number, job in enumerate(jobs)
            for rows in hopeful_groups(region.machines, need_of(job), region.choices(job))
        ]
        # One that may span clusters may hope for the whole region.
        groups += [(number, 0, len(region.ids)) for number, job in enumerate(jobs) if job.span_clusters]
        self._groups = np.array(groups, np.int64).reshape(-1, 3)
        self._needs = np.array([need_of(job) for job in jobs], np.int64)
        self._fits = _all_fits(region.machines.free, self._groups, self._needs)

    def shift(self, victim: int, sign: int) -> bool:
        """Takes into account that a victim has given up what it held (`sign` 1), or takes it back (-1).

        What is free then differs from the region's by just that. Whether every job may still hope.
        """
        free, holders = self._region.machines.free, self._region.holders
        hope: bool = _shift_fits(holders, victim, sign, free, self._groups, self._needs, self._fits)
        return hope


@compiled
def _need(needs: I8, job: int) -> Need:
    return Need(needs[job, 0], needs[job, 1], needs[job, 2], needs[job, 3])


@compiled
def _all_fits(free: I8, groups: I8, needs: I8) -> I8:
    """How many tasks of its job fit into each group; `groups` is (job, first, last), `needs` (amounts, tasks)."""
    fits = np.zeros(len(groups), np.int64)
    for g in range(len(groups)):
        need = _need(needs, groups[g, 0])
        for row in range(groups[g, 1], groups[g, 2]):
            fits[g] += capacity(need, free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row])
    return fits


@compiled
def _shift_fits(holders: Holders, holder: int, sign: int, free: I8, groups: I8, needs: I8, fits: I8) -> bool:
    """Changes `fits` from what they are with a holder's share in `free` (`sign` -1) to without, or back (1).

    `free` is without it. Whether every job fits into a group afterwards.
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


def _hold(region: Region, jobs: Sequence[JobPlan]) -> bool:
    """Whether there is room for the jobs where they are now."""
    undo = Undo(region)
    for plan in jobs:
        undo.take(plan)
    rows = np.concatenate([plan.rows for plan in jobs])
    holds = bool((region.machines.free[:, rows] >= 0).all())
    undo()
    return holds
