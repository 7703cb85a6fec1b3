"""Choice of victims for one job (MAST 4.3): few, of the lowest priority, and none that is not needed."""

from typing import NamedTuple

import numpy as np

from domain.compiled import compiled
from rms.arrays import B1, F8, I4, I8
from rms.choices import Choices
from rms.holders import RANKS, Holders, id_before
from rms.job_planner import NO_PLAN, group_rows, pack_group, rack_sizes, roomy_tasks
from rms.machines import CPUS_MILLI, GPUS, MEMORY_BYTES, Machines, shift
from rms.packing import Need, PlanShape, Spread, capacity, keep, order_of
from rms.plans import WIDTH, compare, rate

_REMEMBERED = 32
"""Maximum number of victims of a cached choice."""


class Evictable(NamedTuple):
    """Which holders may be evicted: those with a rank number above `rank` that are not `protected`."""

    rank: int
    protected: B1
    """bool: one entry for each holder."""


class VictimSearch(NamedTuple):
    """Scratch arrays for victims: `best` for the best option so far, `victims` for the current option."""

    victims: I4
    best: I4
    rating: F8
    """(2, WIDTH): ratings of the current option and of the best option."""

    @classmethod
    def of(cls, holders: int) -> "VictimSearch":
        """Allocates scratch arrays for the given number of holders."""
        return cls(
            np.empty(holders, np.int32),
            np.empty(holders, np.int32),
            np.zeros((2, WIDTH)),
        )


class VictimCache(NamedTuple):
    """Cache of victim choices for one job request, by preference class and cluster.

    A choice depends only on the job, its rank and the cluster, so it is valid while the version of the cluster is the
    same. Queues contain many identical requests and an award changes only one or two clusters, so in a large region
    nearly all choices are cached.
    """

    version: I8
    """(classes, clusters): cluster version of the choice; -1 if there is no entry."""
    size: I4
    """(classes, clusters): number of victims; 0 if evicting all candidates is not enough."""
    victims: I4
    """(classes, clusters, positions): numbers of the victims."""

    @classmethod
    def of(cls, classes: int, clusters: int) -> "VictimCache":
        """Creates an empty cache."""
        shape = classes, clusters
        return cls(np.full(shape, -1), np.zeros(shape, np.int32), np.empty((*shape, _REMEMBERED), np.int32))


@compiled
def release(holders: Holders, holder: int, sign: int, free: I8, first: int, last: int) -> None:
    """Adds a holder's amounts on the rows `first:last` to `free`, or subtracts them (`sign` -1)."""
    for k in range(holders.first[holder], holders.last[holder]):
        row = holders.machine[k]
        if first <= row < last:
            for column in range(3):
                free[column, row] += sign * holders.held[k, column]


@compiled
def _fit_after(
    need: Need, machines: Machines, holders: Holders, holder: int, sign: int, first: int, last: int, sizes: I8
) -> tuple[int, int]:
    """Adds a holder's amounts on the rows to the free amounts, or subtracts them (`sign` -1).

    `sizes` (`rack_sizes`) is updated. Returns the change of the number of tasks that fit, and the number of the rows on
    which the holder has resources.
    """
    free = machines.free
    more, here = 0, 0
    for k in range(holders.first[holder], holders.last[holder]):
        row = holders.machine[k]
        if first <= row < last:
            here += 1
            change = -capacity(need, free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row])
            for column in range(3):
                free[column, row] += sign * holders.held[k, column]
            change += capacity(need, free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row])
            if sizes.size:
                size = sizes[machines.rack[row]]
                sizes[machines.rack[row]] += change
                change += size % need.rack_tasks - (size + change) % need.rack_tasks
            more += change
    return more, here


@compiled
def _largest_first(holders: Holders, scanned: I4, count: int, by_gpus: bool, first: int, last: int) -> I4:
    """Returns the scanned holders sorted by descending size of their holdings on the rows.

    Sizes are compared by the job's main resource (GPUs if `by_gpus`, else CPUs), then by the other one; ties by id.
    """
    size = np.zeros((count, 2), np.int64)
    for i in range(count):
        holder = scanned[i]
        for k in range(holders.first[holder], holders.last[holder]):
            if first <= holders.machine[k] < last:
                size[i, 0] -= holders.held[k, GPUS if by_gpus else CPUS_MILLI]
                size[i, 1] -= holders.held[k, CPUS_MILLI if by_gpus else GPUS]
    order = order_of(size)
    # Sort runs of equal size by id with insertion sort: the runs are short.
    for i in range(1, count):
        j, here = i, order[i]
        while (
            j > 0
            and size[order[j - 1], 0] == size[here, 0]
            and size[order[j - 1], 1] == size[here, 1]
            and id_before(holders, scanned[here], scanned[order[j - 1]])
        ):
            order[j] = order[j - 1]
            j -= 1
        order[j] = here
    out = np.empty(count, np.int32)
    for i in range(count):
        out[i] = scanned[order[i]]
    return out


