"""The scheduler under simulation: one interface to queue and regions, and its implementation on the production code."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from domain.priority import OVER_QUOTA_RANK
from domain.scheduling import (
    CreditWeights,
    MachineState,
    PlacedWorkload,
    PlacementRequest,
    Plan,
    QueuedWorkload,
    Ranked,
    RunningWorkload,
    TenantState,
)
from gms.auction.auction import Auction, Options
from gms.auction.candidate import AuctionOutcome, Candidate
from gms.auction.growth import Grower
from gms.columns import QueueChange, QueueColumns
from gms.contested_use import waiting_tenants
from gms.scan import Scan, scan_queue
from rms.award import award, leave
from rms.region import RegionColumns

Ints = npt.NDArray[np.int64]
_DIGITS = 8


def id_of(number: int) -> str:
    """Returns a workload's id in the decision packages: its number with leading zeros, so that ids sort by number."""
    return f"{number:0{_DIGITS}d}"


@dataclass(frozen=True)
class ScanOrder:
    """The result of a scan: the queue's order, and the ranks of pending and placed workloads."""

    order: Ints
    """Numbers of the pending workloads, in queue order."""
    rank: Ints
    """Rank, by position in the queue."""
    gang: Ints
    """Number of the gang's request, by position in the queue; equal requests have equal numbers."""
    placed: Ints
    """Numbers of the placed workloads."""
    placed_rank: Ints
    """Ranks of `placed`."""
    ranked: Callable[[int], Ranked]
    """Returns the workload at a position in the queue."""
    waiting: frozenset[str]
    """The tenants whose workloads make the use of others contested (`gms.contested_use.waiting_tenants`)."""


@dataclass
class DecisionCounts:
    """Numbers of decisions, and of hits and misses of the negative cache."""

    decisions: int = 0
    """Number of times that a workload was offered to the regions."""
    negative_hits: int = 0
    negative_misses: int = 0


class Engine(Protocol):
    """A scheduler in a simulation. The simulator reports all changes to it; it keeps its own queue and regions."""

    def set_tenants(self, tenants: Iterable[TenantState]) -> None:
        """Replaces the tenants and their shares."""

    def change(
        self, pending: Sequence[QueueChange[QueuedWorkload]], placed: Sequence[QueueChange[PlacedWorkload]]
    ) -> None:
        """Applies changes of the pending and the placed workloads."""

    def scan(self, now_s: float) -> ScanOrder:
        """Ranks all pending and placed workloads."""

    def open(self, now_s: float) -> None:
        """Begins a pass over the queue."""

    def place(self, candidates: Sequence[Candidate]) -> Sequence[AuctionOutcome]:
        """Collects bids and awards them, in the order of the candidates; the regions' state includes the awards."""

    def running(self, region: str, workload: RunningWorkload) -> None:
        """Adds a workload that holds all its slots, or updates its rank and checkpoints."""

    def leave(self, region: str, workload: str) -> None:
        """Releases all resources that a workload holds: its evictor gets what it is owed, and the rest becomes free."""

    def join(self, region: str, machine: MachineState) -> None:
        """Adds a machine, all of it free."""

    def close(self, region: str, machine: str) -> None:
        """Closes a machine to new workloads; present ones keep running until they leave."""

    def counts(self) -> DecisionCounts:
        """Returns the counts of decisions so far."""


@runtime_checkable
class OrderedEngine(Engine, Protocol):
    """A scheduler with its own order of the queue, which decides on one workload after another."""

    def turns(self, standing: ScanOrder) -> Iterator[int]:
        """Yields queue positions in the order in which the workloads are to be decided on."""


class Ranks:
    """Stores the queue in columns and ranks it, with the code of the live system."""

    def __init__(self, weights: CreditWeights, *, flat_over_quota: bool = False) -> None:
        self._weights, self._flat_over_quota = weights, flat_over_quota
        self._queue = QueueColumns()
        self._scan: Scan | None = None

    def set_tenants(self, tenants: Iterable[TenantState]) -> None:
        """Replaces the tenants and their shares."""
        self._queue.set_tenants(tenants)

    def change(
        self, pending: Sequence[QueueChange[QueuedWorkload]], placed: Sequence[QueueChange[PlacedWorkload]]
    ) -> None:
        """Applies changes of the pending and the placed workloads."""
        self._queue.apply(pending, placed)

    def scan(self, now_s: float) -> ScanOrder:
        """Ranks all pending and placed workloads."""
        scan = self._scan = scan_queue(self._queue, now_s, self._weights, flat=self._flat_over_quota)
        rows = scan.order
        return ScanOrder(
            _numbers(self._queue.pending.id)[rows],
            scan.pending.rank[rows].astype(np.int64),
            self._queue.pending.columns["wants"][rows].astype(np.int64),
            _numbers(self._queue.placed.id),
            scan.placed_rank.astype(np.int64),
            scan.ranked,
            waiting_tenants(self._queue, now_s),
        )


