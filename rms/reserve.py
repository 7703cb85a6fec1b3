"""Reservations: when a gang that waits could start in a region at the latest, and what is kept for it until then.

A gang that is too large for what is free now is overtaken for ever by smaller ones that fit. So what it will need is
kept as it frees up. Others may use it meanwhile if they are sure to be gone in time (conservative backfilling).
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

_SHORTEST_S = 1200.0
"""The median duration of ML workloads (MAST 5.1): what is expected of those that have just started."""


@dataclass(frozen=True)
class Reservation:
    """A gang's place in the future: it holds nothing, and what it will need is out of others' reach."""

    workload: str
    rank: int
    starts_at_s: float
    """When all of it is expected to be free."""
    needs: dict[int, I8]
    """By row, shape (3,)."""


def expected_end_s(workload: RunningWorkload, now_s: float) -> float:
    """When a workload is expected to be gone: at the end of its maximum runtime, else after as long again as it ran.

    The latter is the median of what is left where durations have heavy tails (a Pareto distribution with exponent 1).
    """
    if workload.ends_by_s < np.inf:
        return max(now_s, workload.ends_by_s)
    return now_s + max(_SHORTEST_S, now_s - workload.started_at_s)


def expected_ends_s(region: Region) -> F8:
    """By number of the holder; infinity for an unused number."""
    ends_s = np.full(len(region.holders.rank), np.inf)
    for workload in region.running_workloads():
        number = region.number(workload.id)
        assert number is not None, "listed"
        ends_s[number] = expected_end_s(workload, region.now_s)
    return ends_s


def reserve(
    planner: Planner, request: PlacementRequest, expected_s: F8, latest_s: float = np.inf
) -> Reservation | None:
    """The earliest start that can be counted on, and where; None: not until `latest_s`, or not with everybody gone.

    Those whom the request may evict count as gone at once, the others at their expected ends (`expected_ends_s`).
    """
    region = planner.region
    ends_s = _ends_for(planner, request, expected_s)
    times_s = np.unique(ends_s[(ends_s < np.inf) & (ends_s <= latest_s)])
    plans: tuple[JobPlan, ...] | None = None
    # The last moment first: most often there is none.
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
    """The same machines as in an earlier pass, by id; None: not until `latest_s`, or one is not there for it now.

    Expected ends that are guesses change from pass to pass. A gang that went after them, from machine to machine, would
    leave behind each time what had been kept for it, and might never start.
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
    """When holders are expected to be gone, by number: at once if the request may evict them."""
    region, protected = planner.region, planner.begin(request)
    ends_s = expected_s.copy()
    ends_s[(region.holders.rank > request.rank) & ~protected] = region.now_s
    return ends_s


@contextmanager
def kept(region: Region, reservation: Reservation) -> Iterator[None]:
    """Puts what has to be kept for a reservation out of reach while the block runs.

    That is what will be needed, less what those still hold who are expected to be gone in time or may be evicted.
    """
    withheld: list[tuple[int, list[int]]] = []
    for row, need in reservation.needs.items():
        lacking = need.copy()
        for workload in region.running_on(region.ids[row]):
            evicted = workload.evictable and workload.rank > reservation.rank
            # A guess at the end of one that came only now would let all that is kept drain away through its like.
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