@compiled
def choose_victims(
    need: Need, machines: Machines, holders: Holders, below: Evictable, cluster: int, first: int, last: int, victims: I4
) -> int:
    """Chooses victims that make room for the job on the rows `first:last`, and writes them to `victims`.

    1. Collect candidates in scan order until the job fits.
    2. From the collected candidates, take the largest first until the job fits.
    3. From the smallest, drop each victim without which the job still fits.

    For example, if 10 GPUs are needed and the candidates hold 4, 5 and 12, only the one with 12 is evicted.

    Returns the number of victims; 0 if evicting all candidates is not enough. The free amounts are modified
    temporarily.
    """
    free = machines.free
    at_first = roomy_tasks(machines, need, first, last)
    fits = at_first
    sizes = rack_sizes(machines, need, free, first, last)
    scanned = np.empty(holders.scanned[cluster], np.int32)
    count = 0
    for i in range(holders.scanned[cluster]):
        holder = holders.scan[cluster, i]
        if holders.rank[holder] <= below.rank:
            break
        if below.protected[holder]:
            continue
        more, here = _fit_after(need, machines, holders, holder, 1, first, last, sizes)
        if here:
            scanned[count] = holder
            count += 1
            fits += more
            if fits >= need.tasks:
                break
    for i in range(count):
        release(holders, scanned[i], -1, free, first, last)
    if fits < need.tasks:
        return 0
    largest = _largest_first(holders, scanned, count, need.gpus > 0, first, last)
    fits, kept = at_first, 0
    sizes = rack_sizes(machines, need, free, first, last)
    while fits < need.tasks:
        fits += _fit_after(need, machines, holders, largest[kept], 1, first, last, sizes)[0]
        kept += 1
    needed = 0
    for i in range(kept - 1, -1, -1):
        less = _fit_after(need, machines, holders, largest[i], -1, first, last, sizes)[0]
        if fits + less >= need.tasks:
            fits += less
        else:
            _fit_after(need, machines, holders, largest[i], 1, first, last, sizes)
            victims[needed] = largest[i]
            needed += 1
    for i in range(needed):
        release(holders, victims[i], -1, free, first, last)
    return needed


@compiled
def _place_after(
    machines: Machines, holders: Holders, victims: I4, count: int, need: Need, rows: tuple[int, int, int], out: Spread
) -> PlanShape:
    """Packs a job into a group's rows as if the victims were gone; returns the shape of the plan.

    `rows` is that of `group_rows`. The plan is written to `out.machine` and `out.tasks`.
    """
    first, last, middle = rows
    for i in range(count):
        release(holders, victims[i], 1, machines.free, first, last)
    shape = pack_group(machines, need, first, last, middle, out)
    for i in range(count):
        release(holders, victims[i], -1, machines.free, first, last)
    return shape


@compiled
def _could_fit(machines: Machines, holders: Holders, need: Need, rank: int, first: int, last: int) -> bool:
    """Returns whether the sum of free resources and of the holdings of less important ranks suffices for the job.

    This is a necessary condition: if it is false, the victim search is skipped.
    """
    sums = np.zeros(3, np.int64)
    for kind in range(machines.kind[first], machines.kind[last - 1] + 1):
        for column in range(3):
            sums[column] += machines.kind_free[column, kind]
            for lower in range(rank + 1, RANKS + 1):
                sums[column] += holders.kind_held[lower, column, kind]
    return capacity(need, sums[GPUS], sums[CPUS_MILLI], sums[MEMORY_BYTES]) >= need.tasks


