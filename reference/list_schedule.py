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


def starts_of(
    queue: Sequence[ScheduledWorkload], free: Sequence[int], ends: Sequence[tuple[float, int, int, int | None]],
    horizon_s: float, places: Mapping[int, int],
) -> list[float]:  # fmt: skip
    """Returns the start of each workload of the queue; `ends` has (end, pool, amount, array) of the running ones.

    `places` has how many elements of each array may start until others of it end.
    """
    left, starts, amounts, admitted = list(ends), [inf] * len(queue), list(free), dict(places)
    now_s = 0.0
    while now_s <= horizon_s:
        reserved: set[int] = set()
        for k, w in enumerate(queue):
            if starts[k] < inf or (w.array is not None and not admitted[w.array]):
                continue
            able = [pool for pool in sorted(w.pools - reserved) if amounts[pool] >= w.needs]
            if able:
                pool = max(able, key=lambda p: (amounts[p], -p))
                starts[k], amounts[pool] = now_s, amounts[pool] - w.needs
                left.append((now_s + w.runs_s, pool, w.needs, w.array))
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
    return starts
