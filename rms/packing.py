"""Bin packing of a job's tasks onto machines (MAST 4.3), with few racks and machines and a tight fit.

Tasks that fill a machine are placed on whole machines. Smaller numbers of tasks use best fit, so that small tasks do
not fragment idle machines. A machine is *opened* by a job if all of its GPUs are free before, and some remain free.
"""

from typing import NamedTuple

import numpy as np

from domain.compiled import compiled
from rms.arrays import B1, I4, I8
from rms.machines import CPUS_MILLI, GPUS, MEMORY_BYTES


@compiled
def order_of(keys: I8) -> I8:
    """Returns the row numbers of `keys` in ascending lexicographic order of the rows.

    This is a stable merge sort with O(n log n) row comparisons.
    """
    size = keys.shape[0]
    order, merged = np.empty(size, np.int64), np.empty(size, np.int64)
    for i in range(size):
        order[i] = i
    width = 1
    while width < size:
        for left in range(0, size, 2 * width):
            middle, end = min(left + width, size), min(left + 2 * width, size)
            i, j = left, middle
            for k in range(left, end):
                if j >= end or (i < middle and not _before(keys, order[j], order[i])):
                    merged[k] = order[i]
                    i += 1
                else:
                    merged[k] = order[j]
                    j += 1
        order, merged = merged, order
        width *= 2
    return order


@compiled
def _before(keys: I8, a: int, b: int) -> bool:
    for column in range(keys.shape[1]):
        if keys[a, column] != keys[b, column]:
            return bool(keys[a, column] < keys[b, column])
    return False


_UNLIMITED = 1 << 62


class Need(NamedTuple):
    """Resources of one task, and the number of tasks."""

    gpus: int
    cpus_milli: int
    memory_bytes: int
    tasks: int
    machine_tasks: int
    """Each machine gets a multiple of this number of tasks, which divides `tasks`."""
    rack_tasks: int
    """The same for each rack."""


class PlanShape(NamedTuple):
    """How compact the plan of one job is, as the criteria of the same names. Smaller tuples are better."""

    racks: int
    machines: int
    opened: int
    pieces: int


class Spread(NamedTuple):
    """Scratch arrays for packing one job; each has at least one element per machine of the region.

    A *room* is a machine that can take at least one task: its row is in `room`, its capacity in tasks in `fit`. The
    current plan is in `machine` and `tasks`, the best plan in `best_machine` and `best_tasks`.
    """

    room: I4
    fit: I8
    machine: I4
    tasks: I8
    best_machine: I4
    best_tasks: I8
    passes: B1
    """Whether a machine passed the coarse filter."""

    @classmethod
    def of(cls, machines: int) -> "Spread":
        """Allocates scratch arrays for a region with the given number of machines."""
        # One extra element: the branch-free filter writes each row before it checks whether the row passes.
        row, number = np.empty((3, machines + 1), np.int32), np.empty((3, machines + 1), np.int64)
        return cls(row[0], number[0], row[1], number[1], row[2], number[2], np.empty(machines, np.bool_))


