"""Plain reference implementations of `rms.repair`, for tests only."""

from collections.abc import Iterable
from dataclasses import replace

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
from reference.bids import bid
from rms.repair import DamagedGang


def repair(
    region: str,
    machines: Iterable[MachineState],
    gang: DamagedGang,
    others: Iterable[RunningWorkload] = (),
    now_s: float = 0.0,
) -> Plan | None:
    """Returns the place where the gang continues, with the same result as `rms.repair.repair`."""
    fleet = tuple(machines)
    ids = {one.id for one in fleet}
    where = [[machine for machine, tasks in placement.machines for _ in range(tasks)] for placement in gang.placed]
    lost = [machine for own in where for machine in own if machine not in ids]
    if len(lost) > len([machine for own in where for machine in own]) - len(lost):
        return None
    snapshot = RegionSnapshot(region, now_s, fleet, ())
    plan = _in_place(snapshot, gang, where)
    if plan is None and len([own for own in where if not ids.issuperset(own)]) == 1:
        snapshot = RegionSnapshot(region, now_s, fleet, tuple(others))
        plan = _in_place(snapshot, gang, where)
    return None if plan is None or _is_worse_than_anew(snapshot, gang, where, plan) else plan


def _in_place(snapshot: RegionSnapshot, gang: DamagedGang, where: list[list[str]]) -> Plan | None:
    """Returns the place where the gang continues, whether or not a new one would be better."""
    fleet, ids = list(snapshot.machines), {one.id for one in snapshot.machines}
    jobs: list[JobPlacement] = []
    victims: tuple[str, ...] = ()
    quality = PlanQuality()
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
                gang.request.workload, gang.request.rank, (part,), gang.request.may_not_evict,
                avoids=gang.request.avoids | {one.id for one in fleet if one not in near}, tenant=gang.request.tenant,
            )  # fmt: skip
            plan = bid(replace(snapshot, machines=tuple(fleet)), request).plan
            if plan is None:
                return None
            if plan.victims:
                victims, quality = plan.victims, plan.quality
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
    return Plan(gang.request.workload, snapshot.region, tuple(jobs), victims, quality)


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


def _is_worse_than_anew(snapshot: RegionSnapshot, gang: DamagedGang, where: list[list[str]], plan: Plan) -> bool:
    """Returns whether a new place in the region costs others less or, if it costs as much, is on fewer machines."""
    freed = []
    for one in snapshot.machines:
        for job, own in zip(gang.request.jobs, where, strict=True):
            tasks = own.count(one.id)
            one = replace(
                one, free_gpus=one.free_gpus + tasks * job.gpus_per_task,
                free_cpus_milli=one.free_cpus_milli + tasks * job.cpus_milli_per_task,
                free_memory_bytes=one.free_memory_bytes + tasks * job.memory_bytes_per_task,
            )  # fmt: skip
        freed.append(one)
    jobs = tuple(replace(job, tasks=len(own), most_tasks=0) for job, own in zip(gang.request.jobs, where, strict=True))
    new = bid(replace(snapshot, machines=tuple(freed)), replace(gang.request, jobs=jobs)).plan
    if new is None:
        return False
    if new.quality.victims_by_rank != plan.quality.victims_by_rank:
        return new.quality.victims_by_rank < plan.quality.victims_by_rank
    if new.quality.lost_gpu_s != plan.quality.lost_gpu_s:
        return new.quality.lost_gpu_s < plan.quality.lost_gpu_s
    return sum(len(job.machines) for job in new.jobs) < sum(len(job.machines) for job in plan.jobs)


def _together(one: MachineState, other: MachineState) -> bool:
    """Returns whether a job may use both machines: they are of one cluster, and the same tenants may use them."""
    return (one.cluster, one.pool) == (other.cluster, other.pool)
