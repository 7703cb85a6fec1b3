"""Plain reference implementation of `gms.starts.kernels.list_schedule`, for tests only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class ScheduledWorkload:
    """A workload of the queue. Times are seconds from now."""

    pools: frozenset[int]
    needs: int
    runs_s: float
    reserves: bool
    array: int | None = None
    """The array whose throttle limits it."""
    size: int = 0
    """The GPUs of each task, which need one machine; 0: it fits wherever its pool has enough."""


@dataclass
class MachineRoom:
    """A machine of a pool."""

    pool: int
    free: int
    changed: int
    """A larger number than that of all machines that changed before it."""


Running = tuple[float, int, int, int | None, Sequence[tuple[int, int]]]
"""End, pool, amount, array, and the GPUs on machines."""


def starts_of(
    queue: Sequence[ScheduledWorkload], free: Sequence[int], ends: Sequence[Running], horizon_s: float,
    places: Mapping[int, int], machines: Sequence[tuple[int, int]] = (),
) -> list[float]:  # fmt: skip
    """Returns the start of each workload of the queue. `machines` has (pool, free GPUs) of each machine.

    `places` has how many elements of each array may start until others of it end.
    """
    left, starts, amounts, admitted = list(ends), [inf] * len(queue), list(free), dict(places)
    rooms = [MachineRoom(pool, gpus, number) for number, (pool, gpus) in enumerate(machines)]
    now_s = 0.0
    while now_s <= horizon_s:
        reserved: set[int] = set()
        for k, w in enumerate(queue):
            if starts[k] < inf or (w.array is not None and not admitted[w.array]):
                continue
            able = [pool for pool in sorted(w.pools - reserved) if amounts[pool] >= w.needs and _fits(rooms, pool, w)]
            if able:
                pool = max(able, key=lambda p: (amounts[p], -p))
                starts[k], amounts[pool] = now_s, amounts[pool] - w.needs
                left.append((now_s + w.runs_s, pool, w.needs, w.array, _take(rooms, pool, w)))
                if w.array is not None:
                    admitted[w.array] -= 1
            elif w.reserves:
                reserved |= w.pools
        later = [end[0] for end in left]
        if not later:
            break
        now_s = min(later)
        for end in [end for end in left if end[0] <= now_s]:
            left.remove(end)
            amounts[end[1]] += end[2]
            if end[3] is not None:
                admitted[end[3]] += 1
            for number, gpus in reversed(end[4]):
                _change(rooms, number, gpus)
    return starts


def _fits(rooms: Sequence[MachineRoom], pool: int, w: ScheduledWorkload) -> bool:
    return not w.size or sum(m.free // w.size for m in rooms if m.pool == pool) >= w.needs // w.size


def _take(rooms: Sequence[MachineRoom], pool: int, w: ScheduledWorkload) -> list[tuple[int, int]]:
    """Takes machines for whole tasks, then for a remainder; returns (machine, GPUs)."""
    taken: list[tuple[int, int]] = []
    for size, amount in ((w.size, w.needs - w.needs % w.size), (1, w.needs % w.size)) if w.size else ():
        while amount:
            some = [(m.free, -m.changed, k) for k, m in enumerate(rooms) if m.pool == pool and m.free]
            tight = [one for one in some if one[0] >= amount]
            most = max(one[0] for one in some)
            _, _, number = min(tight) if tight else min(one for one in some if one[0] == most)
            gpus = min(amount, rooms[number].free // size * size)
            _change(rooms, number, -gpus)
            taken.append((number, gpus))
            amount -= gpus
    return taken


def _change(rooms: Sequence[MachineRoom], number: int, gpus: int) -> None:
    rooms[number].free += gpus
    rooms[number].changed = 1 + max(m.changed for m in rooms)
