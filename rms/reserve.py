"""Reservations: resources that become available by time alone, withheld for a gang that only has to wait for them.

The equivalent simple algorithm: a refused workload is planned again on the region as it will be at a later time. At
that time, the workloads that it may evict once their protection ends are gone, and so are workloads that are being
evicted and, for a gang that has waited long, workloads whose maximum runtime has ended. The earliest time at which the
gang fits is its start. From now on, what becomes free on the machines of that plan is withheld from workloads of worse
rank. Otherwise a stream of short workloads, each protected by its minimum runtime, would keep the gang out forever.

No end is guessed. If a gang that has waited for a day needs the resources of workloads whose ends are unknown, it
reserves the machines on which such workloads hold the least.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import inf

import numpy as np

from domain.compiled import compiled
from domain.scheduling import PlacementRequest, RunningWorkload
from rms.arrays import B1, F8, I8
from rms.eviction import free_all
from rms.gang import Planner
from rms.holders import Holders
from rms.machines import CPUS_MILLI, GPUS, Machines, shift_rows
from rms.plans import JobPlan, need_of
from rms.region import Promise, RegionColumns


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
    needs: Mapping[str, I8]
    """Amounts by machine id, each of shape (3,)."""
    sources: Mapping[str, Source]
    """By id, the workloads that held resources of these machines when they were reserved."""
    lacking: int
    """GPUs, or thousandths of a core for a gang without GPUs, that workloads without a known end must still release."""
    blocks_own_rank: bool = False
    """Whether workloads of the same rank with less credit are excluded, too."""
    backfill_until_s: float = -inf
    """Workloads that end by this time may use the resources (conservative backfilling)."""

    def blocks(self, rank: int, ends_by_s: float) -> bool:
        """Returns whether the resources are withheld from a workload with this rank that ends at `ends_by_s`.

        Workloads of worse rank may use resources whose start is not known: the gang can evict them, and meanwhile
        nothing is idle.
        """
        if self.starts_at_s == inf:
            return self.blocks_own_rank and rank == self.rank
        return (rank > self.rank or (self.blocks_own_rank and rank == self.rank)) and ends_by_s > self.backfill_until_s


Withheld = Sequence[tuple[int, I8]]
"""Amounts by machine row, each of shape (3,)."""


def known_ends_s(region: RegionColumns) -> F8:
    """Returns, by holder number, when the maximum runtimes end; infinity without one, and for unused numbers."""
    ends_s = np.full(len(region.holders.rank), np.inf)
    for workload in region.running_workloads():
        if workload.ends_by_s < np.inf:
            ends_s[_number(region, workload.id)] = max(region.now_s, workload.ends_by_s)
    return ends_s


def available_from_s(planner: Planner, request: PlacementRequest, ends_s: F8 | None = None) -> F8:
    """Returns, by holder number, when a holder's resources are available to the request; infinity: not known.

    A holder of worse rank is available from the end of its protection. A holder that is being evicted, or that does not
    hold all of its resources yet, is available now: its eviction, or its own start, is in progress. Other holders are
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


def worse(region: RegionColumns, request: PlacementRequest) -> B1:
    """Returns a mask of the holders of worse rank that the request may evict at some time."""
    mask = region.holders.rank > request.rank
    for enemy in request.may_not_evict:
        number = region.number(enemy)
        if number is not None:
            mask[number] = False
    return mask


def reserve(
    planner: Planner, request: PlacementRequest, available_s: F8, taken: Sequence[Reservation] = ()
) -> Reservation | None:
    """Returns the reservation with the earliest start, found by binary search over the times in `available_s`.

    Returns None if the gang does not fit even when all holders with a known time are gone. `taken` are the reservations
    that other workloads already have.
    """
    times_s = np.unique(available_s[available_s < np.inf])
    reserved = _reserved(planner.region, taken)
    first = _first_fit(
        planner,
        request,
        len(times_s),
        lambda at: _gone(planner.region, request.rank, available_s <= times_s[at], reserved),
    )
    if first is None:
        return None
    at, plans = first
    return _reservation(planner.region, request, plans, float(times_s[at]), available_s)


def reserve_unknown(
    planner: Planner, request: PlacementRequest, available_s: F8, taken: Sequence[Reservation] = ()
) -> Reservation | None:
    """Returns a reservation on the machines where holders without a known time hold the least.

    These are the machines on which such holders have at most a number of GPUs (of cores, for a gang without GPUs). The
    smallest number with which the gang fits is found by binary search. Returns None if the gang fits with no number.
    """
    region = planner.region
    busy = np.zeros(len(region.ids), np.int64)
    _add_held(region.holders, available_s == np.inf, _unit(request), busy)
    reach = region.machines.free - _promised(region, request.rank, np.ones(len(available_s), np.bool_))
    for column in range(3):
        _add_held(region.holders, region.holders.rank > 0, column, reach[column])
    levels = np.unique(busy)
    reserved = _reserved(region, taken)
    first = _first_fit(
        planner,
        request,
        len(levels),
        lambda at: _shifted(region, np.where(busy <= levels[at], reach, 0) - reserved - region.machines.free),
    )
    if first is None:
        return None
    _, plans = first
    made = _reservation(region, request, plans, inf, np.zeros(len(available_s)))
    return _due(region, request, made.needs, made.sources, available_s, taken)


