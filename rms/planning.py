"""Plans for a whole gang: its jobs one after another, each on what the earlier ones left (MAST 4.3)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from domain.priority import OVER_QUOTA_RANK
from domain.scheduling import JobRequest, PlacementRequest
from rms.eviction import choose_victims, evictable
from rms.packing import pack, rooms
from rms.region import Free, Group, Holder, Region


@dataclass(frozen=True)
class JobPlan:
    """Where one job's tasks go and whom that evicts."""

    job: JobRequest
    group: Group
    machines: tuple[tuple[int, int], ...]
    """(position, number of tasks) in the order of positions."""
    racks: int
    victims: tuple[Holder, ...] = ()
    """Only those that no earlier job of the gang evicts already."""


@dataclass(frozen=True)
class GangPlan:
    """A plan for each job, and the victims of all of them."""

    jobs: tuple[JobPlan, ...]
    victims: tuple[Holder, ...]


@dataclass(frozen=True)
class Stuck:
    """The first job for which there is no plan, with what was free for it and who was left to evict."""

    job: JobRequest
    free: Free
    scan: tuple[Holder, ...]


def victims_by_rank(victims: Iterable[Holder]) -> tuple[int, ...]:
    """Number of victims at ranks 1..8."""
    counts = [0] * OVER_QUOTA_RANK
    for victim in victims:
        counts[victim.workload.rank - 1] += 1
    return tuple(counts)


def youngest_started_at_s(victims: Iterable[Holder]) -> float:
    """When the victim that ran shortest started; minus infinity without victims."""
    return max((victim.workload.started_at_s for victim in victims), default=-inf)


def lost_gpu_ms(region: Region, victims: Iterable[Holder]) -> int:
    """GPU-milliseconds of work that the victims lose."""
    return sum(region.lost_work.gpu_ms(victim.workload) for victim in victims)


def plan_gang(region: Region, request: PlacementRequest) -> GangPlan | Stuck:
    """Plans each job with as little eviction as it can; what victims give up is free for the jobs after."""
    free = region.free()
    scan = evictable(region, request)
    plans: list[JobPlan] = []
    for job in request.jobs:
        plan = _plan_free(region, job, free) or _plan_evicting(region, job, free, scan)
        if plan is None:
            return Stuck(job, free, tuple(scan))
        for victim in plan.victims:
            free.release(victim.held)
        free.take(job, plan.machines)
        evicted = {victim.workload.id for victim in plan.victims}
        scan = [holder for holder in scan if holder.workload.id not in evicted]
        plans.append(plan)
    return GangPlan(tuple(plans), tuple(victim for plan in plans for victim in plan.victims))


def plan_without_eviction(region: Region, jobs: Iterable[JobRequest], free: Free) -> tuple[JobPlan, ...] | None:
    """Plans all jobs on what is free (which it leaves as it is) and evicts nobody; None if that does not go."""
    free = free.copy()
    plans = []
    for job in jobs:
        plan = _plan_free(region, job, free)
        if plan is None:
            return None
        free.take(job, plan.machines)
        plans.append(plan)
    return tuple(plans)


def _plan_free(region: Region, job: JobRequest, free: Free) -> JobPlan | None:
    """The best plan that evicts nobody: preferred type, then fewer racks, fewer machines, cluster."""
    best: JobPlan | None = None
    for group in region.groups(job):  # in the order of preference
        if best is not None and group.preference > best.group.preference:
            break
        plan = _place(region, job, group, free)
        if plan is not None and (best is None or _extent(plan) < _extent(best)):
            best = plan
    return best


def _plan_evicting(region: Region, job: JobRequest, free: Free, scan: Sequence[Holder]) -> JobPlan | None:
    """The best plan over all groups, each with its own choice of victims."""
    found = []
    for group in region.groups(job):
        victims = choose_victims(job, group, free, scan)
        if victims is None:
            continue
        released = free.copy()
        for victim in victims:
            released.release(victim.held)
        plan = _place(region, job, group, released, tuple(victims))
        if plan is not None:
            found.append(plan)
    return min(found, default=None, key=lambda plan: _order(region, plan))


def _order(region: Region, plan: JobPlan) -> tuple[object, ...]:
    """The criteria by which plans for one job compare; a smaller one is better.

    Plans that agree on the number of victims at every rank agree on how many there are.
    """
    victims = plan.victims
    return (
        victims_by_rank(victims),
        lost_gpu_ms(region, victims),
        youngest_started_at_s(victims),
        plan.group.preference,
        *_extent(plan),
    )


def _extent(plan: JobPlan) -> tuple[int, int, str, tuple[tuple[int, int], ...]]:
    return (plan.racks, len(plan.machines), plan.group.cluster, plan.machines)


def _place(
    region: Region, job: JobRequest, group: Group, free: Free, victims: tuple[Holder, ...] = ()
) -> JobPlan | None:
    """The job packed into the first tier of the group that holds all of its tasks."""
    for tier in group.tiers:
        found = rooms(job, free, tier, region.racks)
        if sum(room.capacity for room in found) >= job.tasks:
            machines = tuple(sorted(pack(job.tasks, found)))
            racks = len({region.racks[position] for position, _ in machines})
            return JobPlan(job, group, machines, racks, victims)
    return None
