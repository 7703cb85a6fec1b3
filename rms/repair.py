"""Workloads that continue in their place: after the loss of a machine (`repair`) or after an eviction (`shrink`)."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from domain.criteria import PlanQuality
from domain.priority import LOWEST_RANK
from domain.scheduling import (
    JobPlacement,
    JobRequest,
    MachineState,
    PlacementRequest,
    Plan,
    RegionSnapshot,
    RunningWorkload,
)
from domain.topology import ANYWHERE
from rms.bid import bid_in
from rms.consolidation import less_free
from rms.gang import Planner
from rms.packing import capacity
from rms.plans import need_of
from rms.region import RegionColumns


@dataclass(frozen=True)
class DamagedGang:
    """A gang of which some machines are lost or take no work any more."""

    request: PlacementRequest
    """As for its placement."""
    placed: tuple[JobPlacement, ...]
    """Where the tasks of its jobs were."""


def repair(
    region: str,
    machines: Iterable[MachineState],
    gang: DamagedGang,
    others: Callable[[], Iterable[RunningWorkload]] = tuple,
    now_s: float = 0.0,
) -> Plan | None:
    """Returns the place where the gang continues; None: it returns to the queue.

    The tasks on machines that take work stay there. The others are placed job by job on free resources in the same
    cluster and pool and on the same GPU type, as any workload is placed. If there is not enough room, and one job lacks
    tasks, victims are found there as for any workload.

    The gang returns to the queue if more than half of its tasks lack a machine, if such a task belongs to a job that
    requires a topology, or if a new place in the region would be better: with fewer or less important victims, with
    less lost work or, if these are equal, on fewer machines. Gangs would stay scattered otherwise.

    Args:
        region: the region's name.
        machines: its machines that take work. Their free amounts exclude what the gang holds.
        gang: the gang.
        others: returns the other workloads of the region. It is called only if the free resources do not suffice.
        now_s: the time, for the protection and the lost work of the others.
    """
    free = list(machines)
    there = {one.id for one in free}
    kept = [Counter({m: n for m, n in one.machines if m in there}) for one in gang.placed]
    missing = [before.tasks - own.total() for before, own in zip(gang.placed, kept, strict=True)]
    if 2 * sum(missing) > sum(one.tasks for one in gang.placed):
        return None
    lacking = [job for job, tasks in zip(gang.request.jobs, missing, strict=True) if tasks]
    if any(job.topology.required is not None or job.topology.slice_tasks > 1 for job in lacking):
        return None
    snapshot = RegionSnapshot(region, now_s, tuple(free), ())
    plan = _in_place(snapshot, gang, kept)
    if plan is None and len(lacking) == 1:
        snapshot = replace(snapshot, running=tuple(others()))
        plan = _in_place(snapshot, gang, kept)
    if plan is None:
        return None
    new = _anew(snapshot, gang, kept)
    return None if new is not None and _cost(new) < _cost(plan) else plan


def shrink(
    region: str, machines: Iterable[MachineState], gang: DamagedGang, ahead: Iterable[PlacementRequest]
) -> Plan | None:
    """Returns the place where an evicted elastic workload continues with fewer tasks; None: it returns to the queue.

    On each of its machines, it keeps as many of its tasks as its evictor has left room for. It returns to the queue if
    these are fewer than its fewest, if a workload that comes before it could use the resources, or if a new place in
    the region without evictions would have more tasks, or as many on fewer machines.

    Args:
        region: the region's name.
        machines: its machines that take work. Their free amounts include what the workload releases, without what its
            evictor gets.
        gang: the workload; it has one job.
        ahead: waiting workloads that come before it.
    """
    (job,), (before,) = gang.request.jobs, gang.placed
    if not job.is_elastic or job.topology.required is not None or job.topology.slice_tasks > 1:
        return None
    free = {one.id: one for one in machines}
    there = ((free[machine], tasks) for machine, tasks in before.machines if machine in free)
    room = ((one, tasks, (one.free_gpus, one.free_cpus_milli, one.free_memory_bytes)) for one, tasks in there)
    fits = ((one.id, min(tasks, int(capacity(need_of(job), *amounts)))) for one, tasks, amounts in room)
    kept = tuple((machine, tasks) for machine, tasks in fits if tasks)
    tasks = sum(tasks for _, tasks in kept)
    if not job.tasks <= tasks < before.tasks:
        return None
    planner = _planner(RegionSnapshot(region, 0.0, tuple(free.values()), ()))
    if any(bid_in(planner, replace(one, rank=LOWEST_RANK)).plan is not None for one in ahead):
        return None
    again = replace(gang.request, rank=LOWEST_RANK, jobs=(replace(job, most_tasks=before.tasks),))
    new = bid_in(planner, again).plan
    if new is not None and (new.jobs[0].tasks, -len(new.jobs[0].machines)) > (tasks, -len(kept)):
        return None
    return Plan(gang.request.workload, region, (replace(before, machines=kept),), (), PlanQuality())


def _in_place(snapshot: RegionSnapshot, gang: DamagedGang, kept: Sequence[Counter[str]]) -> Plan | None:
    """Returns where a gang continues; None: there is not enough room. If workloads are running, one job lacks tasks."""
    free = {one.id: one for one in snapshot.machines}
    whole, jobs = Plan(gang.request.workload, snapshot.region, (), (), PlanQuality()), []
    for job, before, own in zip(gang.request.jobs, gang.placed, kept, strict=True):
        missing, added = before.tasks - own.total(), Counter[str]()
        if missing:
            request = _for_missing(gang.request, job, before, missing)
            far = free.keys() - set(_near(free.values(), before, own))
            planner = _planner(replace(snapshot, machines=tuple(free.values())))
            plan = bid_in(planner, replace(request, avoids=request.avoids | far)).plan
            if plan is None:
                return None
            whole = plan if plan.victims else whole
            added = Counter(dict(plan.jobs[0].machines))
            for machine, tasks in added.items():
                free[machine] = less_free(free[machine], job, tasks)
        jobs.append(replace(before, machines=tuple(sorted((own + added).items()))))
    return replace(whole, jobs=tuple(jobs))


def _near(machines: Iterable[MachineState], before: JobPlacement, own: Counter[str]) -> Iterator[str]:
    """Yields the ids of the machines that are in the same cluster and pool as those that a job keeps."""
    found = list(machines)
    groups = {one.dynamic_cluster for one in found if one.id in own}
    for one in found:
        if one.dynamic_cluster in groups if groups else one.cluster in before.cluster.split("+"):
            yield one.id


def _anew(snapshot: RegionSnapshot, gang: DamagedGang, kept: Sequence[Counter[str]]) -> Plan | None:
    """Returns a new place for the whole gang; the machines on which its tasks still run have room for these."""
    machines = {one.id: one for one in snapshot.machines}
    for job, own in zip(gang.request.jobs, kept, strict=True):
        for machine, tasks in own.items():
            machines[machine] = less_free(machines[machine], job, -tasks)
    sizes = zip(gang.request.jobs, gang.placed, strict=True)
    jobs = tuple(replace(job, tasks=before.tasks, most_tasks=0) for job, before in sizes)
    planner = _planner(replace(snapshot, machines=tuple(machines.values())))
    return bid_in(planner, replace(gang.request, jobs=jobs)).plan


def _cost(plan: Plan) -> tuple[tuple[int, ...], float, int]:
    quality = plan.quality
    return quality.victims_by_rank, quality.lost_gpu_s, sum(len(job.machines) for job in plan.jobs)


def _planner(snapshot: RegionSnapshot) -> Planner:
    return Planner(RegionColumns.of(snapshot))


def _for_missing(request: PlacementRequest, job: JobRequest, before: JobPlacement, missing: int) -> PlacementRequest:
    """Returns the request for the missing tasks of a job."""
    types = () if before.gpu_type is None else (before.gpu_type,)
    part = replace(job, tasks=missing, most_tasks=0, gpu_types=types, topology=ANYWHERE, moves=())
    return PlacementRequest(
        request.workload, request.rank, (part,), request.may_not_evict, avoids=request.avoids, tenant=request.tenant
    )
