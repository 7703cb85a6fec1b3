"""A region as columns: machines in the order (cluster, GPU type, rack, id), and who holds what on them.

So the machines of one dynamic cluster, and those of one GPU type in it (a *kind*), are slices, and a bid walks slices.
Names are numbered in the order in which they sort: a comparison of numbers is a comparison of names.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from domain.compiled import compiled
from domain.scheduling import JobRequest, MachineState, RegionSnapshot, RunningWorkload
from rms.lost_work import lost_gpu_ms

Array = npt.NDArray[np.generic]
I8 = npt.NDArray[np.int64]
I4 = npt.NDArray[np.int32]
I1 = npt.NDArray[np.int8]
F8 = npt.NDArray[np.float64]
B1 = npt.NDArray[np.bool_]
U8 = npt.NDArray[np.uint64]

GPUS, CPUS_MILLI, MEMORY_BYTES = range(3)
"""Columns of an amount."""
NO_TYPE = -1
MEBIBYTE = 1 << 20


class Machines(NamedTuple):
    """The machines, by row; the kernels change `free` and `kind_free` while they plan, and put them back."""

    free: I8
    """(3, machines): what no workload holds and none was promised; below 0 where a machine is overdrawn."""
    coarse: I4
    """(3, machines): the same in GPUs, thousandths of a core and MiB, rounded down: a quick no."""
    total: I8
    """(3, machines)."""
    rack: I4
    by_id: I4
    """A machine's number in the order of ids."""
    kind: I4
    kind_at: I4
    """Rows of kind k are `kind_at[k]:kind_at[k + 1]`."""
    kind_free: I8
    """(3, kinds): sums of what is free, an overdrawn machine counting as full."""
    kind_type: I4
    cluster_at: I4
    """Kinds of cluster c are `cluster_at[c]:cluster_at[c + 1]`; the one without GPUs, if there is one, is the first."""


class Holders(NamedTuple):
    """The running workloads, by number. Each one's holdings are consecutive rows of `machine` and `held`."""

    rank: I1
    started_at_s: F8
    evictable: B1
    lost_gpu_ms: I8
    gpus: I8
    """GPU slots that it holds in all."""
    words: U8
    """(holders, words): its id, to be compared word by word."""
    at: I4
    machine: I4
    held: I8
    """(holdings, 3)."""
    kind_held: I8
    """(9, 3, kinds): what the evictable of each rank hold."""
    scan_at: I4
    scan: I4
    """Those with something in cluster c, lowest priority first, then longest running, then id."""


@compiled
def shift(machines: Machines, row: int, gpus: int, cpus_milli: int, memory_bytes: int) -> None:
    """Adds to what is free on a machine."""
    kind, free = machines.kind[row], machines.free
    before = free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row]
    free[GPUS, row] += gpus
    free[CPUS_MILLI, row] += cpus_milli
    free[MEMORY_BYTES, row] += memory_bytes
    for column in range(3):
        machines.kind_free[column, kind] += max(0, free[column, row]) - max(0, before[column])
    machines.coarse[GPUS, row] = free[GPUS, row]
    machines.coarse[CPUS_MILLI, row] = min(free[CPUS_MILLI, row], 2**31 - 1)
    machines.coarse[MEMORY_BYTES, row] = free[MEMORY_BYTES, row] // MEBIBYTE