@compiled
def plan_evicting(
    machines: Machines, holders: Holders, below: Evictable, need: Need, choices: Choices, out: Spread,
    choice: VictimSearch, memo: VictimCache,
) -> tuple[int, int, PlanShape, int]:  # fmt: skip
    """Finds the best plan over all preference classes and clusters; each has its own choice of victims.

    Returns the preference class (`NO_PLAN` if there is no plan), the cluster, the shape, and the number of victims. The
    plan is written to `out.best_machine`, `out.best_tasks` and `choice.best`. Ties go to the first cluster.
    """
    best, where, shape, victims_of = NO_PLAN, 0, PlanShape(0, 0, 0, 0), 0
    rating, best_rating = choice.rating[0], choice.rating[1]
    for preference, wanted in enumerate(choices.type):
        for cluster in range(len(machines.cluster_at) - 1):
            if not choices.allowed[preference, cluster]:
                continue
            first, last, middle = group_rows(machines, cluster, wanted)
            if first == last:
                continue
            if memo.version[preference, cluster] == machines.version[cluster]:
                needed = memo.size[preference, cluster]
                for i in range(needed):
                    choice.victims[i] = memo.victims[preference, cluster, i]
            else:
                needed = 0
                if _could_fit(machines, holders, need, below.rank, first, last):
                    needed = choose_victims(need, machines, holders, below, cluster, first, last, choice.victims)
                if needed <= _REMEMBERED:
                    memo.version[preference, cluster] = machines.version[cluster]
                    memo.size[preference, cluster] = needed
                    for i in range(needed):
                        memo.victims[preference, cluster, i] = choice.victims[i]
            if needed == 0:
                continue
            rate(holders, choice.victims, needed, preference, rating)
            order = -1 if best == NO_PLAN else compare(rating, best_rating, WIDTH)
            if order == 0:
                # Packing is needed only to break a tie, so most options are never packed.
                if shape.machines == 0:
                    rows = group_rows(machines, where, choices.type[best])
                    shape = _place_after(machines, holders, choice.best, victims_of, need, rows, out)
                rows = (first, last, middle)
                here = _place_after(machines, holders, choice.victims, needed, need, rows, out)
                order = -1 if here < shape else 1
            if order < 0:
                best, where, shape, victims_of = preference, cluster, PlanShape(0, 0, 0, 0), needed
                for column in range(WIDTH):
                    best_rating[column] = rating[column]
                for i in range(needed):
                    choice.best[i] = choice.victims[i]
    if best != NO_PLAN:
        rows = group_rows(machines, where, choices.type[best])
        shape = _place_after(machines, holders, choice.best, victims_of, need, rows, out)
        keep(out, shape.machines)
    return best, where, shape, victims_of


@compiled
def most_placeable(
    machines: Machines, holders: Holders, protected: B1, rank: int, need: Need, choices: Choices, span: bool, work: I8
) -> int:
    """Returns the most tasks that one GPU type of one cluster could take after evicting all evictable holders.

    With `span`, all clusters together count as one.
    """
    most, fits = 0, 0
    for number, wanted in enumerate(choices.type):
        if number == 0 or choices.preference[number] != choices.preference[number - 1]:
            fits = 0
        for cluster in range(len(machines.cluster_at) - 1):
            if not choices.allowed[number, cluster]:
                continue
            first, last, _ = group_rows(machines, cluster, wanted)
            if first == last:
                continue
            if not span:
                fits = 0
            gone = 0
            for i in range(holders.scanned[cluster]):
                holder = holders.scan[cluster, i]
                if holders.rank[holder] <= rank:
                    break
                if not protected[holder]:
                    if gone == 0:
                        for column in range(3):
                            for row in range(first, last):
                                work[column, row] = machines.free[column, row]
                    gone += 1
                    release(holders, holder, 1, work, first, last)
            if gone == 0:
                fits += roomy_tasks(machines, need, first, last)
            elif need.rack_tasks > 1:
                sizes = rack_sizes(machines, need, work, first, last)
                fits += (sizes - sizes % need.rack_tasks).sum()
            else:
                for row in range(first, last):
                    fits += capacity(need, work[GPUS, row], work[CPUS_MILLI, row], work[MEMORY_BYTES, row])
            most = max(most, fits)
    return most


@compiled
def first_end_of_protection(
    machines: Machines, holders: Holders, free_from_s: F8, now_s: float, rank: int, choices: Choices
) -> float:
    """Returns the first time at which one more holder of a less important rank can be evicted.

    Infinity: none can be evicted later. Only holders on machines that the job may use count. `free_from_s` has the
    time of each holder.
    """
    first_s = np.inf
    for number, wanted in enumerate(choices.type):
        for cluster in range(len(machines.cluster_at) - 1):
            if not choices.allowed[number, cluster]:
                continue
            first, last, _ = group_rows(machines, cluster, wanted)
            for i in range(holders.scanned[cluster]):
                holder = holders.scan[cluster, i]
                if holders.rank[holder] <= rank:
                    break
                if now_s < free_from_s[holder] < first_s:
                    for k in range(holders.first[holder], holders.last[holder]):
                        if first <= holders.machine[k] < last:
                            first_s = free_from_s[holder]
    return first_s


@compiled
def free_all(machines: Machines, holders: Holders, holder: int, sign: int) -> None:
    """Frees all holdings of a holder in the region, or takes them back (`sign` -1)."""
    for k in range(holders.first[holder], holders.last[holder]):
        gpus, cpus_milli, memory_bytes = holders.held[k, 0], holders.held[k, 1], holders.held[k, 2]
        shift(machines, holders.machine[k], sign * gpus, sign * cpus_milli, sign * memory_bytes)
