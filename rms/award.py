"""Updates a region's columns after an award, after its revocation, and when a workload releases its resources.

The next bid uses the updated columns.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from domain.scheduling import Holding, PlacementRequest, Plan, RunningWorkload
from rms.arrays import I8
from rms.machines import shift
from rms.own_tenant import sparing
from rms.plans import need_of
from rms.region import Promise, RegionColumns
from rms.spread import crowding_of

_NOTHING = (0, 0, 0)
_NAMES = ("GPUs", "thousandths of a CPU", "bytes of memory")


class StalePlan(ValueError):
    """The region changed after the plan was made, and the plan is no longer valid. The region may bid again.

    Nothing has been changed when this is raised.
    """


@dataclass(frozen=True)
class Award:
    """An award, with the data that `revoke` needs."""

    plan: Plan
    victims: tuple[RunningWorkload, ...]
    """The victims before the award."""


def award(region: RegionColumns, plan: Plan, request: PlacementRequest, ends_by_s: float = inf) -> Award:
    """Awards `plan` to `request` in a region's columns.

    On each machine the workload first takes free resources; the rest is promised to it from the holdings of the plan's
    victims. The victims keep their holdings until they release them, and cannot be evicted again. Until then, holdings
    beyond the promise (the surplus) are not available to any workload. The workload is added to the running workloads
    with the resources that it already took; its start time is now, and it is not evictable. So the sum of free and held
    resources of each machine does not change. `ends_by_s` is the end of the workload's maximum runtime.

    Raises:
        StalePlan: the plan names a machine or victim that is not in the region, or a victim that may not be evicted, or
            it needs more of a machine than is free there plus held by its victims, or others of its group are closer.
            Nothing is changed then.
        ValueError: the plan does not match the request. Nothing is changed then.
    """
    needs, takes = _shares(region, plan, request)
    for row, taken in takes.items():
        shift(region.machines, row, *(-amount for amount in taken))
    victims = tuple(region.workload(victim) for victim in plan.victims)
    awaited = {region.ids[row]: np.subtract(need, takes[row]) for row, need in needs.items()} if victims else {}
    for victim in victims:
        region.promises[victim.id] = Promise(plan.workload, _promised(victim, awaited))
        region.put_running(replace(victim, evictable=False))
    # Of a group that is spread, machines on which the workload only waits count, too.
    group = None if request.spread is None else request.spread.group
    holdings = tuple(_holding(region.ids[row], taken) for row, taken in sorted(takes.items()) if any(taken) or group)
    region.put_running(
        RunningWorkload(
            plan.workload, request.rank, region.now_s, holdings, None, evictable=False, ends_by_s=ends_by_s,
            group=group, tenant=request.tenant,
        )
    )  # fmt: skip
    return Award(plan, victims)


def check(region: RegionColumns, plan: Plan, request: PlacementRequest) -> None:
    """Checks that a plan can be awarded now. It changes nothing.

    Raises:
        StalePlan, ValueError: as for `award`.
    """
    _shares(region, plan, request)


def _shares(
    region: RegionColumns, plan: Plan, request: PlacementRequest
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Returns, by machine row, what the plan needs and how much of it the workload takes from free resources."""
    _check(region, plan, request)
    needs = _needs(region, plan, request)
    released = _released(region, plan)
    takes: dict[int, list[int]] = {}
    for row, need in needs.items():
        free = region.machines.free[:, row].tolist()
        takes[row] = [min(n, max(f, 0)) for n, f in zip(need, free, strict=True)]
        given = released.get(row, _NOTHING)
        for column, name in enumerate(_NAMES):
            if need[column] - takes[row][column] > given[column]:
                raise StalePlan(
                    f"machine {region.ids[row]!r} has {free[column]} {name} free and {given[column]} held by the plan's"
                    f" victims, but the plan needs {need[column]}"
                )
    return needs, takes


def revoke(region: RegionColumns, given: Award) -> None:
    """Reverts an award. The workload and the victims must not have changed since the award."""
    _give_up(region, region.workload(given.plan.workload), {})
    region.drop_running(given.plan.workload)
    for victim in given.victims:
        del region.promises[victim.id]
        region.put_running(victim)
        region.update_evictable(victim.id)


