"""Choice of victims for one job in one group of machines (MAST 4.3): few, of the lowest priority, and no other."""

from typing import NamedTuple

import numpy as np

from domain.compiled import compiled
from rms.arrays import B1, I4, I8
from rms.holders import RANKS, Holders, id_before
from rms.job_planner import rack_sizes, roomy_tasks
from rms.machines import CPUS_MILLI, GPUS, MEMORY_BYTES, Machines
from rms.packing import Need, capacity, order_of
from rms.plans import WIDTH, compare, rate


class Evictable(NamedTuple):
    """Which holders may be evicted: those with a rank number above `rank` that are not `protected`."""

    rank: int
    protected: B1
    """bool: one entry for each holder."""


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
    4. If several victims are left, collect the candidates of one machine after another instead (`_by_place`), and
       continue with 2 and 3. Those victims are chosen if they are better by the criteria.

    For example, if 10 GPUs are needed and the candidates hold 4, 5 and 12, only the one with 12 is evicted. If a whole
    machine is needed, the longest running candidates may be on a machine with eight of them, while another machine has
    only one.

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
    needed = _fewest(need, machines, holders, scanned, count, at_first, first, last, victims)
    if needed > 1:
        count = _by_place(need, machines, holders, below, cluster, first, last, at_first, scanned)
        others = np.empty(count, np.int32)
        fewer = _fewest(need, machines, holders, scanned, count, at_first, first, last, others)
        ratings = np.empty((2, WIDTH))
        rate(holders, victims, needed, 0, ratings[0])
        rate(holders, others, fewer, 0, ratings[1])
        if compare(ratings[1], ratings[0], WIDTH) < 0:
            needed = fewer
            for i in range(fewer):
                victims[i] = others[i]
    return needed


@compiled
def _fewest(
    need: Need, machines: Machines, holders: Holders, scanned: I4, count: int, at_first: int, first: int, last: int,
    victims: I4,
) -> int:  # fmt: skip
    """Writes those of the first `count` holders in `scanned` that are needed to `victims`, and returns their number.

    `at_first` is the number of tasks that fit without evictions. See `choose_victims`, 2 and 3.
    """
    largest = _largest_first(holders, scanned, count, need.gpus > 0, first, last)
    fits, kept = at_first, 0
    sizes = rack_sizes(machines, need, machines.free, first, last)
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
        release(holders, victims[i], -1, machines.free, first, last)
    return needed


@compiled
def _by_place(
    need: Need, machines: Machines, holders: Holders, below: Evictable, cluster: int, first: int, last: int,
    at_first: int, collected: I4,
) -> int:  # fmt: skip
    """Collects the candidates of whole places until the job fits; returns their number.

    A place is a machine, or a rack if tasks must share racks. The places with the least weight of candidates for each
    task that would fit come first (ties: by id of the machine, by name of the rack). The weight of a candidate is 8 to
    the power of the number of ranks below its own: a more important one weighs more than several of the next rank.
    """
    after, racks = machines.free[:, first:last].copy(), need.rack_tasks > 1
    size = machines.rack.max() + 1 if racks else last - first
    weight, now, then = np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.int64)
    for i in range(holders.scanned[cluster]):
        holder = holders.scan[cluster, i]
        if holders.rank[holder] <= below.rank:
            break
        if below.protected[holder]:
            continue
        for k in range(holders.first[holder], holders.last[holder]):
            row = holders.machine[k]
            if first <= row < last:
                weight[machines.rack[row] if racks else row - first] += 1 << (3 * (RANKS - holders.rank[holder]))
                for column in range(3):
                    after[column, row - first] += holders.held[k, column]
    free = machines.free
    for row in range(first, last):
        at, place = row - first, machines.rack[row] if racks else row - first
        now[place] += capacity(need, free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row])
        then[place] += capacity(need, after[GPUS, at], after[CPUS_MILLI, at], after[MEMORY_BYTES, at])
    gain = then - then % need.rack_tasks - now + now % need.rack_tasks
    keys = np.zeros((size, 2), np.int64)
    for place in range(size):
        each = weight[place] * 840 // min(gain[place], need.tasks - at_first) if gain[place] > 0 else 1 << 62
        keys[place, 0], keys[place, 1] = each, place if racks else machines.by_id[first + place]
    chosen, fits = np.zeros(size, np.bool_), at_first
    for place in order_of(keys):
        if fits >= need.tasks:
            break
        chosen[place] = True
        fits += max(gain[place], 0)
    count = 0
    for i in range(holders.scanned[cluster]):
        holder = holders.scan[cluster, i]
        if holders.rank[holder] <= below.rank:
            break
        if below.protected[holder]:
            continue
        for k in range(holders.first[holder], holders.last[holder]):
            row = holders.machine[k]
            if first <= row < last and chosen[machines.rack[row] if racks else row - first]:
                collected[count] = holder
                count += 1
                break
    return count
