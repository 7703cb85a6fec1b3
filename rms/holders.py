"""Who holds what in a region, as columns that follow the workloads that come, change and go.

A holder has a number for as long as it is there; its holdings are consecutive rows of a pool. Each cluster keeps its
holders in the order in which the search for victims goes through them (MAST 4.3), so nothing is sorted for a bid.
"""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from domain.compiled import compiled
from domain.scheduling import RunningWorkload
from rms.arrays import B1, F8, I1, I4, I8, U8
from rms.lost_work import NO_CLUSTER, lost_gpu_ms
from rms.machines import Machines

RANKS = 8
_FIRST_SIZE = 16


class Holders(NamedTuple):
    """The running workloads, by number; a number that nobody has is of rank 0 and not evictable."""

    rank: I1
    started_at_s: F8
    evictable: B1
    lost_gpu_ms: I8
    gpus: I8
    """GPU slots that it holds in all."""
    words: U8
    """(numbers, words): its id, to be compared word by word."""
    first: I4
    last: I4
    """Its holdings are rows `first:last` of `machine` and `held`."""
    machine: I4
    held: I8
    """(holdings, 3)."""
    kind_held: I8
    """(9, 3, kinds): what those of each rank hold, evictable or not."""
    scan: I4
    """(clusters, places): those with something in a cluster, lowest priority first, then longest running, then id."""
    scanned: I4
    """How many places of a cluster's row are taken."""


@compiled
def id_before(holders: Holders, a: int, b: int) -> bool:
    """Whether holder a's id sorts before holder b's."""
    for word in range(holders.words.shape[1]):
        if holders.words[a, word] != holders.words[b, word]:
            return holders.words[a, word] < holders.words[b, word]
    return False


@compiled
def _scan_place(holders: Holders, cluster: int, number: int) -> int:
    """Where a holder is in a cluster's scan, or belongs."""
    low, high = 0, holders.scanned[cluster]
    while low < high:
        middle = (low + high) // 2
        other = holders.scan[cluster, middle]
        if holders.rank[other] != holders.rank[number]:
            before = holders.rank[other] > holders.rank[number]
        elif holders.started_at_s[other] != holders.started_at_s[number]:
            before = holders.started_at_s[other] < holders.started_at_s[number]
        else:
            before = id_before(holders, other, number)
        if before:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _count(holders: Holders, kind: I4, number: int, sign: int) -> None:
    """Adds a holder to the sums by kind, or takes it out (`sign` -1)."""
    for k in range(holders.first[number], holders.last[number]):
        for column in range(3):
            holders.kind_held[holders.rank[number], column, kind[holders.machine[k]]] += sign * holders.held[k, column]


@compiled
def enter(holders: Holders, kind: I4, clusters: I4, number: int) -> None:
    """Lists a holder in its clusters. `kind` is that of each machine."""
    _count(holders, kind, number, 1)
    for cluster in clusters:
        place, size = _scan_place(holders, cluster, number), holders.scanned[cluster]
        for i in range(size, place, -1):
            holders.scan[cluster, i] = holders.scan[cluster, i - 1]
        holders.scan[cluster, place] = number
        holders.scanned[cluster] = size + 1


@compiled
def leave(holders: Holders, kind: I4, clusters: I4, number: int) -> None:
    """Takes a holder off its clusters' lists; what it is has to be as it was when it came."""
    _count(holders, kind, number, -1)
    for cluster in clusters:
        size = holders.scanned[cluster] - 1
        for i in range(_scan_place(holders, cluster, number), size):
            holders.scan[cluster, i] = holders.scan[cluster, i + 1]
        holders.scanned[cluster] = size