class Region:
    """A region's columns, with the names of what is numbered in them, kept up to date from its change log.

    Machines and workloads are put and dropped one by one; `refresh` makes the columns follow. What an award changes
    (`rms.award`) shows at once. What is held on machines that are not there is no concern of a bid.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.now_s = 0.0
        self.ids: list[str] = []
        self.row_of: dict[str, int] = {}
        self.clusters: list[str] = []
        self.types: dict[str, int] = {}
        self.running: list[str] = []
        """Ids of the holders, by number."""
        self.number_of: dict[str, int] = {}
        self._known: dict[str, MachineState] = {}
        self._closed: set[str] = set()
        """Known machines that are not there now: their rows stay, and are empty."""
        self._workloads: dict[str, RunningWorkload] = {}
        self._moved = True
        """A machine came to where no row is: the layout is made anew."""
        self.hardware = 0
        """Another number whenever what there is, held or free, may have changed."""
        self.machines: Machines
        self.holders: Holders
        self.refresh(0.0)

    @classmethod
    def of(cls, snapshot: RegionSnapshot) -> "Region":
        """A region that holds what a snapshot does."""
        region = cls(snapshot.region)
        for machine in snapshot.machines:
            region.put_machine(machine)
        for workload in snapshot.running:
            region.put_running(workload)
        region.refresh(snapshot.now_s)
        return region

    # --------------------------------------------------------------------------------------------------- the change log

    def put_machine(self, machine: MachineState) -> None:
        """A machine as it is now, new or known."""
        before = self._known.get(machine.id)
        self._known[machine.id] = machine
        self._closed.discard(machine.id)
        if self._moved or before is None or _place(before) != _place(machine):
            self._moved = True
        else:
            self._write(self.row_of[machine.id], machine)

    def drop_machine(self, machine: str) -> None:
        """A machine is not there any more: lost, cordoned or draining."""
        if machine in self._known and machine not in self._closed:
            self._closed.add(machine)
            if not self._moved:
                self._write(self.row_of[machine], None)

    def put_running(self, workload: RunningWorkload) -> None:
        """A workload that holds something here, as it is now. What is free is its machines' to say."""
        self._workloads[workload.id] = workload

    def drop_running(self, workload: str) -> None:
        """A workload holds nothing here any more."""
        self._workloads.pop(workload, None)

    def workload(self, number: int) -> RunningWorkload:
        """A holder, by number."""
        return self._workloads[self.running[number]]

    def is_open(self, machine: str) -> bool:
        """Whether a machine is there."""
        return machine in self._known and machine not in self._closed

    def refresh(self, now_s: float) -> None:
        """Makes the columns what they have to be at a moment."""
        self.now_s = now_s
        if self._moved:
            self._lay_out()
        self.running = list(self._workloads)
        self.number_of = {id_: number for number, id_ in enumerate(self.running)}
        self.holders = self._holders()

    # ------------------------------------------------------------------------------------------------------ the columns

    def _lay_out(self) -> None:
        listed = sorted(self._known.values(), key=lambda m: (*_place(m), m.id))
        self.ids = [m.id for m in listed]
        self.row_of = {id_: row for row, id_ in enumerate(self.ids)}
        self.clusters = sorted({m.cluster for m in listed})
        self.types = {t: number for number, t in enumerate(sorted({m.gpu_type for m in listed if m.gpu_type}))}
        self.machines = _machines(listed, self.clusters, self.types)
        self._moved = False
        self.hardware += 1
        for machine in self._closed:
            self._write(self.row_of[machine], None)

    def _write(self, row: int, machine: MachineState | None) -> None:
        free, total = (0, 0, 0), (0, 0, 0)
        if machine is not None:
            free = machine.free_gpus, machine.free_cpus_milli, machine.free_memory_bytes
            total = machine.gpus, machine.cpus_milli, machine.memory_bytes
        if tuple(self.machines.total[:, row]) != total:
            self.machines.total[:, row] = total
            self.hardware += 1
        shift(self.machines, row, *(int(now - was) for now, was in zip(free, self.machines.free[:, row], strict=True)))

    def _holders(self) -> Holders:
        running = list(self._workloads.values())
        at, machine, held = [0], list[int](), list[tuple[int, int, int]]()
        for workload in running:
            for h in workload.holdings:
                row = self.row_of.get(h.machine)
                if row is not None and h.machine not in self._closed and (h.gpus or h.cpus_milli or h.memory_bytes):
                    machine.append(row)
                    held.append((h.gpus, h.cpus_milli, h.memory_bytes))
            at.append(len(machine))
        rank = np.array([w.rank for w in running], np.int8)
        started_at_s = np.array([w.started_at_s for w in running], np.float64)
        evictable = np.array([w.evictable and w.protected_until_s <= self.now_s for w in running], np.bool_)
        words = id_words(self.running)
        rows, amounts = np.array(machine, np.int32), np.array(held, np.int64).reshape(-1, 3)
        clusters = np.searchsorted(self.machines.cluster_at, self.machines.kind[rows], "right") - 1
        owner = np.repeat(np.arange(len(running)), np.diff(at))
        kind_held = np.zeros((9, 3, len(self.machines.kind_type)), np.int64)
        counts = evictable[owner]
        for column in range(3):
            where = rank[owner[counts]], self.machines.kind[rows[counts]]
            np.add.at(kind_held[:, column], where, amounts[counts, column])
        # Each cluster's holders in the order of the scan: sorted by cluster and place in the order of all.
        order = np.lexsort((*words.T[::-1], started_at_s, -rank)) if running else np.empty(0, np.int64)
        place = np.empty(len(running), np.int64)
        place[order] = np.arange(len(running))
        scan_cluster, scan_place = np.divmod(
            np.unique(clusters * max(1, len(running)) + place[owner]), max(1, len(running))
        )
        return Holders(
            rank,
            started_at_s,
            evictable,
            lost_gpu_ms(running, self.now_s, clusters, owner, amounts, len(self.clusters)),
            np.array([w.gpus for w in running], np.int64),
            words,
            np.array(at, np.int32),
            rows,
            amounts,
            kind_held,
            np.searchsorted(scan_cluster, np.arange(len(self.clusters) + 1)).astype(np.int32),
            order[scan_place].astype(np.int32),
        )

    def type_numbers(self, job: JobRequest) -> I4:
        """The job's GPU types as numbers, most preferred first; `NO_TYPE` for those that the region lacks."""
        return np.array([self.types.get(t, NO_TYPE) for t in job.gpu_types], np.int32)


