"""The workloads that hold resources in a region (*holders*), as columns that are updated incrementally.

A holder has a number while it holds resources; its holdings are consecutive rows of a pool. Each cluster lists its
holders in the order in which the victim search scans them (MAST 4.3), so a bid does not have to sort them.

The lost work of an eviction is the GPU-seconds since the victim's last checkpoint. For a workload without reported
checkpoints, the median checkpoint age of its cluster is imputed. So a workload gains no protection by not reporting
checkpoints. A replica of a service has no checkpoints; its eviction loses its cold start.
"""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from domain.compiled import compiled
from domain.priority import LOWEST_RANK
from domain.scheduling import RunningWorkload
from rms.arrays import B1, F8, I1, I4, I8, U8
from rms.machines import Machines

NO_CLUSTER = -1
"""Home cluster of a workload that holds nothing on an open machine."""


def lost_gpu_ms(saved_at_s: F8, lost_s: F8, gpus: I8, now_s: float, home: I4, scan: I4, scanned: I4) -> I8:
    """Returns the GPU-milliseconds that each holder would lose, as integers, so that sums and comparisons are exact.

    `saved_at_s` is NaN for a holder that has reported no checkpoint. Its checkpoint age is then imputed from its `home`
    cluster, which is the cluster of its holding with the most GPUs (ties: the first by name). The imputed age is the
    median of the holders in that cluster that have reported a checkpoint, or the median of the region if there are none
    in the cluster, or 0 if there are none in the region. `scan` (clusters, positions) and `scanned` list the holders of
    each cluster. A checkpoint time in the future (clock skew) gives an age of 0.

    `lost_s` is the lost work in seconds of holders for which it does not depend on checkpoints, and NaN for the others.
    """
    reported_s = np.maximum(0.0, now_s - saved_at_s)
    age_s, silent = reported_s.copy(), np.isnan(reported_s)
    if not silent.all():
        usual_s = np.median(reported_s[~silent])
        for cluster in np.unique(home[silent]):
            there = reported_s[scan[cluster, : scanned[cluster]]] if cluster != NO_CLUSTER else reported_s[:0]
            there = there[~np.isnan(there)]
            age_s[silent & (home == cluster)] = np.median(there) if there.size else usual_s
    age_s[np.isnan(age_s)] = 0.0
    fixed = ~np.isnan(lost_s)
    age_s[fixed] = lost_s[fixed]
    return np.rint(gpus * age_s * 1000).astype(np.int64)


RANKS = LOWEST_RANK
_FIRST_SIZE = 16


class Holders(NamedTuple):
    """The holders by number. An unused number has rank 0 and is not evictable."""

    rank: I1
    started_at_s: F8
    evictable: B1
    lost_gpu_ms: I8
    gpus: I8
    """Total number of GPU slots held."""
    words: U8
    """(numbers, words): the id as 8-byte words; comparing the words compares the ids."""
    first: I4
    last: I4
    """The holdings of a holder are the rows `first:last` of `machine` and `held`."""
    machine: I4
    """Machine row of each holding."""
    held: I8
    """(holdings, 3): the amounts of each holding."""
    kind_held: I8
    """(RANKS + 1, 3, kinds): total amounts held by the holders of each rank, evictable or not."""
    scan: I4
    """(clusters, positions): the holders in each cluster, sorted by lowest priority, longest running, id."""
    scanned: I4
    """Number of used positions in each row of `scan`."""


@compiled
def id_before(holders: Holders, a: int, b: int) -> bool:
    """Returns whether the id of holder a sorts before the id of holder b."""
    for word in range(holders.words.shape[1]):
        if holders.words[a, word] != holders.words[b, word]:
            return holders.words[a, word] < holders.words[b, word]
    return False


@compiled
def _scan_place(holders: Holders, cluster: int, number: int) -> int:
    """Returns the position or insertion point of a holder in a cluster's row of `scan`, by binary search."""
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
    """Adds a holder's amounts to `kind_held`, or subtracts them (`sign` -1)."""
    for k in range(holders.first[number], holders.last[number]):
        for column in range(3):
            holders.kind_held[holders.rank[number], column, kind[holders.machine[k]]] += sign * holders.held[k, column]


@compiled
def enter(holders: Holders, kind: I4, clusters: I4, number: int) -> None:
    """Inserts a holder into the lists of its clusters. `kind` has the kind of each machine."""
    _count(holders, kind, number, 1)
    for cluster in clusters:
        place, size = _scan_place(holders, cluster, number), holders.scanned[cluster]
        for i in range(size, place, -1):
            holders.scan[cluster, i] = holders.scan[cluster, i - 1]
        holders.scan[cluster, place] = number
        holders.scanned[cluster] = size + 1


@compiled
def leave(holders: Holders, kind: I4, clusters: I4, number: int) -> None:
    """Removes a holder from the lists of its clusters. Its columns must be the same as when it was inserted."""
    _count(holders, kind, number, -1)
    for cluster in clusters:
        size = holders.scanned[cluster] - 1
        for i in range(_scan_place(holders, cluster, number), size):
            holders.scan[cluster, i] = holders.scan[cluster, i + 1]
        holders.scanned[cluster] = size