def _first_fit(
    planner: Planner, request: PlacementRequest, count: int, state: Callable[[int], AbstractContextManager[None]]
) -> tuple[int, tuple[JobPlan, ...]] | None:
    """Returns the first of `count` states of the region in which the gang fits, and its plans; None: it fits in none.

    Later states have more room, so the first one is found by binary search. `state` sets a state while its block runs.
    """
    best: tuple[int, tuple[JobPlan, ...]] | None = None
    # Try the last state first: usually there is no plan even then.
    low, high, middle = 0, count, count - 1
    while low < high:
        with state(middle):
            found = planner.all_free(request.jobs)
        if found is None:
            low = middle + 1
        else:
            high, best = middle, (middle, found)
        middle = (low + high) // 2
    return best


def renew(
    planner: Planner, request: PlacementRequest, available_s: F8, needs: Mapping[str, I8],
    sources: Mapping[str, Source], taken: Sequence[Reservation] = (), backfill_until_s: float = -inf,
) -> Reservation | None:  # fmt: skip
    """Renews a reservation on the same machines as in an earlier pass. `needs` has the amounts by machine id.

    Workloads that have used reserved resources since then, because they end by `backfill_until_s`, become sources, too.
    Returns None if a machine is gone or not suitable any more, or if other workloads have taken what was reserved.

    If the reservation moved to other machines in each pass, the resources already withheld would be lost, and the gang
    might never start.
    """
    region = planner.region
    allowed = [region.choices(job).anywhere for job in request.jobs]
    here = {id_: one for id_, one in sources.items() if _holds(region, id_, one)}
    for machine in needs:
        row = region.row(machine)
        if row is None or not any(clusters[region.cluster_of(row)] for clusters in allowed):
            return None
        for w in region.running_on(machine):
            if w.id not in here and w.ends_by_s <= backfill_until_s:
                here[w.id] = _source(region, w)
    return _due(region, request, needs, here, available_s, taken)


def _due(
    region: RegionColumns, request: PlacementRequest, needs: Mapping[str, I8], sources: Mapping[str, Source],
    available_s: F8, taken: Sequence[Reservation],
) -> Reservation | None:  # fmt: skip
    """Returns the reservation of `needs` with its start; None if free resources and sources do not suffice."""
    starts_at_s, unknown, unit = region.now_s, 0, _unit(request)
    for machine, need in needs.items():
        row = region.row(machine)
        assert row is not None, "checked"
        others = sum((one.needs[machine] for one in taken if machine in one.needs), start=np.zeros(3, np.int64))
        lacking = need + others - region.machines.free[:, row]
        leaving = [(float(available_s[_number(region, w.id)]), w.id, w) for w in _on(region, machine, sources)]
        for at_s, _, source in sorted(leaving, key=lambda one: one[:2]):
            if (lacking <= 0).all():
                break
            if at_s == inf:
                unknown += max(0, int(lacking[unit]))
            starts_at_s = max(starts_at_s, at_s)
            lacking = lacking - _released(region, source, machine, request.rank)
        if (lacking > 0).any():
            return None
    return Reservation(request.workload, request.rank, starts_at_s, needs, sources, unknown)


def withheld(region: RegionColumns, reservations: Sequence[Reservation]) -> Withheld:
    """Returns the free resources that the reservations withhold.

    On each machine, these are the reserved amounts minus what the reservation gets from its sources.
    """
    asked: dict[str, I8] = {}
    kept: dict[str, I8] = {}
    for one in reservations:
        for machine, need in one.needs.items():
            row = region.row(machine)
            if row is None:
                continue
            asked[machine] = asked.get(machine, 0) + need
            before = kept.get(machine, np.zeros(3, np.int64))
            lacking = asked[machine] - before
            for source in _on(region, machine, one.sources):
                lacking = lacking - _released(region, source, machine, one.rank)
            free = np.maximum(region.machines.free[:, row] - before, 0)
            kept[machine] = before + np.minimum(np.maximum(lacking, 0), free)
    rows = ((region.row(machine), amounts) for machine, amounts in kept.items() if amounts.any())
    return [(row, amounts) for row, amounts in rows if row is not None]


@contextmanager
def without_withheld(region: RegionColumns, amounts: Withheld) -> Iterator[None]:
    """Takes the withheld amounts from the free resources while the block runs."""
    change = np.zeros_like(region.machines.free)
    for row, amount in amounts:
        change[:, row] -= amount
    with _shifted(region, change):
        yield


