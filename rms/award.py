"""A region as it stands right after an award, before any victim has gone: what the next bid has to reckon with."""

from dataclasses import replace

import numpy as np

from domain.scheduling import Holding, PlacementRequest, Plan, RunningWorkload
from rms.arrays import I8
from rms.machines import shift
from rms.region import Region

_NAMES = ("GPUs", "thousandths of a CPU", "bytes of memory")


def award(region: Region, plan: Plan, request: PlacementRequest) -> None:
    """Awards `plan` to `request` in a region's columns.

    On each machine the workload first takes what is free; the rest it is promised from what the plan's victims hold.
    The victims still hold everything and can be evicted no more; what they hold beyond the promise (their surplus)
    is free for nobody until they release it. The workload joins the running ones with what it holds already, started
    now and not evictable. So for each machine what is free and what is held add up to the same as before.

    Raises:
        ValueError: the plan does not belong to the request, names a machine or victim that the region lacks or that
            may not be evicted, or needs more of a machine than is free there and held by its victims. Nothing has
            changed then.
    """
    _check(region, plan, request)
    needs = _needs(region, plan, request)
    released = _released(region, plan, needs)
    takes: dict[int, I8] = {}
    for row, need in needs.items():
        free = region.machines.free[:, row]
        takes[row] = np.minimum(need, np.maximum(free, 0))
        for column in np.flatnonzero(need - takes[row] > released[row]):
            raise ValueError(
                f"machine {region.ids[row]!r} has {free[column]} {_NAMES[column]} free and {released[row][column]} held"
                f" by the plan's victims, and the plan needs {need[column]}"
            )
    for row, taken in takes.items():
        shift(region.machines, row, *(-int(amount) for amount in taken))
    for victim in plan.victims:
        region.put_running(replace(region.workload(victim), evictable=False))
    holdings = tuple(
        Holding(region.ids[row], *(int(amount) for amount in taken))
        for row, taken in sorted(takes.items())
        if taken.any()
    )
    region.put_running(RunningWorkload(plan.workload, request.rank, region.now_s, holdings, None, evictable=False))


def _check(region: Region, plan: Plan, request: PlacementRequest) -> None:
    if (plan.workload, plan.region) != (request.workload, region.name):
        raise ValueError(
            f"plan is for workload {plan.workload!r} in region {plan.region!r}, not for {request.workload!r} in"
            f" {region.name!r}"
        )
    placed, wanted = [placement.job for placement in plan.jobs], [job.name for job in request.jobs]
    if placed != wanted:
        raise ValueError(f"plan places the jobs {placed}, and the request has {wanted}")
    for placement, job in zip(plan.jobs, request.jobs, strict=True):
        tasks = sum(count for _, count in placement.machines)
        if tasks != job.tasks:
            raise ValueError(f"plan places {tasks} of {job.tasks} tasks of job {job.name!r}; a gang is placed whole")
    holders = region.holders
    for victim in plan.victims:
        number = region.number(victim)
        if (
            number is None
            or not holders.evictable[number]
            or holders.rank[number] <= request.rank
            or victim in request.may_not_evict
        ):
            raise ValueError(
                f"victim {victim!r} is not an evictable running workload below rank {request.rank} in region"
                f" {region.name!r}"
            )


def _needs(region: Region, plan: Plan, request: PlacementRequest) -> dict[int, I8]:
    """What the plan needs of each machine, by row."""
    out: dict[int, I8] = {}
    for placement, job in zip(plan.jobs, request.jobs, strict=True):
        one = np.array((job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task), np.int64)
        for machine, tasks in placement.machines:
            row = region.row(machine)
            if row is None:
                raise ValueError(f"plan uses machine {machine!r}, which region {region.name!r} does not have")
            out[row] = out.get(row, np.zeros(3, np.int64)) + tasks * one
    return out


def _released(region: Region, plan: Plan, needs: dict[int, I8]) -> dict[int, I8]:
    """What the plan's victims hold on its machines, by row."""
    out = {row: np.zeros(3, np.int64) for row in needs}
    for victim in plan.victims:
        number = region.number(victim)
        assert number is not None, "checked"
        for k in range(region.holders.first[number], region.holders.last[number]):
            row = int(region.holders.machine[k])
            if row in out:
                out[row] += region.holders.held[k]
    return out