class Production(Ranks):
    """The decision packages of the live system: queue and regions as columns, and the auction."""

    def __init__(
        self,
        machines: Mapping[str, tuple[MachineState, ...]],
        weights: CreditWeights,
        options: Options,
        *,
        flat_over_quota: bool = False,
    ) -> None:
        super().__init__(weights, flat_over_quota=flat_over_quota)
        regions = []
        for name, states in sorted(machines.items()):
            region = RegionColumns(name, flat_over_quota=flat_over_quota)
            for state in states:
                region.put_machine(state)
            region.refresh(0.0)
            regions.append(region)
        self._auction = Auction(regions, options)
        self._decisions = 0

    def open(self, now_s: float) -> None:
        """Begins a pass over the queue."""
        self._auction.open(now_s)

    def place(self, candidates: Sequence[Candidate]) -> Sequence[AuctionOutcome]:
        """Collects bids and awards them, in the order of the candidates."""
        self._decisions += len(candidates)
        return self._auction.place(candidates)

    def running(self, region: str, workload: RunningWorkload) -> None:
        """Adds or updates a workload that holds all its slots."""
        self._auction.regions[region].put_running(workload)

    def book(self, now_s: float, plan: Plan, request: PlacementRequest) -> None:
        """Takes the resources of a plan that is not the result of an auction."""
        region = self._auction.regions[plan.region]
        if plan.victims:
            region.refresh(now_s)  # The protection of some may have ended since the last pass.
        award(region, plan, request)

    def holders(self, region: str) -> Iterable[RunningWorkload]:
        """Returns the workloads that hold resources in a region."""
        return self._auction.regions[region].workloads()

    def reserved_machines(self) -> frozenset[str]:
        """Returns the machines on which reservations of this pass withhold resources from the worst rank."""
        return self._auction.reserved_machines()

    def grow(self, region: str, grower: Grower, tenant: str) -> Plan | None:
        """Returns the place of a running elastic workload with more tasks, if it should grow after this pass."""
        assert self._scan is not None
        request, (job,) = grower.request, grower.request.jobs
        if request.rank < OVER_QUOTA_RANK:
            more = self._scan.more_tasks(tenant, replace(job, tasks=grower.tasks), job.gpu_types)
            request = replace(request, jobs=(replace(job, most_tasks=grower.tasks + more),))
        return self._auction.bidder(region).grow(replace(grower, request=request))

    def reserves(self, region: str, rank: int) -> bool:
        """Returns whether the last pass made a reservation in a region for a workload of this rank or a better one."""
        return any(one.rank <= rank for one in self._auction.bidder(region).reservations)

    def leave(self, region: str, workload: str) -> None:
        """Releases all resources that a workload holds."""
        leave(self._auction.regions[region], workload)

    def join(self, region: str, machine: MachineState) -> None:
        """Adds a machine, all of it free."""
        self._auction.regions[region].put_machine(machine)

    def close(self, region: str, machine: str) -> None:
        """Closes a machine to new workloads."""
        self._auction.regions[region].drop_machine(machine)

    def counts(self) -> DecisionCounts:
        """Returns the counts of decisions so far."""
        stats = self._auction.stats
        return DecisionCounts(self._decisions, stats.negative_hits, stats.negative_misses)


def _numbers(ids: npt.NDArray[Any]) -> Ints:
    """Returns the workload numbers of ids that `id_of` made."""
    if not len(ids):
        return np.empty(0, np.int64)
    digits = np.ascontiguousarray(ids).view(np.uint8).reshape(len(ids), ids.dtype.itemsize)[:, :_DIGITS]
    powers: Ints = 10 ** np.arange(_DIGITS - 1, -1, -1, dtype=np.int64)
    numbers: Ints = (digits.astype(np.int64) - ord("0")) @ powers
    return numbers