def leave(region: RegionColumns, workload: str) -> None:
    """Releases all resources of a workload. Promised amounts go to its evictor if that is still in the region.

    All other amounts become free.

    Raises:
        KeyError: the workload holds nothing in the region.
    """
    going = region.workload(workload)
    promise = region.promises.pop(workload, None)
    if promise is None or region.number(promise.to) is None:
        promise = Promise("", {})
    _give_up(region, going, promise.amounts)
    region.drop_running(workload)
    if promise.amounts:
        heir = region.workload(promise.to)
        held = _held(heir)
        for machine, amounts in promise.amounts.items():
            held[machine] = held.get(machine, np.zeros(3, np.int64)) + amounts
        region.put_running(replace(heir, holdings=tuple(_holding(m, amounts) for m, amounts in sorted(held.items()))))


def _held(workload: RunningWorkload) -> dict[str, I8]:
    """Returns a workload's amounts by machine. Several holdings on one machine are added up."""
    out: dict[str, I8] = {}
    for h in workload.holdings:
        part = np.array((h.gpus, h.cpus_milli, h.memory_bytes), np.int64)
        out[h.machine] = out.get(h.machine, 0) + part
    return out


def _give_up(region: RegionColumns, workload: RunningWorkload, kept: Mapping[str, I8]) -> None:
    """Frees what a workload holds, except the amounts in `kept`, which are promised to another workload."""
    for machine, amounts in _held(workload).items():
        row = region.row(machine)
        if row is not None:
            shift(region.machines, row, *(int(amount) for amount in amounts - kept.get(machine, 0)))


def _promised(victim: RunningWorkload, awaited: dict[str, I8]) -> dict[str, I8]:
    """Returns the part of a victim's holdings that is promised to its evictor, and subtracts it from `awaited`."""
    out: dict[str, I8] = {}
    for machine, held in _held(victim).items():
        amounts = np.minimum(awaited.get(machine, 0), held)
        if amounts.any():
            out[machine] = amounts
            awaited[machine] = awaited[machine] - amounts
    return out


def _holding(machine: str, amounts: Iterable[int]) -> Holding:
    return Holding(machine, *(int(amount) for amount in amounts))


def _check(region: RegionColumns, plan: Plan, request: PlacementRequest) -> None:
    if (plan.workload, plan.region) != (request.workload, region.name):
        raise ValueError(
            f"plan is for workload {plan.workload!r} in region {plan.region!r}, not for {request.workload!r} in"
            f" {region.name!r}"
        )
    placed, wanted = [placement.job for placement in plan.jobs], [job.name for job in request.jobs]
    if placed != wanted:
        raise ValueError(f"plan places the jobs {placed}, but the request has the jobs {wanted}")
    for placement, job in zip(plan.jobs, request.jobs, strict=True):
        job.sized(placement.tasks)
    holders, may_not_evict = region.holders, sparing(region, request).may_not_evict
    for victim in plan.victims:
        number = region.number(victim)
        if (
            number is None
            or not holders.evictable[number]
            or holders.rank[number] <= request.rank
            or victim in may_not_evict
        ):
            raise StalePlan(
                f"victim {victim!r} is not an evictable running workload below rank {request.rank} in region"
                f" {region.name!r}"
            )
    if request.spread is not None:
        now = crowding_of(region, plan, request)
        if now is not None and now > plan.quality.crowding:
            raise StalePlan(
                f"group {request.spread.group!r}: more of its workloads are near the planned machines than when the bid"
                " was made"
            )


def _needs(region: RegionColumns, plan: Plan, request: PlacementRequest) -> dict[int, list[int]]:
    """Returns the amounts that the plan needs of each machine, by row."""
    out: dict[int, list[int]] = {}
    for placement, job in zip(plan.jobs, request.jobs, strict=True):
        one = need_of(job)[:3]
        for machine, tasks in placement.machines:
            row = region.row(machine)
            if row is None or machine in request.avoids:
                raise StalePlan(
                    f"plan uses machine {machine!r}, which is not in {region.name!r}, or which the request avoids"
                )
            out[row] = [known + tasks * n for known, n in zip(out.get(row, _NOTHING), one, strict=True)]
    return out


def _released(region: RegionColumns, plan: Plan) -> dict[int, list[int]]:
    """Returns the amounts that the plan's victims hold, by machine row."""
    out: dict[int, list[int]] = {}
    for victim in plan.victims:
        number = region.number(victim)
        assert number is not None, "checked"
        for k in range(region.holders.first[number], region.holders.last[number]):
            row, held = int(region.holders.machine[k]), region.holders.held[k].tolist()
            out[row] = [known + amount for known, amount in zip(out.get(row, _NOTHING), held, strict=True)]
    return out
