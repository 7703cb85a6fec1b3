"""Reservations for large gangs: their latest expected start time, and the resources that are withheld for them.

Without reservations, smaller gangs that fit now could overtake a large gang forever (starvation). The resources that it
needs are therefore withheld as they become free. Other workloads may use them if they will end before the reserved
start (conservative backfilling).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from domain.compiled import compiled
from domain.scheduling import PlacementRequest, RunningWorkload
from rms.arrays import B1, F8, I8
from rms.eviction import free_all
from rms.gang import Planner
from rms.holders import Holders
from rms.machines import Machines, shift
from rms.plans import JobPlan, need_of
from rms.region import Region

SHORTEST_S = 1200.0
"""The median duration of ML workloads (MAST 5.1): the expected duration of a workload that has just started."""


@dataclass(frozen=True)
class Reservation:
    """Future resources of a gang. The gang does not hold them yet, and other workloads cannot take them."""

    workload: str
    rank: int
    starts_at_s: float
    """Time at which all of the resources are expected to be free."""
    needs: dict[int, I8]
    """Amounts by machine row, each of shape (3,)."""


def expected_end_s(workload: RunningWorkload, now_s: float) -> float:
    """Returns the expected end of a workload: the end of its maximum runtime if it has one.

    Otherwise the remaining runtime is estimated as the elapsed runtime, but at least `SHORTEST_S`. That is the median
    remaining runtime for a heavy-tailed distribution of durations (Pareto with exponent 1).
    """
    if workload.ends_by_s < np.inf:
        return max(now_s, workload.ends_by_s)
    return now_s + max(SHORTEST_S, now_s - workload.started_at_s)


def expected_ends_s(region: Region) -> F8:
    """Returns the expected end time by holder number; infinity for an unused number."""
    ends_s = np.full(len(region.holders.rank), np.inf)
    for workload in region.running_workloads():
        number = region.number(workload.id)
        assert number is not None, "listed"
        ends_s[number] = expected_end_s(workload, region.now_s)
    return ends_s


def reserve(
    planner: Planner, request: PlacementRequest, expected_s: F8, latest_s: float = np.inf
) -> Reservation | None:
    """Returns the reservation with the earliest expected start, found by binary search over the expected ends.

    Returns None if the gang cannot start by `latest_s`, or does not fit even after all those workloads have ended.
    Workloads that the request may evict count as ended now, all others end at their `expected_ends_s`.
    """
    region = planner.region
    ends_s = _ends_for(planner, request, expected_s)
    times_s = np.unique(ends_s[(ends_s < np.inf) & (ends_s <= latest_s)])
    plans: tuple[JobPlan, ...] | None = None
    # Try the latest time first: usually there is no plan even then.
    low, high, middle = 0, len(times_s), len(times_s) - 1
    while low < high:
        with _gone(region, ends_s <= times_s[middle]):
            found = planner.all_free(request.jobs)
        if found is None:
            low = middle + 1
        else:
            high, plans = middle, found
        middle = (low + high) // 2
    if plans is None:
        return None
    needs: dict[int, I8] = {}
    for plan in plans:
        one = np.array(need_of(plan.job)[:3])
        for row, tasks in zip(plan.rows.tolist(), plan.tasks.tolist(), strict=True):
            needs[row] = needs.get(row, np.zeros(3, np.int64)) + tasks * one
    return Reservation(request.workload, request.rank, float(times_s[high]), needs)


def reserve_again(
    planner: Planner, request: PlacementRequest, expected_s: F8, needs: Mapping[str, I8], latest_s: float = np.inf
) -> Reservation | None:
    """Renews a reservation on the same machines as in an earlier pass. `needs` has the amounts by machine id.

    Returns None if the gang cannot start there by `latest_s`, or if a machine is gone or not suitable any more.

    Estimated ends change from pass to pass. If the reservation moved to other machines each time, the resources already
    withheld would be lost, and the gang might never start.
    """
    region = planner.region
    ends_s = _ends_for(planner, request, expected_s)
    starts_at_s = region.now_s
    rows: dict[int, I8] = {}
    allowed = [region.choices(job).anywhere for job in request.jobs]
    for machine, need in needs.items():
        row = region.row(machine)
        if row is None or not any(clusters[region.cluster_of(row)] for clusters in allowed):
            return None
        rows[row] = need
        lacking = need - region.machines.free[:, row]
        leaving = [(float(ends_s[region.number(w.id)]), w.id, w) for w in region.running_on(machine)]
        for end_s, _, holder in sorted(leaving, key=lambda one: one[:2]):
            if (lacking <= 0).all():
                break
            starts_at_s = max(starts_at_s, end_s)
            for h in holder.holdings:
                if h.machine == machine:
                    lacking = lacking - (h.gpus, h.cpus_milli, h.memory_bytes)
        if (lacking > 0).any():
            return None
    return Reservation(request.workload, request.rank, starts_at_s, rows) if starts_at_s <= latest_s else None


def _ends_for(planner: Planner, request: PlacementRequest, expected_s: F8) -> F8:
    """Returns the expected end time by holder number; the current time for holders that the request may evict."""
    region, protected = planner.region, planner.begin(request)
    ends_s = expected_s.copy()
    ends_s[(region.holders.rank > request.rank) & ~protected] = region.now_s
    return ends_s


@contextmanager
def kept(region: Region, reservation: Reservation) -> Iterator[None]:
    """Withholds free resources for a reservation while the block runs.

    The withheld amounts are the reserved amounts, minus the holdings of workloads that are expected to end in time or
    that the reserving workload may evict.
    """
    withheld: list[tuple[int, list[int]]] = []
    for row, need in reservation.needs.items():
        lacking = need.copy()
        for workload in region.running_on(region.ids[row]):
            evicted = workload.evictable and workload.rank > reservation.rank
            # An estimated end does not count for a workload that started in this pass: otherwise a series of new
            # workloads could use up all reserved resources.
            known = workload.ends_by_s < np.inf or workload.started_at_s < region.now_s
            if evicted or (known and expected_end_s(workload, region.now_s) <= reservation.starts_at_s):
                for h in workload.holdings:
                    if h.machine == region.ids[row]:
                        lacking -= (h.gpus, h.cpus_milli, h.memory_bytes)
        amounts = np.minimum(np.maximum(lacking, 0), np.maximum(region.machines.free[:, row], 0)).tolist()
        if any(amounts):
            withheld.append((row, amounts))
    for row, amounts in withheld:
        shift(region.machines, row, *(-amount for amount in amounts))
    try:
        yield
    finally:
        for row, amounts in withheld:
            shift(region.machines, row, *amounts)


@contextmanager
def _gone(region: Region, who: B1) -> Iterator[None]:
    machines, holders = region.machines, region.holders
    _give_up(machines, holders, who, 1)
    try:
        yield
    finally:
        _give_up(machines, holders, who, -1)


@compiled
def _give_up(machines: Machines, holders: Holders, who: B1, sign: int) -> None:
    for holder in range(who.size):
        if who[holder]:
            free_all(machines, holders, holder, sign)
