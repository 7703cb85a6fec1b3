"""Reservations: resources that become available by time alone, withheld for a gang that only has to wait for them.

The equivalent simple algorithm: a refused workload is planned again on the region as it will be at a later time. At
that time, the workloads that it may evict once their protection ends are gone, and so are workloads that are being
evicted and, for a gang that has waited long, workloads whose maximum runtime has ended. The earliest time at which the
gang fits is its start. From now on, what becomes free on the machines of that plan is withheld from workloads of worse
rank. Otherwise a stream of short workloads, each protected by its minimum runtime, would keep the gang out forever.

No end is guessed. If a gang that has waited long needs the resources of workloads whose ends are unknown, it reserves
the machines on which such workloads hold the least.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import numpy as np

from domain.compiled import compiled
from domain.scheduling import PlacementRequest, RunningWorkload
from rms.arrays import B1, F8, I8
from rms.eviction import free_all
from rms.gang import Planner
from rms.holders import Holders
from rms.machines import CPUS_MILLI, GPUS, Machines, shift, shift_rows
from rms.plans import JobPlan, need_of
from rms.region import Region


@dataclass(frozen=True)
class Source:
    """A workload whose resources, once released, go to a reservation."""

    attempt: int
    protected_until_s: float
    """End of the protection that it had when the reservation was made. Protection is not extended after that."""


@dataclass(frozen=True)
class Reservation:
    """Future resources of a gang. The gang does not hold them yet, and some other workloads cannot take them."""

    workload: str
    rank: int
    starts_at_s: float
    """Latest time at which all of the resources are available; infinity: not known, since a workload without a maximum
    runtime must end first."""
    needs: Mapping[int, I8]
    """Amounts by machine row, each of shape (3,)."""
    sources: Mapping[str, Source]
    """By id, the workloads that held resources of these machines when they were reserved."""
    lacking: int
    """GPUs, or thousandths of a core for a gang without GPUs, that workloads without a known end must still release."""
    blocks_own_rank: bool = False
    """Whether workloads of the same rank with less credit are excluded, too."""

    def blocks(self, rank: int, ends_by_s: float) -> bool:
        """Returns whether the resources are withheld from a workload with this rank that ends at `ends_by_s`.

        A workload that ends before the start of the gang may use them (conservative backfilling). Workloads of worse
        rank may use resources whose start is not known: the gang can evict them, and meanwhile nothing is idle.
        """
        if self.starts_at_s == inf:
            return self.blocks_own_rank and rank == self.rank
        return (rank > self.rank or (self.blocks_own_rank and rank == self.rank)) and ends_by_s > self.starts_at_s


def known_ends_s(region: Region) -> F8:
    """Returns, by holder number, when the maximum runtimes end; infinity without one, and for unused numbers."""
    ends_s = np.full(len(region.holders.rank), np.inf)
    for workload in region.running_workloads():
        if workload.ends_by_s < np.inf:
            ends_s[_number(region, workload.id)] = max(region.now_s, workload.ends_by_s)
    return ends_s


def available_from_s(planner: Planner, request: PlacementRequest, ends_s: F8 | None = None) -> F8:
    """Returns, by holder number, when a holder's resources are available to the request; infinity: not known.

    A holder of worse rank is available from the end of its protection. A holder that is being evicted, or that does not
    hold all of its resources yet, is available now: its eviction, or its own start, is under way. Other holders are
    available at their `ends_s`, if given.
    """
    region, evictable = planner.region, worse(planner.region, request)
    free_from_s = np.where(region.free_from_s == np.inf, region.now_s, region.free_from_s)
    known_s = np.full(len(evictable), np.inf) if ends_s is None else ends_s
    out = np.where(evictable, np.minimum(np.maximum(free_from_s, region.now_s), known_s), known_s)
    for victim in region.promises:
        number = region.number(victim)
        if number is not None:
            out[number] = region.now_s
    return out


def worse(region: Region, request: PlacementRequest) -> B1:
    """Returns a mask of the holders of worse rank that the request may evict at some time."""
    mask = region.holders.rank > request.rank
    for enemy in request.may_not_evict:
        number = region.number(enemy)
        if number is not None:
            mask[number] = False
    return mask


def reserve(
    planner: Planner, request: PlacementRequest, available_s: F8, taken: Sequence[Reservation] = (),
    latest_s: float = np.inf,
) -> Reservation | None:  # fmt: skip
    """Returns the reservation with the earliest start, found by binary search over the times in `available_s`.

    Returns None if the gang cannot start by `latest_s`, or does not fit even when all holders with a known time are
    gone. `taken` are the reservations that other workloads already have.
    """
    times_s = np.unique(available_s[(available_s < np.inf) & (available_s <= latest_s)])
    plans: tuple[JobPlan, ...] | None = None
    # Try the latest time first: usually there is no plan even then.
    low, high, middle = 0, len(times_s), len(times_s) - 1
    while low < high:
        with _gone(planner.region, available_s <= times_s[middle], taken):
            found = planner.all_free(request.jobs)
        if found is None:
            low = middle + 1
        else:
            high, plans = middle, found
        middle = (low + high) // 2
    if plans is None:
        return None
    return _reservation(planner.region, request, plans, float(times_s[high]), available_s, 0)


def reserve_unknown(
    planner: Planner, request: PlacementRequest, available_s: F8, taken: Sequence[Reservation] = ()
) -> Reservation | None:
    """Returns a reservation on the machines where holders without a known time hold the least.

    These are the machines on which such holders have at most a number of GPUs (of cores, for a gang without GPUs). The
    smallest number with which the gang fits is found by binary search. Returns None if the gang fits with no number.
    """
    region = planner.region
    unit = _unit(request)
    busy = np.zeros(len(region.ids), np.int64)
    _add_held(region.holders, available_s == np.inf, unit, busy)
    reach = region.machines.free.copy()
    for column in range(3):
        _add_held(region.holders, region.holders.rank > 0, column, reach[column])
    levels = np.unique(busy)
    plans: tuple[JobPlan, ...] | None = None
    low, high, middle = 0, len(levels), len(levels) - 1
    while low < high:
        with _set(region, np.where(busy <= levels[middle], reach, 0), taken):
            found = planner.all_free(request.jobs)
        if found is None:
            low = middle + 1
        else:
            high, plans = middle, found
        middle = (low + high) // 2
    if plans is None:
        return None
    made = _reservation(region, request, plans, inf, np.zeros(len(available_s)), 0)
    return _due(region, request, made.needs, made.sources, available_s, taken)


def renew(
    planner: Planner, request: PlacementRequest, available_s: F8, needs: Mapping[str, I8],
    sources: Mapping[str, Source], taken: Sequence[Reservation] = (),
) -> Reservation | None:  # fmt: skip
    """Renews a reservation on the same machines as in an earlier pass. `needs` has the amounts by machine id.

    Returns None if a machine is gone or not suitable any more, or if workloads that are not `sources` have taken what
    was reserved.

    If the reservation moved to other machines in each pass, the resources already withheld would be lost, and the gang
    might never start.
    """
    region = planner.region
    rows: dict[int, I8] = {}
    allowed = [region.choices(job).anywhere for job in request.jobs]
    for machine, need in needs.items():
        row = region.row(machine)
        if row is None or not any(clusters[region.cluster_of(row)] for clusters in allowed):
            return None
        rows[row] = need
    here = {id_: one for id_, one in sources.items() if _holds(region, id_, one)}
    return _due(region, request, rows, here, available_s, taken)


def _due(
    region: Region, request: PlacementRequest, needs: Mapping[int, I8], sources: Mapping[str, Source], available_s: F8,
    taken: Sequence[Reservation],
) -> Reservation | None:  # fmt: skip
    """Returns the reservation of `needs` with its start; None if free resources and sources do not suffice."""
    starts_at_s, unknown, unit = region.now_s, 0, _unit(request)
    for row, need in needs.items():
        others = sum((one.needs[row] for one in taken if row in one.needs), start=np.zeros(3, np.int64))
        lacking = need + others - region.machines.free[:, row]
        leaving = [(float(available_s[_number(region, w.id)]), w.id, w) for w in _on(region, row, sources)]
        for at_s, _, source in sorted(leaving, key=lambda one: one[:2]):
            if (lacking <= 0).all():
                break
            if at_s == inf:
                unknown += max(0, int(lacking[unit]))
            starts_at_s = max(starts_at_s, at_s)
            lacking = lacking - _released(region, source, row)
        if (lacking > 0).any():
            return None
    return Reservation(request.workload, request.rank, starts_at_s, needs, sources, unknown)


@contextmanager
def withheld(region: Region, reservations: Sequence[Reservation]) -> Iterator[None]:
    """Withholds free resources for reservations while the block runs.

    On each machine, the withheld amounts are the reserved amounts minus what the reservation gets from its sources.
    """
    version = region.machines.version.copy()
    taken: list[tuple[int, list[int]]] = []
    asked: dict[int, I8] = {}
    kept: dict[int, I8] = {}
    for one in reservations:
        for row, need in one.needs.items():
            asked[row] = asked.get(row, np.zeros(3, np.int64)) + need
            lacking = asked[row] - kept.get(row, 0)
            for source in _on(region, row, one.sources):
                lacking = lacking - _released(region, source, row)
            amounts = np.minimum(np.maximum(lacking, 0), np.maximum(region.machines.free[:, row], 0))
            if amounts.any():
                kept[row] = kept.get(row, np.zeros(3, np.int64)) + amounts
                taken.append((row, amounts.tolist()))
                shift(region.machines, row, *(-amount for amount in taken[-1][1]))
    try:
        yield
    finally:
        for row, back in taken:
            shift(region.machines, row, *back)
        region.machines.version[:] = version  # The content is the same as before, so cached results stay valid.


def _reservation(
    region: Region,
    request: PlacementRequest,
    plans: Sequence[JobPlan],
    starts_at_s: float,
    available_s: F8,
    lacking: int,
) -> Reservation:
    """Returns the reservation of a plan. Its sources are the holders that are available by `starts_at_s`."""
    needs: dict[int, I8] = {}
    for plan in plans:
        one = np.array(need_of(plan.job)[:3])
        for row, tasks in zip(plan.rows.tolist(), plan.tasks.tolist(), strict=True):
            needs[row] = needs.get(row, np.zeros(3, np.int64)) + tasks * one
    sources = {
        w.id: Source(w.attempt, max(w.protected_until_s, region.now_s))
        for row in needs
        for w in region.running_on(region.ids[row])
        if available_s[_number(region, w.id)] <= starts_at_s
    }
    return Reservation(request.workload, request.rank, starts_at_s, needs, sources, lacking)


def _unit(request: PlacementRequest) -> int:
    return GPUS if any(job.gpus_per_task for job in request.jobs) else CPUS_MILLI


def _number(region: Region, workload: str) -> int:
    number = region.number(workload)
    assert number is not None, "listed"
    return number


def _holds(region: Region, workload: str, source: Source) -> bool:
    return region.number(workload) is not None and region.workload(workload).attempt == source.attempt


def _on(region: Region, row: int, sources: Mapping[str, Source]) -> list[RunningWorkload]:
    """Returns the sources that hold resources of a machine row, in the same attempt as when they were noted."""
    return [w for w in region.running_on(region.ids[row]) if w.id in sources and sources[w.id].attempt == w.attempt]


def _released(region: Region, workload: RunningWorkload, row: int) -> I8:
    """Returns what a holder releases on a machine row: its holdings there without what is promised to its evictor."""
    machine = region.ids[row]
    amounts = [(h.gpus, h.cpus_milli, h.memory_bytes) for h in workload.holdings if h.machine == machine]
    out: I8 = np.array(amounts, np.int64).reshape(-1, 3).sum(axis=0)
    promise = region.promises.get(workload.id)
    return out if promise is None else out - promise.amounts.get(machine, 0)


@contextmanager
def _gone(region: Region, who: B1, taken: Sequence[Reservation]) -> Iterator[None]:
    """Frees what the masked holders release, without the reserved amounts, while the block runs."""
    version = region.machines.version.copy()
    extra: dict[int, I8] = {}
    for victim, promise in region.promises.items():
        number = region.number(victim)
        if number is not None and who[number]:
            for machine, amounts in promise.amounts.items():
                row = region.row(machine)
                if row is not None:
                    extra[row] = extra.get(row, 0) - amounts
    for one in taken:
        for row, need in one.needs.items():
            extra[row] = extra.get(row, 0) - need
    _give_up(region.machines, region.holders, who, 1)
    _shift_all(region, extra, 1)
    try:
        yield
    finally:
        _shift_all(region, extra, -1)
        _give_up(region.machines, region.holders, who, -1)
        region.machines.version[:] = version


@contextmanager
def _set(region: Region, goal: I8, taken: Sequence[Reservation]) -> Iterator[None]:
    """Sets the free amounts to `goal`, of shape (3, machines), minus the reserved amounts, while the block runs."""
    version = region.machines.version.copy()
    amounts = goal - region.machines.free
    for one in taken:
        for row, need in one.needs.items():
            amounts[:, row] -= need
    rows = np.flatnonzero(amounts.any(axis=0))
    some = np.ascontiguousarray(amounts[:, rows])
    shift_rows(region.machines, rows, some, 1)
    try:
        yield
    finally:
        shift_rows(region.machines, rows, some, -1)
        region.machines.version[:] = version


def _shift_all(region: Region, amounts: Mapping[int, I8], sign: int) -> None:
    for row, change in amounts.items():
        shift(region.machines, row, *(sign * int(amount) for amount in change))


@compiled
def _give_up(machines: Machines, holders: Holders, who: B1, sign: int) -> None:
    for holder in range(who.size):
        if who[holder]:
            free_all(machines, holders, holder, sign)


@compiled
def _add_held(holders: Holders, who: B1, column: int, out: I8) -> None:
    """Adds what the masked holders hold of one resource to `out`, by machine row."""
    for holder in range(who.size):
        if who[holder]:
            for k in range(holders.first[holder], holders.last[holder]):
                out[holders.machine[k]] += holders.held[k, column]
