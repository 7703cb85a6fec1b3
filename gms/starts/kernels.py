"""Compiled inner loops of expected starts: draws of run times, and the list schedule of one future."""

import heapq
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from domain.compiled import compiled

F8 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int64]
I4 = npt.NDArray[np.int32]


class RunningColumns(NamedTuple):
    """Running workloads: when each ends, in seconds from now, its pool, and the amount that it holds."""

    ends_s: F8
    pool: I8
    holds: I8
    classes: I8
    """The class whose number of places grows when it ends; -1: none."""
    first: I8
    """Shape (workloads + 1,): workload k holds GPUs on `machine[first[k]:first[k + 1]]`."""
    machine: I8
    gpus: I8
    """The GPUs that are held on each of these machines."""


class WaitingColumns(NamedTuple):
    """A queue in its order. The class of an entry is its row of `allowed`, `needs`, `sizes`, `reserves` and `places`.

    An entry is a workload, or several elements of an array that are alike.
    """

    classes: I4
    allowed: I8
    """The mask of the pools of each class."""
    needs: I8
    """The amount that a workload of each class needs."""
    sizes: I8
    """The GPUs of its largest task, which need one machine; 0: only the pool's amount counts, as for CPUs."""
    reserves: npt.NDArray[np.bool_]
    """Whether a workload of each class that does not fit blocks its pools for the workloads behind it."""
    places: I8
    """How many of each class may start until others of the class end: the throttle of an array."""
    counts: I8
    """The number of elements of each entry, 1 for a workload."""
    wanted: npt.NDArray[np.bool_]
    """The entries whose start is wanted. The schedule ends when all of them have started."""
    runs_s: F8
    """Shape (draws, entries). The elements of an entry run for its draws in turn, a workload for the first."""


class FreeMachines(NamedTuple):
    """The machines with GPUs: the pool of each, and its free GPUs."""

    pool: I8
    free: I8


@compiled
def draw_remaining(
    samples: F8, counts: I4, parents: I4, groups: I4, ages_s: F8, chances: F8, shrink: float, unknown_s: float
) -> F8:
    """Returns a remaining run time for each workload, in seconds, drawn from its group's run times above its age.

    With `n` such run times in the group, one of them is drawn with the chance `n / (n + shrink)`; otherwise the draw is
    made from the parent group in the same way. `chances`, shape (workloads, 2), are uniform in [0, 1). `samples` has a
    sorted row for each group, padded with infinity; the parent of the root is itself. For an age above all known run
    times, the remaining time has the median `max(age, unknown_s)` and a Pareto tail.
    """
    out = np.empty(len(groups))
    for k in range(len(groups)):
        group, age_s, turn = groups[k], ages_s[k], chances[k, 0]
        while True:
            row = samples[group, : counts[group]]
            first = np.searchsorted(row, age_s, "right")
            above = len(row) - first
            own = above / (above + shrink) if parents[group] != group else (1.0 if above else 0.0)
            if turn < own:
                out[k] = row[first + int(chances[k, 1] * above)] - age_s
                break
            if parents[group] == group:
                out[k] = max(age_s, unknown_s) * min(1.0 / (1.0 - chances[k, 1]) - 1.0, 20.0)
                break
            turn = (turn - own) / (1.0 - own)
            group = parents[group]
    return out


class _Rooms(NamedTuple):
    """The machines in doubly linked lists, one for each pool and number of free GPUs; -1 ends a list."""

    pool: I8
    free: I8
    number: I8
    """Shape (pools, most GPUs + 1), as `head`: the number of machines in each list."""
    head: I8
    after: I8
    before: I8


@compiled
def _move(rooms: _Rooms, m: int, gpus: int) -> None:
    """Adds free GPUs to a machine; it becomes the first of its new list."""
    pool, free, after, before = rooms.pool[m], rooms.free[m], rooms.after[m], rooms.before[m]
    rooms.number[pool, free] -= 1
    if before < 0:
        rooms.head[pool, free] = after
    else:
        rooms.after[before] = after
    if after >= 0:
        rooms.before[after] = before
    rooms.free[m] = free + gpus
    _put_first(rooms, m)


@compiled
def _put_first(rooms: _Rooms, m: int) -> None:
    pool, free = rooms.pool[m], rooms.free[m]
    first = rooms.head[pool, free]
    rooms.number[pool, free] += 1
    rooms.after[m], rooms.before[m], rooms.head[pool, free] = first, -1, m
    if first >= 0:
        rooms.before[first] = m


@compiled
def _rooms(machines: FreeMachines, running: RunningColumns, pools: int) -> _Rooms:
    number = len(machines.free)
    held = np.zeros(number, np.int64)
    for j in range(len(running.machine)):
        held[running.machine[j]] += running.gpus[j]
    most = np.int64(0)
    for m in range(number):
        most = max(most, machines.free[m] + held[m])
    rooms = _Rooms(
        machines.pool, machines.free.copy(), np.zeros((pools, most + 1), np.int64),
        np.full((pools, most + 1), -1, np.int64), np.empty(number, np.int64), np.empty(number, np.int64),
    )  # fmt: skip
    for m in range(number):
        _put_first(rooms, m)
    return rooms