@compiled
def capacity(need: Need, gpus: int, cpus_milli: int, memory_bytes: int) -> int:
    """Returns how many tasks fit into free resources; 0 on an overcommitted machine."""
    if gpus < need.gpus or cpus_milli < need.cpus_milli or memory_bytes < need.memory_bytes:
        return 0
    # Most machines have room for at most one task, and comparisons are cheaper than divisions.
    if (
        (need.gpus and gpus < 2 * need.gpus)
        or (need.cpus_milli and cpus_milli < 2 * need.cpus_milli)
        or (need.memory_bytes and memory_bytes < 2 * need.memory_bytes)
    ):
        return 1 if need.machine_tasks == 1 else 0
    fit = _UNLIMITED
    if need.gpus:
        fit = gpus // need.gpus
    if need.cpus_milli:
        fit = min(fit, cpus_milli // need.cpus_milli)
    if need.memory_bytes:
        fit = min(fit, memory_bytes // need.memory_bytes)
    return fit if need.machine_tasks == 1 else fit - fit % need.machine_tasks


@compiled
def whole_slices(need: Need, found: int, rack: I4, out: Spread) -> int:
    """Returns how many tasks fit into the rooms in `out` if each rack gets a multiple of `need.rack_tasks`."""
    size = _by_rack(found, rack, out)
    return (size - size % need.rack_tasks).sum()


@compiled
def _by_rack(found: int, rack: I4, out: Spread) -> I8:
    """Returns the capacity in tasks of each rack, from the one with the lowest number among the rooms on."""
    if found == 0:
        return np.zeros(0, np.int64)
    low, high = rack[out.room[0]], rack[out.room[0]]
    for i in range(1, found):
        low, high = min(low, rack[out.room[i]]), max(high, rack[out.room[i]])
    size = np.zeros(high - low + 1, np.int64)
    for i in range(found):
        size[rack[out.room[i]] - low] += out.fit[i]
    return size


@compiled
def rooms(need: Need, free: I8, first: int, last: int, out: Spread, found: int, tasks: int) -> tuple[int, int]:
    """Appends the rows `first:last` that have room to the rooms in `out`.

    `found` and `tasks` are the number of rooms in `out` and their capacity in tasks. Returns both updated numbers.
    """
    for row in range(first, last):
        here = capacity(need, free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row])
        if here:
            out.room[found], out.fit[found] = row, here
            found += 1
            tasks += here
    return found, tasks


@compiled
def measure(tasks: int, found: int, rack: I4, out: Spread, most_racks: int) -> tuple[int, int]:
    """Returns the numbers of machines and racks that `pack` would use.

    If it would use more than `most_racks` racks, the returned number of machines is 0.
    """
    room, fit = out.room, out.fit
    low, high = rack[room[0]], rack[room[0]]
    for i in range(1, found):
        low, high = min(low, rack[room[i]]), max(high, rack[room[i]])
    racks = high - low + 1
    size = np.zeros(racks, np.int64)
    for i in range(found):
        size[rack[room[i]] - low] += fit[i]
    spans = 1
    while True:
        largest = 0
        for r in range(1, racks):
            if size[r] > size[largest]:
                largest = r
        if size[largest] >= tasks:
            break
        tasks -= size[largest]
        size[largest] = 0
        spans += 1
        if spans > most_racks:
            return 0, spans
    # Most candidates have been rejected by now. The plan uses the racks of size 0 completely, and part of one more
    # rack.
    used = 0
    machines, largest_fit = np.zeros(racks, np.int64), np.zeros(racks, np.int64)
    smallest_fit = np.full(racks, _UNLIMITED)
    for i in range(found):
        r = rack[room[i]] - low
        used += size[r] == 0
        machines[r] += 1
        largest_fit[r] = max(largest_fit[r], fit[i])
        smallest_fit[r] = min(smallest_fit[r], fit[i])
    fewest = 0
    for r in range(racks):
        if size[r] >= tasks:
            if smallest_fit[r] == largest_fit[r] or largest_fit[r] >= tasks:
                needed = -(-tasks // largest_fit[r])
            else:
                fits = np.empty(machines[r], np.int64)
                n = 0
                for i in range(found):
                    if rack[room[i]] - low == r:
                        fits[n] = fit[i]
                        n += 1
                needed = _machines_needed(tasks, fits)
            if fewest == 0 or needed < fewest:
                fewest = needed
    return used + fewest, spans


@compiled
def keep(out: Spread, machines: int) -> None:
    """Stores the current plan, which uses `machines` machines, as the best plan."""
    # A loop, because numba compiles a shape check with its message into each slice assignment.
    for i in range(machines):
        out.best_machine[i], out.best_tasks[i] = out.machine[i], out.tasks[i]


@compiled
def left_over(need: Need, free: I8, total: I8, used: int, out: Spread) -> tuple[int, int]:
    """Returns how many machines the current plan opens, and the GPUs that remain free on its machines.

    `used` is its number of machines. For tasks without GPUs, the result is (0, 0).
    """
    opened, pieces = 0, 0
    if need.gpus:
        for i in range(used):
            row = out.machine[i]
            left = free[GPUS, row] - out.tasks[i] * need.gpus
            pieces += left
            opened += left > 0 and free[GPUS, row] == total[GPUS, row]
    return opened, pieces


@compiled
def _tighter(a: int, b: int, free: I8, by_id: I4, out: Spread) -> bool:
    """Returns whether room a is a tighter fit than room b: smaller capacity, then less left over, then lower id.

    Both would give up the same amounts, so the comparison of leftover amounts is a comparison of free amounts.
    """
    if out.fit[a] != out.fit[b]:
        return out.fit[a] < out.fit[b]
    m, n = out.room[a], out.room[b]
    if free[GPUS, m] != free[GPUS, n]:
        return free[GPUS, m] < free[GPUS, n]
    if free[CPUS_MILLI, m] != free[CPUS_MILLI, n]:
        return free[CPUS_MILLI, m] < free[CPUS_MILLI, n]
    return by_id[m] < by_id[n]


@compiled
def pack(need: Need, found: int, free: I8, rack: I4, by_id: I4, out: Spread) -> tuple[int, int]:
    """Distributes the tasks of a job over the rooms of one cluster; returns the numbers of machines and racks used.

    The rooms must have enough capacity in total. The capacity of a rack is rounded down to a multiple of
    `need.rack_tasks`.

    1. If one machine can take all tasks, use the one with the smallest capacity. Ties: the fewest GPUs left over, then
       the fewest CPUs left over, then the lowest id.
    2. Otherwise, if one rack can take all tasks, use the rack that needs the fewest machines. Ties: the smallest
       capacity, then the name. Fill its machines in order of descending capacity (ties: the fewest GPUs left over)
       until one other machine can take the remaining tasks; choose that machine by rule 1.
    3. Otherwise, use the whole capacity of the rack with the largest capacity (ties: by name), by rules 1 and 2.
       Repeat until one of the remaining racks can take the remaining tasks; place these by rules 1 and 2.
    """
    tasks = need.tasks
    low, high = rack[out.room[0]], rack[out.room[0]]
    for i in range(1, found):
        low, high = min(low, rack[out.room[i]]), max(high, rack[out.room[i]])
    # Rooms grouped by rack: the rooms of rack r are member[begin[r] : begin[r + 1]].
    racks = high - low + 1
    size, begin, member = np.zeros(racks, np.int64), np.zeros(racks + 1, np.int32), np.empty(found, np.int64)
    for i in range(found):
        size[rack[out.room[i]] - low] += out.fit[i]
        begin[rack[out.room[i]] - low + 1] += 1
    for r in range(racks):
        begin[r + 1] += begin[r]
    for i in range(found - 1, -1, -1):
        r = rack[out.room[i]] - low
        begin[r + 1] -= 1
        member[begin[r + 1]] = i
    for r in range(racks):  # The loop above moved each begin to that of the previous rack.
        begin[r] = begin[r + 1]
    begin[racks] = found
    if need.rack_tasks > 1:
        size -= size % need.rack_tasks

    used, spans = 0, 1
    while True:
        largest = -1
        for r in range(racks):
            if size[r] and (largest < 0 or size[r] > size[largest]):
                largest = r
        if size[largest] >= tasks:
            break
        if need.rack_tasks == 1:
            for k in range(begin[largest], begin[largest + 1]):
                out.machine[used], out.tasks[used] = out.room[member[k]], out.fit[member[k]]
                used += 1
        else:
            used = _fill(size[largest], member[begin[largest] : begin[largest + 1]], free, by_id, used, out)
        tasks -= size[largest]
        size[largest] = 0
        spans += 1
    single = -1
    for r in range(racks):
        if size[r] >= tasks:
            for k in range(begin[r], begin[r + 1]):
                i = member[k]
                if out.fit[i] >= tasks and (single < 0 or _tighter(i, single, free, by_id, out)):
                    single = i
    if single >= 0:
        out.machine[used], out.tasks[used] = out.room[single], tasks
        return used + 1, spans
    best, fewest = -1, 0
    for r in range(racks):
        if size[r] >= tasks:
            fits = np.empty(begin[r + 1] - begin[r], np.int64)
            for k in range(fits.size):
                fits[k] = out.fit[member[begin[r] + k]]
            needed = _machines_needed(tasks, fits)
            if best < 0 or needed < fewest or (needed == fewest and size[r] < size[best]):
                best, fewest = r, needed
    return _fill(tasks, member[begin[best] : begin[best + 1]], free, by_id, used, out), spans


@compiled
def _machines_needed(tasks: int, fits: I8) -> int:
    fits.sort()
    needed = 1
    while fits[fits.size - needed] < tasks:
        tasks -= fits[fits.size - needed]
        needed += 1
    return needed


@compiled
def _fill(tasks: int, members: I8, free: I8, by_id: I4, used: int, out: Spread) -> int:
    """Adds the part of the plan within one rack; returns the number of machines of the whole plan."""
    # Largest capacity first, then the fewest free GPUs, then the lowest id.
    keys = np.empty((members.size, 3), np.int64)
    for j in range(members.size):
        i = members[j]
        row = out.room[i]
        keys[j, 0], keys[j, 1], keys[j, 2] = -out.fit[i], free[GPUS, row], by_id[row]
    order = order_of(keys)
    k = 0
    while out.fit[members[order[k]]] < tasks:
        i = members[order[k]]
        out.machine[used], out.tasks[used] = out.room[i], out.fit[i]
        tasks -= out.fit[i]
        used += 1
        k += 1
    tightest = members[order[k]]
    for j in range(k + 1, order.size):
        i = members[order[j]]
        if out.fit[i] >= tasks and _tighter(i, tightest, free, by_id, out):
            tightest = i
    out.machine[used], out.tasks[used] = out.room[tightest], tasks
    return used + 1
