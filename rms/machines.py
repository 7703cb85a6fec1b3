"""A region's machines as columns, in the order (cluster, GPU type, rack, id).

So the machines of one dynamic cluster, and those of one GPU type in it (a *kind*), are slices, and a bid walks slices.
Names are numbered in the order in which they sort: a comparison of numbers is a comparison of names.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from domain.compiled import compiled
from domain.scheduling import MachineState
from rms.arrays import I4, I8

GPUS, CPUS_MILLI, MEMORY_BYTES = range(3)
"""Columns of an amount."""
NO_TYPE = -1
"""The type of machines without GPUs, and of jobs without."""
MISSING = -2
"""A type that no machine of the region has."""
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
    kind_cluster: I4
    cluster_at: I4
    """Kinds of cluster c are `cluster_at[c]:cluster_at[c + 1]`; the one without GPUs, if there is one, is the first."""
    version: I8
    """By cluster: another number whenever what is free, held or evictable there may be another. Where it is the same,
    everything is."""
    clock: I8
    """(1,): the last version that was given out."""


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
    machines.clock[0] += 1
    machines.version[machines.kind_cluster[kind]] = machines.clock[0]
    machines.coarse[GPUS, row] = free[GPUS, row]
    machines.coarse[CPUS_MILLI, row] = min(free[CPUS_MILLI, row], 2**31 - 1)
    machines.coarse[MEMORY_BYTES, row] = free[MEMORY_BYTES, row] // MEBIBYTE


class Terms(NamedTuple):
    """What the machines of a cluster share."""

    capacity: str
    core_usd_per_h: float

    @classmethod
    def of(cls, machine: MachineState) -> "Terms":
        """Those of the cluster that a machine is in."""
        return cls(machine.capacity, machine.core_usd_per_h)


class Layout:
    """Which machine has which row, and the names of what is numbered. Made anew when a machine comes to a new place."""

    def __init__(self, machines: Iterable[MachineState]) -> None:
        listed = sorted(machines, key=lambda m: (*sort_key(m), m.id))
        self.ids = [m.id for m in listed]
        self.row_of = {id_: row for row, id_ in enumerate(self.ids)}
        self.clusters = sorted({m.cluster for m in listed})
        self.types = {t: number for number, t in enumerate(sorted({m.gpu_type for m in listed if m.gpu_type}))}
        self._racks = sorted({(m.cluster, m.rack) for m in listed})
        self.terms = {m.cluster: Terms.of(m) for m in listed}
        """By cluster."""
        self.gpu_usd_per_h = {(m.cluster, m.gpu_type): m.gpu_usd_per_h for m in listed}
        self._type_names = list(self.types)
        self.machines = self._columns(listed)

    def __len__(self) -> int:
        return len(self.ids)

    def cluster(self, row: int) -> int:
        """The number of a machine's cluster."""
        return int(self.machines.kind_cluster[self.machines.kind[row]])

    def machine(self, row: int) -> MachineState:
        """A machine as it is now."""
        columns = self.machines
        cluster, rack = self._racks[columns.rack[row]]
        gpu_type = columns.kind_type[columns.kind[row]]
        free_gpus, free_cpus_milli, free_memory_bytes = columns.free[:, row].tolist()
        gpus, cpus_milli, memory_bytes = columns.total[:, row].tolist()
        name = None if gpu_type == NO_TYPE else self._type_names[gpu_type]
        terms = self.terms[cluster]
        return MachineState(
            self.ids[row], cluster, rack, name, gpus, free_gpus, free_cpus_milli, free_memory_bytes, cpus_milli,
            memory_bytes, terms.capacity, self.gpu_usd_per_h[cluster, name], terms.core_usd_per_h,
        )  # fmt: skip

    def write(self, row: int, machine: MachineState | None) -> bool:
        """What a machine has and what of it is free; None: nothing. Whether it is another machine than before."""
        free, total = (0, 0, 0), (0, 0, 0)
        if machine is not None:
            free = machine.free_gpus, machine.free_cpus_milli, machine.free_memory_bytes
            total = machine.gpus, machine.cpus_milli, machine.memory_bytes
        other = tuple(self.machines.total[:, row].tolist()) != total
        if other:
            self.machines.total[:, row] = total
        if machine is not None:
            priced = (machine.cluster, machine.gpu_type), machine.gpu_usd_per_h
            other |= (self.terms[machine.cluster], self.gpu_usd_per_h[priced[0]]) != (Terms.of(machine), priced[1])
            self.terms[machine.cluster], self.gpu_usd_per_h[priced[0]] = Terms.of(machine), priced[1]
        was = self.machines.free[:, row].tolist()
        shift(self.machines, row, *(now - before for now, before in zip(free, was, strict=True)))
        return other

    def _columns(self, listed: Sequence[MachineState]) -> Machines:
        kinds: list[tuple[str, str | None]] = []
        kind_at = []
        for row, m in enumerate(listed):
            if not kinds or kinds[-1] != (m.cluster, m.gpu_type):
                kinds.append((m.cluster, m.gpu_type))
                kind_at.append(row)
        racks = {rack: number for number, rack in enumerate(self._racks)}
        clusters = {cluster: number for number, cluster in enumerate(self.clusters)}
        by_id = np.empty(len(listed), np.int32)
        by_id[sorted(range(len(listed)), key=self.ids.__getitem__)] = np.arange(len(listed))
        free = _table((m.free_gpus, m.free_cpus_milli, m.free_memory_bytes) for m in listed)
        at = np.array([*kind_at, len(listed)], np.int32)
        kind_cluster = np.array([clusters[c] for c, _ in kinds], np.int32)
        return Machines(
            free=free,
            coarse=np.stack((free[0], np.minimum(free[1], 2**31 - 1), free[2] // MEBIBYTE)).astype(np.int32),
            total=_table((m.gpus, m.cpus_milli, m.memory_bytes) for m in listed),
            rack=np.array([racks[m.cluster, m.rack] for m in listed], np.int32),
            by_id=by_id,
            kind=np.repeat(np.arange(len(kinds)), np.diff(at)).astype(np.int32),
            kind_at=at,
            kind_free=np.add.reduceat(np.maximum(free, 0), at[:-1], axis=1) if kinds else np.zeros((3, 0), np.int64),
            kind_type=np.array([NO_TYPE if t is None else self.types[t] for _, t in kinds], np.int32),
            kind_cluster=kind_cluster,
            cluster_at=np.searchsorted(kind_cluster, np.arange(len(clusters) + 1)).astype(np.int32),
            version=np.arange(1, len(clusters) + 1),
            clock=np.array([len(clusters)]),
        )


def sort_key(machine: MachineState) -> tuple[str, bool, str, str]:
    """Where a machine's row belongs: by cluster, those without GPUs first, by type, by rack."""
    return machine.cluster, machine.gpu_type is not None, machine.gpu_type or "", machine.rack


def _table(rows: Iterable[tuple[int, int, int]]) -> I8:
    return np.ascontiguousarray(np.array(list(rows), np.int64).reshape(-1, 3).T)