@compiled
def _fits(rooms: _Rooms, pool: int, size: int, tasks: int) -> bool:
    for free in range(size, rooms.number.shape[1]):
        tasks -= rooms.number[pool, free] * (free // size)
    return tasks <= 0


@compiled
def _machine_for(rooms: _Rooms, pool: int, gpus: int) -> int:
    """Returns a machine with the fewest free GPUs, at least `gpus`; if there is none, one with the most."""
    found = -1
    for free in range(1, rooms.number.shape[1]):
        if rooms.number[pool, free]:
            found = rooms.head[pool, free]
            if free >= gpus:
                break
    return found


@compiled
def list_schedule(
    free: I8, machines: FreeMachines, running: RunningColumns, queue: WaitingColumns, horizon_s: float
) -> F8:
    """Returns the start of each workload in one future, in seconds from now; infinity: after the horizon.

    Whenever amounts become free in a pool, the queue is walked in order, and each workload that fits takes its amount
    from the allowed pool with the most free. Tasks with GPUs need machines: they take those with the most free GPUs,
    the last tasks the tightest (as `rms.packing`). All tasks of a workload are as large as its largest one; a remainder
    takes any GPUs. Nothing starts behind a workload that reserves and does not fit, on its pools. `free` has the amount
    of each pool. An entry has the start of its first element.
    """
    classes, allowed, needs, sizes, reserves, places, counts, wanted, runs_s = queue
    count, kinds, pools, held = len(classes), len(needs), len(free), len(running.ends_s)
    starts = np.full(count, inf)
    # Each class is a queue of its own, linked through `following`.
    head = np.full(kinds, -1, np.int64)
    tail = np.full(kinds, -1, np.int64)
    following = np.full(count, -1, np.int64)
    for k in range(count):
        kind = classes[k]
        if head[kind] < 0:
            head[kind] = k
        else:
            following[tail[kind]] = k
        tail[kind] = k
    rooms = _rooms(machines, running, pools)
    # The GPUs that workloads hold are lists of parts, linked through `more`. Unused parts are a list, too.
    parts = machines.free.sum() + running.gpus.sum() + 1
    machine_of, gpus_of, more = np.empty(parts, np.int64), np.empty(parts, np.int64), np.empty(parts, np.int64)
    used, unused = np.int64(0), np.int64(-1)
    heap = [(inf, np.int64(0), np.int64(0), np.int64(0), np.int64(0))]
    heap.pop()
    for k in range(held):
        part = np.int64(-1)
        for j in range(running.first[k], running.first[k + 1]):
            machine_of[used], gpus_of[used], more[used] = running.machine[j], running.gpus[j], part
            part = used
            used += 1
        heap.append((running.ends_s[k], running.pool[k], running.holds[k], running.classes[k], part))
    places, started = places.copy(), np.zeros(count, np.int64)
    heapq.heapify(heap)
    free = free.copy()
    left, now_s = wanted.sum(), 0.0
    while left:
        blocked, after = np.int64(0), np.int64(-1)
        while True:
            # The next class in queue order whose head lies behind `after`, and that may use a pool.
            kind, place = -1, np.int64(count)
            for c in range(kinds):
                if after < head[c] < place and allowed[c] & ~blocked and places[c] > 0:
                    kind, place = c, head[c]
            if kind < 0:
                break
            size, need = sizes[kind], needs[kind]
            best = -1
            for p in range(pools):
                enough = (allowed[kind] & ~blocked) >> p & 1 and free[p] >= need
                better = enough and (best < 0 or free[p] > free[best])
                if better and (size == 0 or _fits(rooms, p, size, need // size)):
                    best = p
            if best < 0:
                if reserves[kind]:
                    blocked |= allowed[kind]
                after = place
                continue
            if not started[place]:
                starts[place] = now_s
            free[best] -= need
            places[kind] -= 1
            part, rest = np.int64(-1), need if size else 0
            while rest > 0:
                whole = rest >= size
                m = _machine_for(rooms, best, rest - rest % size if whole else rest)
                gpus = min(rest, rooms.free[m])
                if whole:
                    gpus -= gpus % size
                _move(rooms, m, -gpus)
                rest -= gpus
                if unused < 0:
                    fresh = used
                    used += 1
                else:
                    fresh, unused = unused, more[unused]
                machine_of[fresh], gpus_of[fresh], more[fresh] = m, gpus, part
                part = fresh
            run_s = runs_s[started[place] % len(runs_s), place]
            heapq.heappush(heap, (now_s + run_s, np.int64(best), need, np.int64(kind), part))
            started[place] += 1
            if started[place] == counts[place]:
                head[kind] = following[place]
            if started[place] == 1 and wanted[place]:
                left -= 1
                if not left:
                    break
        if not left or not len(heap) or heap[0][0] > horizon_s:
            break
        now_s = heap[0][0]
        while len(heap) and heap[0][0] <= now_s:
            _, pool, amount, kind, part = heapq.heappop(heap)
            free[pool] += amount
            if kind >= 0:
                places[kind] += 1
            while part >= 0:
                _move(rooms, machine_of[part], gpus_of[part])
                following_part = more[part]
                more[part], unused = unused, part
                part = following_part
    return starts
