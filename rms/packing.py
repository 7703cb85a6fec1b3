"""Which machines take a job's tasks (MAST 4.3): as few machines and racks as it can, as tight as it can.

Whole machines first for tasks that fill one, best fit below that, so that small tasks do not break up idle machines.
"""

from typing import NamedTuple

import numpy as np

from domain.compiled import compiled
from rms.arrays import B1, I4, I8
from rms.machines import CPUS_MILLI, GPUS, MEMORY_BYTES
from rms.sorting import order_of

_UNLIMITED = 1 << 62


class Need(NamedTuple):
    """What one task needs, and how many there are."""

    gpus: int
    cpus_milli: int
    memory_bytes: int
    tasks: int


class Spread(NamedTuple):
    """Scratch for one job: machines with room and how many tasks fit, and the plan. Each as long as the region."""

    room: I4
    fit: I8
    machine: I4
    tasks: I8
    best_machine: I4
    best_tasks: I8
    passes: B1
    """Whether a machine passed the first look."""

    @classmethod
    def of(cls, machines: int) -> "Spread":
        """Scratch for a region of so many machines."""
        # One more: whether a row passes is known after it was written.
        row, number = np.empty((3, machines + 1), np.int32), np.empty((3, machines + 1), np.int64)
        return cls(row[0], number[0], row[1], number[1], row[2], number[2], np.empty(machines, np.bool_))


@compiled
def capacity(need: Need, gpus: int, cpus_milli: int, memory_bytes: int) -> int:
    """Number of tasks that fit into free resources: never below 0, even where a machine is overdrawn."""
    if gpus < need.gpus or cpus_milli < need.cpus_milli or memory_bytes < need.memory_bytes:
        return 0
    # Most machines hold one task or none: a division is dear where a comparison does.
    if (
        (need.gpus and gpus < 2 * need.gpus)
        or (need.cpus_milli and cpus_milli < 2 * need.cpus_milli)
        or (need.memory_bytes and memory_bytes < 2 * need.memory_bytes)
    ):
        return 1
    fit = _UNLIMITED
    if need.gpus:
        fit = gpus // need.gpus
    if need.cpus_milli:
        fit = min(fit, cpus_milli // need.cpus_milli)
    if need.memory_bytes:
        fit = min(fit, memory_bytes // need.memory_bytes)
    return fit


@compiled
def rooms(need: Need, free: I8, first: int, last: int, out: Spread, found: int, tasks: int) -> tuple[int, int]:
    """Adds the rows `first:last` that have room to the `found` ones in `out`, which hold `tasks`; both numbers then."""
    for row in range(first, last):
        here = capacity(need, free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row])
        if here:
            out.room[found], out.fit[found] = row, here
            found += 1
            tasks += here
    return found, tasks


@compiled
def measure(tasks: int, found: int, rack: I4, out: Spread, most_racks: int) -> tuple[int, int]:
    """The numbers of machines and racks that `pack` would use; 0 machines: more than `most_racks` racks."""
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
    # Most places are out by now. Of this one the racks of size 0 are used whole, and one more in part.
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
    """The plan that was made last, of so many machines, is the best so far."""
    # A loop: numba compiles the check of shapes, and its message, into each assignment of a slice.
    for i in range(machines):
        out.best_machine[i], out.best_tasks[i] = out.machine[i], out.tasks[i]


@compiled
def _tighter(a: int, b: int, free: I8, by_id: I4, out: Spread) -> bool:
    """Whether room a is a tighter place than room b for what both hold: smaller, then less left over, then by id.

    What is free orders like what is left: all give up the same.
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
def pack(tasks: int, found: int, free: I8, rack: I4, by_id: I4, out: Spread) -> tuple[int, int]:
    """Distributes `tasks` (at least 1) over rooms of one cluster that suffice; the numbers of machines and racks.

    1. One machine, if one holds them all: the one with the smallest capacity, then the fewest GPUs and the least CPU
       left over, then the lowest id.
    2. Else one rack, if one holds them all: the one that needs the fewest machines, then the smallest, then by name.
       Its largest machines (of equal ones those left with the fewest GPUs) are filled until one of the others holds
       what remains; that goes by 1.
    3. Else all of the largest rack (by name if equal), and so on until a rack that is left holds what remains; that
       goes by 1 and 2.
    """
    low, high = rack[out.room[0]], rack[out.room[0]]
    for i in range(1, found):
        low, high = min(low, rack[out.room[i]]), max(high, rack[out.room[i]])
    # Rooms by rack: those of rack r are member[begin[r] : begin[r + 1]].
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
    for r in range(racks):  # Filling has moved each begin to that of the rack before.
        begin[r] = begin[r + 1]
    begin[racks] = found

    used, spans = 0, 1
    while True:
        largest = -1
        for r in range(racks):
            if size[r] and (largest < 0 or size[r] > size[largest]):
                largest = r
        if size[largest] >= tasks:
            break
        for k in range(begin[largest], begin[largest + 1]):
            out.machine[used], out.tasks[used] = out.room[member[k]], out.fit[member[k]]
            used += 1
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
    """The part of a plan within one rack; how many machines the plan then has."""
    # Largest first, then the fewest GPUs, then by id.
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
