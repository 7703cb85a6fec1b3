"""What decides: the queue and the regions behind one small interface, on the production code or on the references."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from auction.auction import Auction, Options
from auction.candidate import Candidate, Outcome
from domain.scheduling import (
    CreditWeights,
    MachineState,
    PlacedWorkload,
    QueuedWorkload,
    Ranked,
    RunningWorkload,
    TenantState,
)
from gms.columns import QueueChange, QueueColumns
from gms.scan import scan_queue
from rms.award import leave
from rms.region import Region

Ints = npt.NDArray[np.int64]
_DIGITS = 8


def id_of(number: int) -> str:
    """The id under which the decision packages know a workload: its number, so that ids sort as numbers do."""
    return f"{number:0{_DIGITS}d}"


@dataclass(frozen=True)
class Standing:
    """A scan pass: numbers of pending workloads in queue order, and the ranks of what is placed."""

    order: Ints
    rank: Ints
    """By place in the queue."""
    gang: Ints
    """By place in the queue: equal numbers ask for the same."""
    placed: Ints
    placed_rank: Ints
    ranked: Callable[[int], Ranked]
    """The workload at a place in the queue."""


@dataclass
class Counts:
    """What was decided, and how often an earlier refusal answered."""

    decisions: int = 0
    """Workloads put before the regions."""
    negative_hits: int = 0
    negative_misses: int = 0


class Engine(Protocol):
    """Decides. It is told of every change, and keeps its own picture of the world."""

    def set_tenants(self, tenants: Iterable[TenantState]) -> None:
        """Tenants as they are now."""

    def change(
        self, pending: Sequence[QueueChange[QueuedWorkload]], placed: Sequence[QueueChange[PlacedWorkload]]
    ) -> None:
        """News of the queue."""

    def scan(self, now_s: float) -> Standing:
        """Ranks everything."""

    def open(self, now_s: float) -> None:
        """Begins a pass over the queue."""

    def place(self, candidates: Sequence[Candidate]) -> Sequence[Outcome]:
        """Bids and awards, in the order of the candidates; the regions know of the awards."""

    def running(self, region: str, workload: RunningWorkload) -> None:
        """A workload holds all that it was promised, or its rank or checkpoint is new."""

    def leave(self, region: str, workload: str) -> None:
        """A workload gives up all that it holds, to its evictor and then to all."""

    def join(self, region: str, machine: MachineState) -> None:
        """A machine is there from now on, all of it free."""

    def close(self, region: str, machine: str) -> None:
        """A machine takes nothing new; whoever is there goes on until it leaves."""

    def counts(self) -> Counts:
        """What was decided so far."""


class Ranks:
    """The queue as columns, and its scan, as the live system runs them."""

    def __init__(self, weights: CreditWeights) -> None:
        self._weights = weights
        self._queue = QueueColumns()

    def set_tenants(self, tenants: Iterable[TenantState]) -> None:
        """Tenants as they are now."""
        self._queue.set_tenants(tenants)

    def change(
        self, pending: Sequence[QueueChange[QueuedWorkload]], placed: Sequence[QueueChange[PlacedWorkload]]
    ) -> None:
        """News of the queue."""
        self._queue.apply(pending, placed)

    def scan(self, now_s: float) -> Standing:
        """Ranks everything."""
        scan = scan_queue(self._queue, now_s, self._weights)
        rows = scan.order
        return Standing(
            _numbers(self._queue.pending.id)[rows],
            scan.rank[rows].astype(np.int64),
            self._queue.pending.columns["wants"][rows].astype(np.int64),
            _numbers(self._queue.placed.id),
            scan.placed_rank.astype(np.int64),
            lambda place: scan.ranked(int(rows[place])),
        )


class Production(Ranks):
    """The decision packages as the live system runs them: queue and regions as columns, the auction's auction."""

    def __init__(
        self, machines: Mapping[str, tuple[MachineState, ...]], weights: CreditWeights, options: Options
    ) -> None:
        super().__init__(weights)
        regions = []
        for name, states in sorted(machines.items()):
            region = Region(name)
            for state in states:
                region.put_machine(state)
            region.refresh(0.0)
            regions.append(region)
        self._auction = Auction(regions, options)
        self._decisions = 0

    def open(self, now_s: float) -> None:
        """Begins a pass over the queue."""
        self._auction.open(now_s)

    def place(self, candidates: Sequence[Candidate]) -> Sequence[Outcome]:
        """Bids and awards, in the order of the candidates."""
        self._decisions += len(candidates)
        return self._auction.place(candidates)

    def running(self, region: str, workload: RunningWorkload) -> None:
        """A workload's row among the holders."""
        self._auction.regions[region].put_running(workload)

    def leave(self, region: str, workload: str) -> None:
        """A workload gives up all that it holds."""
        leave(self._auction.regions[region], workload)

    def join(self, region: str, machine: MachineState) -> None:
        """A machine is there from now on."""
        self._auction.regions[region].put_machine(machine)

    def close(self, region: str, machine: str) -> None:
        """A machine takes nothing new."""
        self._auction.regions[region].drop_machine(machine)

    def counts(self) -> Counts:
        """What was decided so far."""
        stats = self._auction.stats
        return Counts(self._decisions, stats.negative_hits, stats.negative_misses)


def _numbers(ids: npt.NDArray[Any]) -> Ints:
    """The numbers that ids of `id_of` stand for."""
    if not len(ids):
        return np.empty(0, np.int64)
    digits = np.ascontiguousarray(ids).view(np.uint8).reshape(len(ids), ids.dtype.itemsize)[:, :_DIGITS]
    powers: Ints = 10 ** np.arange(_DIGITS - 1, -1, -1, dtype=np.int64)
    numbers: Ints = (digits.astype(np.int64) - ord("0")) @ powers
    return numbers
