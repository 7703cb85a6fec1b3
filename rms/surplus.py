"""No victim too many: what one job's victims give up may spare another job's."""

from collections.abc import Iterable, Sequence

from rms.eviction import Fit
from rms.planning import GangPlan, JobPlan, plan_without_eviction
from rms.region import Free, Group, Holder, Region


def without_surplus(region: Region, plan: GangPlan) -> GangPlan:
    """The plan without victims that the gang as a whole does not need.

    The jobs are planned anew, from the start, with just the victims gone. Then each victim in turn, from the highest
    priority and the smallest, is dropped where the jobs can be planned anew without it, or stay as they are without
    it, until none can be dropped. Planned anew, an earlier job may take what a later one has to have: then the plan
    that is there stays.
    """
    if not plan.victims:
        return plan
    requests = [job.job for job in plan.jobs]
    victims = list(plan.victims)
    jobs = plan_without_eviction(region, requests, _freed(region, victims)) or plan.jobs
    hopes = _Hopes(region, jobs, victims)
    dropped = True
    while dropped:
        dropped = False
        for victim in sorted(victims, key=lambda v: (v.workload.rank, v.workload.gpus, v.workload.id)):
            if not hopes.without(victim):
                continue
            rest = [other for other in victims if other is not victim]
            free = _freed(region, rest)
            without = plan_without_eviction(region, requests, free) or (jobs if _hold(jobs, free) else None)
            if without is None:
                hopes.keep(victim)
            else:
                jobs, victims, dropped = without, rest, True
    return GangPlan(jobs, tuple(victims))


class _Hopes:
    """A quick look before planning anew: whether each job, by itself, would fit somewhere without a victim.

    Changes no outcome: a plan for all jobs has room for each of them. Spares nearly all of the planning, because nearly
    every victim is needed.
    """

    def __init__(self, region: Region, jobs: Iterable[JobPlan], victims: Sequence[Holder]) -> None:
        free = _freed(region, victims)
        self._fits: list[list[tuple[Group, Fit]]] = [
            [(group, Fit(plan.job, group.eligible, free)) for group in region.groups(plan.job)] for plan in jobs
        ]

    def without(self, victim: Holder) -> bool:
        """Takes back what the victim gave up, for good if every job still may hope."""
        for group, fit in self._all():
            fit.withhold(victim.on(group))
        hope = all(any(fit.suffices for _, fit in fits) for fits in self._fits)
        if not hope:
            self.keep(victim)
        return hope

    def keep(self, victim: Holder) -> None:
        """The victim stays one."""
        for group, fit in self._all():
            fit.release(victim.on(group))

    def _all(self) -> Iterable[tuple[Group, Fit]]:
        return (pair for fits in self._fits for pair in fits)


def _freed(region: Region, victims: Iterable[Holder]) -> Free:
    free = region.free()
    for victim in victims:
        free.release(victim.held)
    return free


def _hold(jobs: Iterable[JobPlan], free: Free) -> bool:
    """Whether there is room for the jobs where they are now."""
    free = free.copy()
    touched: set[int] = set()
    for plan in jobs:
        free.take(plan.job, plan.machines)
        touched.update(position for position, _ in plan.machines)
    return free.is_enough_on(touched)