class HolderTable:
    """The holders of a region with a given machine layout."""

    def __init__(
        self,
        row_of: Mapping[str, int],
        closed: Container[str],
        machines: Machines,
        protected_at_most_s: dict[str, float],
    ) -> None:
        """`row_of` maps machine ids to rows; holdings on `closed` machines are ignored.

        `protected_at_most_s` has the latest ends of protection by holder id (`limit_protection`).
        """
        self._row_of, self._closed = row_of, closed
        self._protected_at_most_s = protected_at_most_s
        self._kind, self._kind_cluster = machines.kind, machines.kind_cluster
        self._version, self._clock = machines.version, machines.clock
        self.ids: list[str] = []
        """Ids by number; an empty string for an unused number."""
        self.number_of: dict[str, int] = {}
        self.workloads: dict[str, RunningWorkload] = {}
        self._unused: list[int] = []
        self._on: dict[str, set[str]] = {}
        """Workload ids by machine id."""
        self._clusters: list[I4] = []
        """Distinct clusters by holder number."""
        self._judged = False
        self.has_protected = False
        """Whether some holders may be evicted only later (as of the last refresh)."""
        self._pooled, self._live = 0, 0
        """Number of allocated rows of the pool, and of those that are still in use."""
        n = _FIRST_SIZE
        self._saved_at_s: F8 = np.full(n, np.nan)
        self._lost_s: F8 = np.full(n, np.nan)
        """Work that an eviction loses, if it does not grow with time."""
        self.free_from_s: F8 = np.full(n, np.inf)
        """By number: time from which the holder may be evicted; infinity while it may not be evicted at all."""
        self._home: I4 = np.full(n, NO_CLUSTER, np.int32)
        """Cluster of the holding with the most GPUs."""
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
        """Adds a holder or updates its state."""
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
        """Removes a holder."""
        before = self.workloads.pop(workload, None)
        if before is None:
            return
        self._protected_at_most_s.pop(workload, None)
        number = self.number_of.pop(workload)
        self._unlist(number, before)
        self.ids[number] = ""
        self._unused.append(number)
        self.columns.rank[number], self.columns.evictable[number] = 0, False
        self._saved_at_s[number], self._lost_s[number], self.free_from_s[number] = np.nan, np.nan, np.inf

    def limit_protection(self, workload: str, until_s: float) -> None:
        """Ends the protection of a holder by its minimum runtime at `until_s` at the latest, until it is dropped."""
        self._protected_at_most_s[workload] = min(until_s, self._protected_at_most_s.get(workload, np.inf))
        self._note(self.number_of[workload], self.workloads[workload])

    def renew(self, machine: str) -> None:
        """Lists the holders of a machine again after the machine was closed or opened."""
        for id_ in sorted(self._on.get(machine, ())):
            number, workload = self.number_of[id_], self.workloads[id_]
            self._unlist(number, workload)
            self._list(number, workload)

    def rerank(self, number: int, rank: int) -> None:
        """Moves a holder to another rank. Its holdings and its `RunningWorkload` do not change."""
        leave(self.columns, self._kind, self._clusters[number], number)
        self.columns.rank[number] = rank
        enter(self.columns, self._kind, self._clusters[number], number)
        self._touch(number)

    def refresh(self, now_s: float) -> None:
        """Updates the time-dependent columns to the time `now_s`."""
        evictable = self.free_from_s <= now_s
        self.has_protected = bool((~evictable & (self.free_from_s < np.inf)).any())
        for number in np.flatnonzero(evictable != self.columns.evictable).tolist():
            self._touch(number)
        self.columns.evictable[:] = evictable
        self._judged = False

    def compute_lost_work(self, now_s: float) -> None:
        """Computes the lost work of each eviction at the time `now_s`, once per refresh."""
        if not self._judged:
            columns = self.columns
            columns.lost_gpu_ms[:] = lost_gpu_ms(
                self._saved_at_s, self._lost_s, columns.gpus, now_s, self._home, columns.scan, columns.scanned
            )
            self._judged = True

    def running_on(self, machine: str) -> list[RunningWorkload]:
        """Returns the holders on a machine, sorted by id."""
        return [self.workloads[id_] for id_ in sorted(self._on.get(machine, ()))]

    def refresh_one(self, workload: str, now_s: float) -> None:
        """Updates whether one holder is evictable at the time `now_s`."""
        number = self.number_of[workload]
        self.columns.evictable[number] = self.free_from_s[number] <= now_s
        self._touch(number)

    # -------------------------------------------------------------------------------------------------------- internals

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
        self._saved_at_s, self.free_from_s = _doubled(self._saved_at_s), _doubled(self.free_from_s)
        self._lost_s, self._home = _doubled(self._lost_s), _doubled(self._home)
        self._saved_at_s[size:] = self._lost_s[size:] = np.nan
        self.free_from_s[size:], self._home[size:] = np.inf, NO_CLUSTER

    def _note(self, number: int, workload: RunningWorkload) -> None:
        """Writes the values that do not affect the order of any list."""
        saved_at_s = workload.last_checkpoint_at_s
        self._saved_at_s[number] = np.nan if saved_at_s is None else saved_at_s
        self._lost_s[number] = np.nan if workload.lost_s is None else workload.lost_s
        protected_s = min(workload.protected_until_s, self._protected_at_most_s.get(workload.id, np.inf))
        self.free_from_s[number] = protected_s if workload.evictable else np.inf
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
                # A workload may have several holdings on one machine; they are merged into one row.
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
        # The cluster of the largest holding. Ties: the first cluster by name, because clusters are numbered by name.
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
        """Assigns a new version to each cluster of a holder."""
        self._clock[0] += 1
        self._version[self._clusters[number]] = self._clock[0]

    def _room_for(self, rows: int) -> int:
        """Allocates consecutive rows of the pool and returns the first."""
        if self._pooled + rows > len(self.columns.machine):
            self._repack(rows)
        first = self._pooled
        self._pooled += rows
        self._live += rows
        return first

    def _repack(self, more: int) -> None:
        """Compacts the pool and enlarges it for `more` rows."""
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