def _reservation(
    region: RegionColumns, request: PlacementRequest, plans: Sequence[JobPlan], starts_at_s: float, available_s: F8
) -> Reservation:
    """Returns the reservation of a plan. Its sources are the holders that are available by `starts_at_s`.

    The workload of worse rank that evicts a source is a source, too.
    """
    needs: dict[str, I8] = {}
    for plan in plans:
        one = np.array(need_of(plan.job)[:3])
        for row, tasks in zip(plan.rows.tolist(), plan.tasks.tolist(), strict=True):
            machine = region.ids[row]
            needs[machine] = needs.get(machine, np.zeros(3, np.int64)) + tasks * one
    sources: dict[str, Source] = {}
    for machine in needs:
        for w in region.running_on(machine):
            if available_s[_number(region, w.id)] <= starts_at_s:
                sources[w.id] = _source(region, w)
                promise = region.promises.get(w.id)
                if promise is not None and region.number(promise.to) is not None:
                    heir = region.workload(promise.to)
                    if heir.rank > request.rank:
                        sources[heir.id] = _source(region, heir)
    return Reservation(request.workload, request.rank, starts_at_s, needs, sources, 0)


def _source(region: RegionColumns, workload: RunningWorkload) -> Source:
    return Source(workload.attempt, max(workload.protected_until_s, region.now_s))


def _unit(request: PlacementRequest) -> int:
    return GPUS if any(job.gpus_per_task for job in request.jobs) else CPUS_MILLI


def _number(region: RegionColumns, workload: str) -> int:
    number = region.number(workload)
    assert number is not None, "listed"
    return number


def _holds(region: RegionColumns, workload: str, source: Source) -> bool:
    return region.number(workload) is not None and region.workload(workload).attempt == source.attempt


def _on(region: RegionColumns, machine: str, sources: Mapping[str, Source]) -> list[RunningWorkload]:
    """Returns the sources that hold resources of a machine, in the same attempt as when they were noted."""
    return [w for w in region.running_on(machine) if w.id in sources and sources[w.id].attempt == w.attempt]


def _released(region: RegionColumns, workload: RunningWorkload, machine: str, rank: int) -> I8:
    """Returns what a gang of this rank gets from a holder on a machine: holdings less promises to others."""
    amounts = [(h.gpus, h.cpus_milli, h.memory_bytes) for h in workload.holdings if h.machine == machine]
    out: I8 = np.array(amounts, np.int64).reshape(-1, 3).sum(axis=0)
    promise = region.promises.get(workload.id)
    if promise is None or not _goes_elsewhere(region, promise, rank):
        return out
    return out - promise.amounts.get(machine, 0)


def _goes_elsewhere(region: RegionColumns, promise: Promise, rank: int) -> bool:
    """Returns whether a promise is to a workload that a gang of this rank cannot evict."""
    return region.number(promise.to) is not None and region.workload(promise.to).rank <= rank


def _promised(region: RegionColumns, rank: int, who: B1) -> I8:
    """Returns the amounts, of shape (3, machines), that masked holders have promised to others (`_goes_elsewhere`)."""
    out = np.zeros_like(region.machines.free)
    for victim, promise in region.promises.items():
        number = region.number(victim)
        if number is not None and who[number] and _goes_elsewhere(region, promise, rank):
            for machine, amounts in promise.amounts.items():
                row = region.row(machine)
                if row is not None:
                    out[:, row] += amounts
    return out


def _reserved(region: RegionColumns, reservations: Sequence[Reservation]) -> I8:
    """Returns the reserved amounts, of shape (3, machines)."""
    out = np.zeros_like(region.machines.free)
    for one in reservations:
        for machine, need in one.needs.items():
            row = region.row(machine)
            if row is not None:
                out[:, row] += need
    return out


@contextmanager
def _gone(region: RegionColumns, rank: int, who: B1, reserved: I8) -> Iterator[None]:
    """Frees what the masked holders release, without the reserved amounts, while the block runs."""
    version = region.machines.version.copy()
    _give_up(region.machines, region.holders, who, 1)
    try:
        with _shifted(region, -reserved - _promised(region, rank, who)):
            yield
    finally:
        _give_up(region.machines, region.holders, who, -1)
        region.machines.version[:] = version  # The content is the same as before, so cached results stay valid.


@contextmanager
def _shifted(region: RegionColumns, change: I8) -> Iterator[None]:
    """Adds `change`, of shape (3, machines), to the free amounts while the block runs."""
    version = region.machines.version.copy()
    rows = np.flatnonzero(change.any(axis=0))
    some = np.ascontiguousarray(change[:, rows])
    shift_rows(region.machines, rows, some, 1)
    try:
        yield
    finally:
        shift_rows(region.machines, rows, some, -1)
        region.machines.version[:] = version


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
