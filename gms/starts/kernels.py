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


class WaitingColumns(NamedTuple):
    """A queue in its order. The class of an entry is its row of `allowed`, `needs`, `reserves` and `places`.

    An entry is a workload, or several elements of an array that are alike.
    """

    classes: I4
    allowed: I8
    """The mask of the pools of each class."""
    needs: I8
    """The amount that a workload of each class needs."""
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


@compiled
def list_schedule(free: I8, running: RunningColumns, queue: WaitingColumns, horizon_s: float) -> F8:
    """Returns the start of each workload in one future, in seconds from now; infinity: after the horizon.

    Whenever amounts become free in a pool, the queue is walked in order, and each workload that fits takes its amount
    from the allowed pool with the most free. Nothing starts behind a workload that reserves and does not fit, on its
    pools. `free` has the amount of each pool. An entry has the start of its first element.
    """
    ends_s, holds_pool, holds, counted = running
    classes, allowed, needs, reserves, places, counts, wanted, runs_s = queue
    count, kinds, pools = len(classes), len(needs), len(free)
    starts = np.full(count, inf)
    # Each class is a queue of its own, linked through `following`.
    head = np.full(kinds, -1, np.int64)
    tail = np.full(kinds, -1, np.int64)
    following = np.full(count, -1, np.int64)
    heap = [(ends_s[k], holds_pool[k], holds[k], counted[k]) for k in range(len(ends_s))]
    places, started = places.copy(), np.zeros(count, np.int64)
    for k in range(count):
        kind = classes[k]
        if head[kind] < 0:
            head[kind] = k
        else:
            following[tail[kind]] = k
        tail[kind] = k
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
            best = -1
            for p in range(pools):
                fits = (allowed[kind] & ~blocked) >> p & 1 and free[p] >= needs[kind]
                if fits and (best < 0 or free[p] > free[best]):
                    best = p
            if best < 0:
                if reserves[kind]:
                    blocked |= allowed[kind]
                after = place
                continue
            if not started[place]:
                starts[place] = now_s
            free[best] -= needs[kind]
            places[kind] -= 1
            run_s = runs_s[started[place] % len(runs_s), place]
            heapq.heappush(heap, (now_s + run_s, np.int64(best), needs[kind], np.int64(kind)))
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
            _, pool, amount, kind = heapq.heappop(heap)
            free[pool] += amount
            if kind >= 0:
                places[kind] += 1
    return starts
