"""Says which level has no room for the tasks that must stay together, and how much room its largest place has."""

from collections.abc import Iterator

import numpy as np

from domain.compiled import compiled
from domain.reasons import Reason, ReasonCode
from domain.scheduling import JobRequest
from domain.spread import SpreadLevel
from rms.arrays import B1, I8
from rms.eviction import release
from rms.holders import Holders
from rms.machines import CPUS_MILLI, GPUS, MEMORY_BYTES, NO_TYPE, Machines
from rms.packing import Need, capacity
from rms.plans import need_of
from rms.region import RegionColumns


def groups_of(job: JobRequest) -> Iterator[tuple[SpreadLevel, int]]:
    """Yields each level below the region with the number of tasks that one place of the level must hold together.

    All tasks are in one cluster anyway, unless the job may span clusters.
    """
    rule = job.topology
    if rule.required is not None and (rule.required is not SpreadLevel.ZONE or job.span_clusters):
        yield rule.required, job.tasks
    if rule.slice_tasks > 1:
        yield rule.slice_level, rule.slice_tasks


def not_together(region: RegionColumns, job: JobRequest, rank: int, protected: B1) -> Iterator[Reason]:
    """Yields a reason for each level that has no room for the job after evicting all workloads that it may evict."""
    for level, tasks in groups_of(job):
        fits = _fits(region.machines, region.holders, ~protected & (region.holders.rank > rank), need_of(job))
        places, largest, free = 0, 0, 0
        for rows in _usable(region, job):
            numbers = _place_numbers(region, level, rows)
            now, then = (np.bincount(numbers, weights=one[rows]).astype(np.int64) for one in fits)
            places = max(places, int((then // tasks).sum()))
            largest, free = max(largest, int(then.max())), max(free, int(now.max()))
        if places < job.tasks // tasks:
            detail: dict[str, object] = {
                "region": region.name,
                "job": job.name,
                "level": level.value,
                "tasks": tasks,
                "groups": job.tasks // tasks,
                "places": places,
                "largest": largest,
                "free": free,
            }
            yield Reason(ReasonCode.NOT_TOGETHER, detail)


def _usable(region: RegionColumns, job: JobRequest) -> Iterator[I8]:
    """Yields the rows of the machines that the job may use, for each of its GPU types that the region has."""
    machines, anywhere = region.machines, region.choices(job).anywhere
    there = anywhere[machines.kind_cluster]
    for number in region.type_numbers(job):
        kinds = there if number == NO_TYPE else there & (machines.kind_type == number)
        if len(rows := np.flatnonzero(kinds[machines.kind])):
            yield rows


def _place_numbers(region: RegionColumns, level: SpreadLevel, rows: I8) -> I8:
    """Returns a number for the place of a level in which each row is."""
    machines = region.machines
    clusters = machines.kind_cluster[machines.kind[rows]]
    if level is SpreadLevel.MACHINE:
        return rows
    if level is SpreadLevel.RACK:
        _, racks = np.unique(np.stack((machines.rack[rows], clusters)), axis=1, return_inverse=True)
        return np.asarray(racks.reshape(-1), np.int64)
    if level is SpreadLevel.CLUSTER:
        return clusters.astype(np.int64)
    _, zones = np.unique(np.array(region.zones), return_inverse=True)
    return np.asarray(zones[clusters], np.int64)


@compiled
def _fits(machines: Machines, holders: Holders, evicted: B1, need: Need) -> tuple[I8, I8]:
    """Returns how many tasks fit on each machine now and without the masked holders, one by one."""
    one = Need(need.gpus, need.cpus_milli, need.memory_bytes, need.tasks, 1, 1)
    size = len(machines.rack)
    after, now, then = machines.free.copy(), np.zeros(size, np.int64), np.zeros(size, np.int64)
    for holder in range(evicted.size):
        if evicted[holder]:
            release(holders, holder, 1, after, 0, size)
    for row in range(size):
        now[row] = capacity(
            one, machines.free[GPUS, row], machines.free[CPUS_MILLI, row], machines.free[MEMORY_BYTES, row]
        )
        then[row] = capacity(one, after[GPUS, row], after[CPUS_MILLI, row], after[MEMORY_BYTES, row])
    return now, then