class HolderTable:
    """The holders of a region with a given layout of machines."""

    def __init__(self, row_of: Mapping[str, int], closed: Container[str], machines: Machines) -> None:
        """`row_of` is by machine id; `closed` machines are not there."""
        self._row_of, self._closed = row_of, closed
        self._kind, self._kind_cluster = machines.kind, machines.kind_cluster
        self._version, self._clock = machines.version, machines.clock
        self.ids: list[str] = []
        """Ids by number; empty for a number that nobody has."""
        self.number_of: dict[str, int] = {}
        self.workloads: dict[str, RunningWorkload] = {}
        self._unused: list[int] = []
        self._on: dict[str, set[str]] = {}
        """Workloads by machine."""
        self._clusters: list[I4] = []
        """Clusters by number, each once."""
        self._judged = False
        self._pooled, self._live = 0, 0
        """Rows of the pool that were given out, and those of them that are still somebody's."""
        n = _FIRST_SIZE
        self._saved_at_s: F8 = np.full(n, np.nan)
        self._free_from_s: F8 = np.full(n, np.inf)
        """From when on it may be evicted; infinity: not at all."""
        self._home: I4 = np.full(n, NO_CLUSTER, np.int32)
        """The cluster where it holds the most GPUs."""
        self.columns = Holders(
            rank=np.zeros(n, np.int8),
            started_at_s=np.zeros(n),
            evictable=np.zeros(n, np.bool_),
            lost_gpu_ms=np.zeros(n, np.int64),
            gpus=np.zeros(n, np.int64),
            words=np.zeros((n, 4), np.uint64),
            first=np.zeros(n, np.int32),
            last=np.zeros(n, np.int32),
            machine=np.zeros(n, np.int32),
            held=np.zeros((n, 3), np.int64),
            kind_held=np.zeros((RANKS + 1, 3, len(machines.kind_cluster)), np.int64),
            scan=np.zeros((len(machines.version), n), np.int32),
            scanned=np.zeros(len(machines.version), np.int32),
        )

    def put(self, workload: RunningWorkload) -> None:
        """A workload as it is now, new or known."""
        before = self.workloads.get(workload.id)
        self.workloads[workload.id] = workload
        if before is None:
            number = self._number(workload.id)
        else:
            number = self.number_of[workload.id]
            if _where(before) == _where(workload):
                self._note(number, workload)
                return
            self._unlist(number, before)
        self._list(number, workload)

    def drop(self, workload: str) -> None:
        """A workload holds nothing any more."""
        before = self.workloads.pop(workload, None)
        if before is None:
            return
        number = self.number_of.pop(workload)
        self._unlist(number, before)
        self.ids[number] = ""
        self._unused.append(number)
        self.columns.rank[number], self.columns.evictable[number] = 0, False
        self._saved_at_s[number], self._free_from_s[number] = np.nan, np.inf

    def renew(self, machine: str) -> None:
        """A machine was closed or opened: its holders are listed anew."""
        for id_ in sorted(self._on.get(machine, ())):
            number, workload = self.number_of[id_], self.workloads[id_]
            self._unlist(number, workload)
            self._list(number, workload)

    def rerank(self, number: int, rank: int) -> None:
        """Lists a holder under another rank; what it holds, and its `RunningWorkload`, stay as they are."""
        leave(self.columns, self._kind, self._clusters[number], number)
        self.columns.rank[number] = rank
        enter(self.columns, self._kind, self._clusters[number], number)
        self._touch(number)

    def refresh(self, now_s: float) -> None:
        """Makes the columns that change with time what they are at a moment."""
        evictable = self._free_from_s <= now_s
        for number in np.flatnonzero(evictable != self.columns.evictable).tolist():
            self._touch(number)
        self.columns.evictable[:] = evictable
        self._judged = False

    def judge_losses(self, now_s: float) -> None:
        """How much work each eviction would lose at a moment: found out once after a refresh."""
        if not self._judged:
            columns = self.columns
            columns.lost_gpu_ms[:] = lost_gpu_ms(
                self._saved_at_s, columns.gpus, now_s, self._home, columns.scan, columns.scanned
            )
            self._judged = True

    def running_on(self, machine: str) -> list[RunningWorkload]:
        """Those who hold something on a machine, by id."""
        return [self.workloads[id_] for id_ in sorted(self._on.get(machine, ()))]

    def refresh_one(self, workload: str, now_s: float) -> None:
        """Whether a workload may be evicted, at a moment."""
        number = self.number_of[workload]
        self.columns.evictable[number] = self._free_from_s[number] <= now_s
        self._touch(number)

    # ------------------------------------------------------------------------------------------------------------ parts

    def _number(self, id_: str) -> int:
        if self._unused:
            number = self._unused.pop()
            self.ids[number] = id_
        else:
            number = len(self.ids)
            self.ids.append(id_)
            self._clusters.append(np.empty(0, np.int32))
            if number == len(self.columns.rank):
                self._grow()
        self.number_of[id_] = number
        raw = id_.encode()
        if len(raw) > 8 * self.columns.words.shape[1]:
            wider = np.zeros((len(self.columns.words), -(-len(raw) // 8)), np.uint64)
            wider[:, : self.columns.words.shape[1]] = self.columns.words
            self.columns = self.columns._replace(words=wider)
        width = 8 * self.columns.words.shape[1]
        self.columns.words[number] = np.frombuffer(raw.ljust(width, b"\0"), ">u8")
        return number

    def _grow(self) -> None:
        by_number = ("rank", "started_at_s", "evictable", "lost_gpu_ms", "gpus", "words", "first", "last")
        self.columns = self.columns._replace(**{name: _doubled(getattr(self.columns, name)) for name in by_number})
        size = len(self._home)
        self._saved_at_s, self._free_from_s = _doubled(self._saved_at_s), _doubled(self._free_from_s)
        self._home = _doubled(self._home)
        self._saved_at_s[size:], self._free_from_s[size:], self._home[size:] = np.nan, np.inf, NO_CLUSTER

    def _note(self, number: int, workload: RunningWorkload) -> None:
        """Writes what has no part in any list."""
        saved_at_s = workload.last_checkpoint_at_s
        self._saved_at_s[number] = np.nan if saved_at_s is None else saved_at_s
        self._free_from_s[number] = workload.protected_until_s if workload.evictable else np.inf
        if self.columns.evictable[number] and not workload.evictable:
            self.columns.evictable[number] = False
            self._touch(number)

    def _list(self, number: int, workload: RunningWorkload) -> None:
        held: dict[int, list[int]] = {}
        parts: list[tuple[int, int]] = []
        for h in workload.holdings:
            self._on.setdefault(h.machine, set()).add(workload.id)
            row = self._row_of.get(h.machine)
            if row is not None and h.machine not in self._closed and (h.gpus or h.cpus_milli or h.memory_bytes):
                # One row for each machine, though a workload may hold something there in several parts.
                there = held.setdefault(row, [0, 0, 0])
                parts.append((-h.gpus, int(self._kind_cluster[self._kind[row]])))
                for column, amount in enumerate((h.gpus, h.cpus_milli, h.memory_bytes)):
                    there[column] += amount
        first = self._room_for(len(held))
        last = first + len(held)
        columns = self.columns
        if held:
            columns.machine[first:last] = list(held)
            columns.held[first:last] = list(held.values())
        columns.first[number], columns.last[number] = first, last
        columns.rank[number], columns.started_at_s[number] = workload.rank, workload.started_at_s
        columns.gpus[number] = workload.gpus
        # Its largest part, of equal ones in the first cluster by name: clusters are numbered by name.
        self._home[number] = min(parts, default=(0, NO_CLUSTER))[1]
        clusters = self._clusters[number] = np.array(sorted({cluster for _, cluster in parts}), np.int32)
        if any(columns.scanned[cluster] == columns.scan.shape[1] for _, cluster in parts):
            self.columns = columns = columns._replace(scan=np.ascontiguousarray(_doubled(columns.scan.T).T))
        enter(columns, self._kind, clusters, number)
        self._touch(number)
        self._note(number, workload)

    def _unlist(self, number: int, workload: RunningWorkload) -> None:
        leave(self.columns, self._kind, self._clusters[number], number)
        self._touch(number)
        self._live -= int(self.columns.last[number] - self.columns.first[number])
        self.columns.first[number] = self.columns.last[number] = 0
        for machine in {h.machine for h in workload.holdings}:
            self._on[machine].remove(workload.id)
            if not self._on[machine]:
                del self._on[machine]

    def _touch(self, number: int) -> None:
        """Its clusters are not what they were."""
        self._clock[0] += 1
        self._version[self._clusters[number]] = self._clock[0]

    def _room_for(self, rows: int) -> int:
        """The first of so many new rows of the pool."""
        if self._pooled + rows > len(self.columns.machine):
            self._repack(rows)
        first = self._pooled
        self._pooled += rows
        self._live += rows
        return first

    def _repack(self, more: int) -> None:
        """Closes the pool's gaps and makes room for more."""
        size = len(self.columns.machine)
        while size < 2 * (self._live + more):
            size *= 2
        machine, held = np.zeros(size, np.int32), np.zeros((size, 3), np.int64)
        at = 0
        for number in self.number_of.values():
            first, last = int(self.columns.first[number]), int(self.columns.last[number])
            end = at + last - first
            machine[at:end], held[at:end] = self.columns.machine[first:last], self.columns.held[first:last]
            self.columns.first[number], self.columns.last[number] = at, end
            at = end
        self._pooled = at
        self.columns = self.columns._replace(machine=machine, held=held)


def _where(workload: RunningWorkload) -> tuple[object, ...]:
    return workload.rank, workload.started_at_s, workload.holdings


def _doubled(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.concatenate((column, np.zeros_like(column)))
