"""A region's machines as columns, sorted by cluster, GPU type, rack and id.

The machines of one dynamic cluster are therefore a slice, and so are those of one GPU type in a cluster (a *kind*).
Names are numbered in sorted order, so comparing two numbers gives the same result as comparing the names.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from domain.capacity import NANO_DEPARTURES
from domain.compiled import compiled
from domain.scheduling import MachineState
from domain.spread import SpreadLevel
from rms.arrays import I4, I8

GPUS, CPUS_MILLI, MEMORY_BYTES = range(3)
"""Indices of the resources in an amount."""
NO_TYPE = -1
"""GPU type number of machines and jobs without GPUs."""
MISSING = -2
"""GPU type number of a type that no machine of the region has."""
MEBIBYTE = 1 << 20


class Machines(NamedTuple):
    """The machines of a region. Columns have one entry per machine unless stated otherwise.

    Kernels modify `free` and `kind_free` while they plan, and restore them afterwards.
    """

    free: I8
    """(3, machines): amounts that no workload holds or is promised; negative on an overcommitted machine."""
    coarse: I4
    """(3, machines): `free` in GPUs, thousandths of a core and MiB, rounded down, at least 0; a cheap pre-filter.

    Where it was negative, a job that needs nothing of this resource would be rejected.
    """
    total: I8
    """(3, machines): amounts of the whole machine."""
    rack: I4
    by_id: I4
    """Position of the machine in the order of ids."""
    kind: I4
    kind_at: I4
    """The rows of kind k are `kind_at[k]:kind_at[k + 1]`."""
    kind_free: I8
    """(3, kinds): sums of `free`, where an overcommitted machine counts as 0."""
    kind_type: I4
    kind_cluster: I4
    cluster_at: I4
    """The kinds of cluster c are `cluster_at[c]:cluster_at[c + 1]`. A kind without GPUs comes first."""
    version: I8
    """One number per cluster. It changes whenever free amounts, holdings or evictable workloads of the cluster may have
    changed. If it is the same, all of them are the same."""
    clock: I8
    """(1,): the highest version assigned so far."""


@compiled
def shift(machines: Machines, row: int, gpus: int, cpus_milli: int, memory_bytes: int) -> None:
    """Adds amounts to the free resources of a machine; negative amounts subtract."""
    kind, free = machines.kind[row], machines.free
    before = free[GPUS, row], free[CPUS_MILLI, row], free[MEMORY_BYTES, row]
    free[GPUS, row] += gpus
    free[CPUS_MILLI, row] += cpus_milli
    free[MEMORY_BYTES, row] += memory_bytes
    for column in range(3):
        machines.kind_free[column, kind] += max(0, free[column, row]) - max(0, before[column])
    machines.clock[0] += 1
    machines.version[machines.kind_cluster[kind]] = machines.clock[0]
    machines.coarse[GPUS, row] = max(0, free[GPUS, row])
    machines.coarse[CPUS_MILLI, row] = max(0, min(free[CPUS_MILLI, row], 2**31 - 1))
    machines.coarse[MEMORY_BYTES, row] = max(0, free[MEMORY_BYTES, row] // MEBIBYTE)


@compiled
def shift_rows(machines: Machines, rows: I8, amounts: I8, sign: int) -> None:
    """Adds `sign` times the amounts, of shape (3, rows), to the free resources of some machines; see `shift`."""
    for at in range(len(rows)):
        shift(
            machines,
            rows[at],
            sign * amounts[GPUS, at],
            sign * amounts[CPUS_MILLI, at],
            sign * amounts[MEMORY_BYTES, at],
        )


class Terms(NamedTuple):
    """Attributes that all machines of a dynamic cluster share."""

    capacity: str
    core_usd_per_h: float
    departures_per_h: float
    zone: str
    cluster: str
    """The cluster that they belong to."""
    pool: str
    """Their pool, if only some tenants may use it; else empty."""

    @property
    def nano_departures_per_h(self) -> int:
        """Departures of one machine in billionths per hour."""
        return round(self.departures_per_h * NANO_DEPARTURES)

    @classmethod
    def of(cls, machine: MachineState) -> "Terms":
        """Returns the terms of the dynamic cluster of a machine."""
        return cls(
            machine.capacity, machine.core_usd_per_h, machine.departures_per_h, machine.zone, machine.cluster,
            machine.pool,
        )  # fmt: skip


class MachinePlace(NamedTuple):
    """Where a machine is. All parts are names."""

    machine: str
    cluster: str
    rack: str
    zone: str

    def at(self, level: SpreadLevel) -> tuple[str, ...]:
        """Returns the names that identify its place of a level within the region."""
        if level is SpreadLevel.RACK:
            return self.cluster, self.rack
        return (getattr(self, level.value),)


class Layout:
    """Maps machines to rows, and numbers to names.

    `clusters` are dynamic clusters: a cluster's machines in each pool that only some tenants may use are one, and its
    other machines are one. A new layout is built when a machine is added, or when its cluster, pool, GPU type or rack
    changes.
    """

    def __init__(self, machines: Iterable[MachineState]) -> None:
        listed = sorted(machines, key=lambda m: (*sort_key(m), m.id))
        self.ids = [m.id for m in listed]
        self.row_of = {id_: row for row, id_ in enumerate(self.ids)}
        self.clusters = sorted({m.dynamic_cluster for m in listed})
        self.types = {t: number for number, t in enumerate(sorted({m.gpu_type for m in listed if m.gpu_type}))}
        self._racks = sorted({(m.cluster, m.rack) for m in listed})
        self.terms = {m.dynamic_cluster: Terms.of(m) for m in listed}
        self.gpu_usd_per_h = {(m.dynamic_cluster, m.gpu_type): m.gpu_usd_per_h for m in listed}
        self._type_names = list(self.types)
        self.machines = self._columns(listed)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def zones(self) -> list[str]:
        """The zones of the clusters, by number of the cluster; empty: unknown."""
        return [self.terms[cluster].zone for cluster in self.clusters]

    def cluster(self, row: int) -> int:
        """Returns the cluster number of a row."""
        return int(self.machines.kind_cluster[self.machines.kind[row]])

    def machine(self, row: int) -> MachineState:
        """Returns the current state of the machine in a row."""
        columns = self.machines
        cluster, rack = self._racks[columns.rack[row]]
        gpu_type = columns.kind_type[columns.kind[row]]
        free_gpus, free_cpus_milli, free_memory_bytes = columns.free[:, row].tolist()
        gpus, cpus_milli, memory_bytes = columns.total[:, row].tolist()
        name = None if gpu_type == NO_TYPE else self._type_names[gpu_type]
        among = self.clusters[self.cluster(row)]
        terms = self.terms[among]
        return MachineState(
            self.ids[row], cluster, rack, name, gpus, free_gpus, free_cpus_milli, free_memory_bytes, cpus_milli,
            memory_bytes, terms.capacity, self.gpu_usd_per_h[among, name], terms.core_usd_per_h,
            terms.departures_per_h, terms.zone, terms.pool,
        )  # fmt: skip

    def place(self, row: int) -> MachinePlace:
        """Returns where the machine in a row is."""
        cluster, rack = self._racks[self.machines.rack[row]]
        return MachinePlace(self.ids[row], cluster, rack, self.terms[self.clusters[self.cluster(row)]].zone)

    def rows_at(self, level: SpreadLevel, name: tuple[str, ...]) -> I8:
        """Returns the rows of the machines in the place with this name (`MachinePlace.at`)."""
        columns = self.machines
        if level is SpreadLevel.MACHINE:
            return np.array([self.row_of[name[0]]] if name[0] in self.row_of else [], np.int64)
        if level is SpreadLevel.RACK:
            cluster, rack = name
            number = bisect_left(self._racks, (cluster, rack))
            there = self._racks[number : number + 1] == [name]
            return np.flatnonzero(columns.rack == number) if there else np.array([], np.int64)
        terms = [self.terms[one] for one in self.clusters]
        names = [one.cluster if level is SpreadLevel.CLUSTER else one.zone for one in terms]
        numbers = [number for number, one in enumerate(names) if one == name[0]]
        return np.flatnonzero(np.isin(columns.kind_cluster[columns.kind], numbers))

    def write(self, row: int, machine: MachineState | None) -> bool:
        """Writes the total and free amounts of a row; None writes zeros.

        Returns whether the total amounts, the capacity kind, the departures or the prices changed.
        """
        free, total = (0, 0, 0), (0, 0, 0)
        if machine is not None:
            free = machine.free_gpus, machine.free_cpus_milli, machine.free_memory_bytes
            total = machine.gpus, machine.cpus_milli, machine.memory_bytes
        other = tuple(self.machines.total[:, row].tolist()) != total
        if other:
            self.machines.total[:, row] = total
        if machine is not None:
            among = machine.dynamic_cluster
            priced = (among, machine.gpu_type), machine.gpu_usd_per_h
            other |= (self.terms[among], self.gpu_usd_per_h[priced[0]]) != (Terms.of(machine), priced[1])
            self.terms[among], self.gpu_usd_per_h[priced[0]] = Terms.of(machine), priced[1]
        was = self.machines.free[:, row].tolist()
        shift(self.machines, row, *(now - before for now, before in zip(free, was, strict=True)))
        return other

    def _columns(self, listed: Sequence[MachineState]) -> Machines:
        kinds: list[tuple[str, str | None]] = []
        kind_at = []
        for row, m in enumerate(listed):
            if not kinds or kinds[-1] != (m.dynamic_cluster, m.gpu_type):
                kinds.append((m.dynamic_cluster, m.gpu_type))
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
            coarse=np.maximum(0, (free[0], np.minimum(free[1], 2**31 - 1), free[2] // MEBIBYTE)).astype(np.int32),
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
    """Returns the sort key of a machine's row: dynamic cluster, machines without GPUs first, GPU type, rack."""
    return machine.dynamic_cluster, machine.gpu_type is not None, machine.gpu_type or "", machine.rack


def _table(rows: Iterable[tuple[int, int, int]]) -> I8:
    return np.ascontiguousarray(np.array(list(rows), np.int64).reshape(-1, 3).T)