def _place(machine: MachineState) -> tuple[str, bool, str, str]:
    return machine.cluster, machine.gpu_type is not None, machine.gpu_type or "", machine.rack


def id_words(ids: Sequence[str]) -> U8:
    """Ids as rows of 64-bit words that compare as the ids do; shape (ids, words)."""
    raw = np.array([id_.encode() for id_ in ids] or [b""], "S")
    width = -(-raw.dtype.itemsize // 8) * 8
    words = raw.astype(f"S{width}").view(">u8").reshape(len(raw), width // 8)
    return words[: len(ids)].astype(np.uint64)


def _machines(listed: Sequence[MachineState], clusters: Sequence[str], types: Mapping[str, int]) -> Machines:
    kinds: list[tuple[str, str | None]] = []
    kind_at = []
    for row, m in enumerate(listed):
        if not kinds or kinds[-1] != (m.cluster, m.gpu_type):
            kinds.append((m.cluster, m.gpu_type))
            kind_at.append(row)
    racks = {rack: number for number, rack in enumerate(sorted({(m.cluster, m.rack) for m in listed}))}
    by_id = np.empty(len(listed), np.int32)
    by_id[sorted(range(len(listed)), key=lambda row: listed[row].id)] = np.arange(len(listed))
    free = _table((m.free_gpus, m.free_cpus_milli, m.free_memory_bytes) for m in listed)
    at = np.array([*kind_at, len(listed)], np.int32)
    coarse = np.stack((free[0], np.minimum(free[1], 2**31 - 1), free[2] // MEBIBYTE)).astype(np.int32)
    return Machines(
        free,
        coarse,
        _table((m.gpus, m.cpus_milli, m.memory_bytes) for m in listed),
        np.array([racks[m.cluster, m.rack] for m in listed], np.int32),
        by_id,
        np.repeat(np.arange(len(kinds)), np.diff(at)).astype(np.int32),
        at,
        np.add.reduceat(np.maximum(free, 0), at[:-1], axis=1) if kinds else np.zeros((3, 0), np.int64),
        np.array([NO_TYPE if t is None else types[t] for _, t in kinds], np.int32),
        np.searchsorted([clusters.index(c) for c, _ in kinds], np.arange(len(clusters) + 1)).astype(np.int32),
    )


def _table(rows: Iterable[tuple[int, int, int]]) -> I8:
    return np.ascontiguousarray(np.array(list(rows), np.int64).reshape(-1, 3).T)
