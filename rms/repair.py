"""Workloads that continue in their place: after the loss of a machine (`repair`) or after an eviction (`shrink`).

Nothing is evicted for them. A workload that needs an eviction returns to the queue, where victims are found as for any
workload.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from domain.criteria import PlanQuality
from domain.priority import LOWEST_RANK
from domain.scheduling import JobPlacement, JobRequest, MachineState, PlacementRequest, Plan
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
    """As for its placement; nothing is evicted, whatever its rank."""
    placed: tuple[JobPlacement, ...]
    """Where the tasks of its jobs were."""


def repair(region: str, machines: Iterable[MachineState], gang: DamagedGang) -> Plan | None:
    """Returns the place where the gang continues; None: it returns to the queue.

    The tasks on machines that take work stay there. The others are placed job by job in the same cluster and pool and
    on the same GPU type, as any workload is placed. The gang returns to the queue if more than half of its tasks lack a
    machine, if such a task belongs to a job that requires a topology, or if a new place in the region without evictions
    would be on fewer machines: gangs would stay scattered otherwise.

    Args:
        region: the region's name.
        machines: its machines that take work. Their free amounts exclude what the gang holds.
        gang: the gang.
    """
    free = list(machines)
    there = {one.id: one for one in free}
    kept = [Counter({m: n for m, n in one.machines if m in there}) for one in gang.placed]
    if 2 * sum(map(Counter.total, kept)) < sum(one.tasks for one in gang.placed):
        return None
    jobs = []
    for job, before, own in zip(gang.request.jobs, gang.placed, kept, strict=True):
        missing = before.tasks - own.total()
        if missing:
            if job.topology.required is not None or job.topology.slice_tasks > 1:
                return None
            groups = {there[m].dynamic_cluster for m in own}
            near = [
                one
                for one in there.values()
                if (one.dynamic_cluster in groups if groups else one.cluster in before.cluster.split("+"))
            ]
            added = _added(region, near, gang.request, missing_part(job, before, missing))
            if added is None:
                return None
            for machine, tasks in added.machines:
                there[machine] = less_free(there[machine], job, tasks)
            own = own + Counter(dict(added.machines))
        jobs.append(replace(before, machines=tuple(sorted(own.items()))))
    if sum(len(one.machines) for one in jobs) > _fewest(region, free, gang, kept):
        return None
    return Plan(gang.request.workload, region, tuple(jobs), (), PlanQuality())


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
    planner = _planner(region, free.values())
    if any(bid_in(planner, replace(one, rank=LOWEST_RANK)).plan is not None for one in ahead):
        return None
    again = replace(gang.request, rank=LOWEST_RANK, jobs=(replace(job, most_tasks=before.tasks),))
    new = bid_in(planner, again).plan
    if new is not None and (new.jobs[0].tasks, -len(new.jobs[0].machines)) > (tasks, -len(kept)):
        return None
    return Plan(gang.request.workload, region, (replace(before, machines=kept),), (), PlanQuality())


def _fewest(region: str, free: Iterable[MachineState], gang: DamagedGang, kept: Sequence[Counter[str]]) -> float:
    """Returns the number of machines of a new place for the whole gang; inf: there is none.

    It is searched on free resources and on the machines on which tasks of the gang still run.
    """
    machines = {one.id: one for one in free}
    for job, own in zip(gang.request.jobs, kept, strict=True):
        for machine, tasks in own.items():
            machines[machine] = less_free(machines[machine], job, -tasks)
    sizes = zip(gang.request.jobs, gang.placed, strict=True)
    jobs = tuple(replace(job, tasks=before.tasks, most_tasks=0) for job, before in sizes)
    plan = bid_in(_planner(region, machines.values()), replace(gang.request, jobs=jobs)).plan
    return inf if plan is None else sum(len(job.machines) for job in plan.jobs)


def _planner(region: str, machines: Iterable[MachineState]) -> Planner:
    columns = RegionColumns(region)
    for one in machines:
        columns.put_machine(one)
    columns.refresh(0.0)
    return Planner(columns)


def missing_part(job: JobRequest, before: JobPlacement, missing: int) -> JobRequest:
    """Returns the request for the missing tasks of a job."""
    types = () if before.gpu_type is None else (before.gpu_type,)
    return replace(job, tasks=missing, most_tasks=0, gpu_types=types, topology=ANYWHERE, moves=())


def _added(
    region: str, near: Iterable[MachineState], request: PlacementRequest, job: JobRequest
) -> JobPlacement | None:
    """Returns where the missing tasks of a job go; None: there is not enough room."""
    wanted = PlacementRequest(request.workload, request.rank, (job,), avoids=request.avoids, tenant=request.tenant)
    plan = bid_in(_planner(region, near), wanted).plan
    return None if plan is None else plan.jobs[0]
