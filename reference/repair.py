"""Plain reference implementations of `rms.repair`, for tests only."""

from collections.abc import Iterable
from dataclasses import replace

from domain.criteria import PlanQuality
from domain.priority import LOWEST_RANK
from domain.scheduling import JobRequest, MachineState, PlacementRequest, Plan, RegionSnapshot
from reference.bids import bid
from rms.repair import DamagedGang


def repair(region: str, machines: Iterable[MachineState], gang: DamagedGang) -> Plan | None:
    """Returns the place where the gang continues, with the same result as `rms.repair.repair`."""
    fleet = list(machines)
    where = [[machine for machine, tasks in placement.machines for _ in range(tasks)] for placement in gang.placed]
    ids = {one.id for one in fleet}
    lost = [machine for machines_ in where for machine in machines_ if machine not in ids]
    if len(lost) > len([machine for machines_ in where for machine in machines_]) - len(lost):
        return None
    before = list(fleet)
    jobs = []
    for job, placement, own in zip(gang.request.jobs, gang.placed, where, strict=True):
        stay = [machine for machine in own if machine in ids]
        if len(stay) < len(own):
            if job.topology.required is not None or job.topology.slice_tasks > 1:
                return None
            beside = [one for one in fleet if one.id in stay]
            near = [one for one in fleet if any(_together(one, other) for other in beside)]
            if not beside:
                near = [one for one in fleet if one.cluster in placement.cluster.split("+")]
            part = replace(
                job, tasks=len(own) - len(stay), most_tasks=0, topology=type(job.topology)(), moves=(),
                gpu_types=() if placement.gpu_type is None else (placement.gpu_type,),
            )  # fmt: skip
            request = PlacementRequest(
                gang.request.workload, gang.request.rank, (part,), avoids=gang.request.avoids,
                tenant=gang.request.tenant,
            )  # fmt: skip
            plan = bid(RegionSnapshot(region, 0.0, tuple(near), ()), request).plan if near else None
            if plan is None:
                return None
            for machine, tasks in plan.jobs[0].machines:
                stay += [machine] * tasks
                fleet = [
                    replace(
                        one,
                        free_gpus=one.free_gpus - tasks * job.gpus_per_task,
                        free_cpus_milli=one.free_cpus_milli - tasks * job.cpus_milli_per_task,
                        free_memory_bytes=one.free_memory_bytes - tasks * job.memory_bytes_per_task,
                    )
                    if one.id == machine
                    else one
                    for one in fleet
                ]
        counts = tuple((machine, stay.count(machine)) for machine in sorted(set(stay)))
        jobs.append(replace(placement, machines=counts))
    plan = Plan(gang.request.workload, region, tuple(jobs), (), PlanQuality())
    return None if _is_scattered(region, before, gang, where, plan) else plan


def shrink(
    region: str, machines: Iterable[MachineState], gang: DamagedGang, ahead: Iterable[PlacementRequest]
) -> Plan | None:
    """Returns the place where an evicted workload continues, with the same result as `rms.repair.shrink`."""
    fleet, (job,), (placement,) = list(machines), gang.request.jobs, gang.placed
    before = placement.tasks
    if job.most_tasks <= job.tasks or job.topology.required is not None or job.topology.slice_tasks > 1:
        return None

    def sized(tasks: int) -> PlacementRequest:
        return replace(gang.request, rank=LOWEST_RANK, jobs=(replace(job, tasks=tasks, most_tasks=0),))

    def free_plan(request: PlacementRequest) -> Plan | None:
        return bid(RegionSnapshot(region, 0.0, tuple(fleet), ()), replace(request, rank=LOWEST_RANK)).plan

    kept: dict[str, int] = {}
    for machine, tasks in placement.machines:
        for one in fleet:
            while one.id == machine and kept.get(machine, 0) < tasks and _holds(one, job, kept.get(machine, 0) + 1):
                kept[machine] = kept.get(machine, 0) + 1
    left = sum(kept.values())
    if left < job.tasks or left >= before or any(free_plan(one) is not None for one in ahead):
        return None
    for tasks in range(left, before + 1):
        new = free_plan(sized(tasks))
        if new is not None and (tasks > left or len(new.jobs[0].machines) < len(kept)):
            return None
    place = replace(placement, machines=tuple(sorted(kept.items())))
    return Plan(gang.request.workload, region, (place,), (), PlanQuality())


def _holds(machine: MachineState, job: JobRequest, tasks: int) -> bool:
    """Returns whether a machine has room for so many tasks."""
    return (
        tasks * job.gpus_per_task <= machine.free_gpus
        and tasks * job.cpus_milli_per_task <= machine.free_cpus_milli
        and tasks * job.memory_bytes_per_task <= machine.free_memory_bytes
    )


def _is_scattered(
    region: str, fleet: list[MachineState], gang: DamagedGang, where: list[list[str]], plan: Plan
) -> bool:
    """Returns whether a new place in the region is on fewer machines than the plan."""
    freed = []
    for one in fleet:
        for job, own in zip(gang.request.jobs, where, strict=True):
            tasks = own.count(one.id)
            one = replace(
                one, free_gpus=one.free_gpus + tasks * job.gpus_per_task,
                free_cpus_milli=one.free_cpus_milli + tasks * job.cpus_milli_per_task,
                free_memory_bytes=one.free_memory_bytes + tasks * job.memory_bytes_per_task,
            )  # fmt: skip
        freed.append(one)
    jobs = tuple(replace(job, tasks=len(own), most_tasks=0) for job, own in zip(gang.request.jobs, where, strict=True))
    new = bid(RegionSnapshot(region, 0.0, tuple(freed), ()), replace(gang.request, jobs=jobs)).plan
    if new is None:
        return False
    return sum(len(job.machines) for job in new.jobs) < sum(len(job.machines) for job in plan.jobs)


def _together(one: MachineState, other: MachineState) -> bool:
    """Returns whether a job may use both machines: they are of one cluster, and the same tenants may use them."""
    return (one.cluster, one.pool) == (other.cluster, other.pool)
