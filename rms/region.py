"""A region as columns, updated from its change log: its machines, and the workloads that hold resources on them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from domain.capacity import kind_in_pool
from domain.priority import OVER_QUOTA_RANK, over_quota_rank
from domain.scheduling import JobRequest, MachineState, RegionSnapshot, RunningWorkload
from domain.spread import SpreadLevel
from rms.arrays import B1, F8, I4, I8
from rms.choices import Choices, choices
from rms.holders import Holders, HolderTable
from rms.machines import CPUS_MILLI, MISSING, NO_TYPE, Layout, MachinePlace, Machines, Terms, shift_rows, sort_key

_MOST_CHOICES = 1024
"""Number of distinct job requests for which the preference classes are cached."""


@dataclass(frozen=True)
class Promise:
    """The part of a victim's holdings that its evictor receives when the victim releases them."""

    to: str
    """The evictor's workload id."""
    amounts: Mapping[str, I8]
    """Amounts by machine id."""


class RegionColumns:
    """The columns of one region, and the names of the machines, clusters, GPU types and workloads numbered in them.

    A *holder* is a workload that holds resources in the region. Machines and holders are added, changed and removed one
    by one; `refresh` completes the update of the columns. Changes by an award (`rms.award`) take effect immediately.
    Holdings on closed machines (those that cannot be scheduled) are ignored.
    """

    def __init__(self, name: str, *, flat_over_quota: bool = False) -> None:
        """`flat_over_quota`: all over-quota workloads have the same rank (MAST), as in the scan."""
        self.name = name
        self.flat_over_quota = flat_over_quota
        self.now_s = 0.0
        self.hardware = 0
        """Version number; it changes when machines are added or removed, or their resources, kinds or prices change."""
        self.promises: dict[str, Promise] = {}
        """Promises by victim id (`rms.award`)."""
        self._protected_at_most_s: dict[str, float] = {}
        """Latest end of the protection by holder id (`limit_protection`)."""
        self._closed: set[str] = set()
        """Machines that cannot be scheduled now. Their rows are kept, with zero amounts."""
        self._closed_places: dict[str, MachinePlace] = {}
        """Where the machines of `note_closed` are."""
        self._groups: dict[str, set[str]] = defaultdict(set)
        """The holders of each group of workloads that are spread."""
        self._over_quota: dict[str, set[str]] = defaultdict(set)
        """The over-quota holders of each tenant."""
        self._choices: dict[tuple[object, ...], Choices] = {}
        self._choices_of = -1
        """Value of `hardware` for which `_choices` is valid."""
        self._pooled: list[tuple[Terms, int]] = []
        """The terms and GPU type numbers of open machines in pools that only some tenants may use."""
        self._pooled_of = -1
        """Value of `hardware` for which `_pooled` is valid."""
        self._arrived: dict[str, MachineState] = {}
        """Machines without a row at the right position; the next refresh rebuilds the layout."""
        self._lay_out((), ())

    @classmethod
    def of(cls, snapshot: RegionSnapshot) -> "RegionColumns":
        """Builds the columns from a snapshot."""
        region = cls(snapshot.region)
        for machine in snapshot.machines:
            region.put_machine(machine)
        region.refresh(snapshot.now_s)
        for workload in snapshot.running:
            region.put_running(workload)
        region.refresh(snapshot.now_s)
        return region

    # --------------------------------------------------------------------------------------------------- the change log

    def put_machine(self, machine: MachineState) -> None:
        """Adds a machine or updates its state."""
        self._closed_places.pop(machine.id, None)
        row = self._layout.row_of.get(machine.id)
        if row is None or machine.id in self._arrived or sort_key(self._layout.machine(row)) != sort_key(machine):
            self._arrived[machine.id] = machine
            return
        if self._layout.write(row, machine):
            self.hardware += 1
        if machine.id in self._closed:
            self._closed.remove(machine.id)
            self._holders.renew(machine.id)

    def drop_machine(self, machine: str) -> None:
        """Closes a machine that can no longer be scheduled: lost, cordoned or draining."""
        self._arrived.pop(machine, None)
        self._closed_places.pop(machine, None)
        if self.is_open(machine):
            self._closed.add(machine)
            self._layout.write(self._layout.row_of[machine], None)
            self._holders.renew(machine)
            self.hardware += 1

    def note_closed(self, place: MachinePlace) -> None:
        """Sets where a machine is that cannot be scheduled: workloads there still count for the spread of others."""
        self._closed_places[place.machine] = place

    def put_running(self, workload: RunningWorkload) -> None:
        """Adds a holder or updates its state. It does not change the free amounts; `put_machine` sets them."""
        self._leave_sets(workload.id)
        self._holders.put(workload)
        if workload.group is not None:
            self._groups[workload.group].add(workload.id)
        if workload.tenant and workload.rank >= OVER_QUOTA_RANK:
            self._over_quota[workload.tenant].add(workload.id)

    def drop_running(self, workload: str) -> None:
        """Removes a holder."""
        self._leave_sets(workload)
        self._holders.drop(workload)
        self.promises.pop(workload, None)

    def _leave_sets(self, workload: str) -> None:
        known = self._holders.workloads.get(workload)
        if known is None:
            return
        for sets, name in ((self._groups, known.group), (self._over_quota, known.tenant)):
            if name is not None and name in sets:
                sets[name].discard(workload)
                if not sets[name]:
                    del sets[name]

    def update_evictable(self, workload: str) -> None:
        """Updates whether a holder is evictable now, without waiting for the next refresh."""
        self._holders.refresh_one(workload, self.now_s)

    def limit_protection(self, workload: str, until_s: float) -> None:
        """Ends the protection of a holder by its minimum runtime at `until_s` at the latest.

        The limit holds for as long as the workload holds resources here, even if its protection is renewed when its
        tasks start. The workload becomes evictable at the first refresh after that time.
        """
        self._holders.limit_protection(workload, until_s)

    def refresh(self, now_s: float) -> None:
        """Updates all columns to the time `now_s`, and rebuilds the layout if necessary."""
        self.now_s = now_s
        if self._arrived:
            stay = [m for m in self._layout.ids if m not in self._closed and m not in self._arrived]
            machines = [self._layout.machine(self._layout.row_of[m]) for m in stay]
            self._lay_out((*machines, *self._arrived.values()), tuple(self.running_workloads()))
        self._holders.refresh(now_s)

    @contextmanager
    def demoted(self, workloads: Iterable[str], below: int) -> Iterator[None]:
        """Makes the `workloads` whose ranks are numerically above `below` over-quota while the block runs."""
        numbers = [n for n in map(self.number, workloads) if n is not None and self.holders.rank[n] > below]
        before, version = [(n, int(self.holders.rank[n])) for n in numbers], self.machines.version.copy()
        for number, rank in before:
            if rank < OVER_QUOTA_RANK:
                self._holders.rerank(number, over_quota_rank(rank, flat=self.flat_over_quota))
        try:
            yield
        finally:
            for number, rank in before:
                self._holders.rerank(number, rank)
            self.machines.version[:] = version  # The content is the same as before, so cached results stay valid.

    @contextmanager
    def without(self, machines: Iterable[str]) -> Iterator[None]:
        """Leaves no room on the `machines` while the block runs, whichever workloads are evicted there."""
        with self.without_rows(np.array([row for row in map(self.row, machines) if row is not None], np.int64)):
            yield

    @contextmanager
    def without_rows(self, rows: I8) -> Iterator[None]:
        """Leaves no room on the machines in some rows while the block runs, whichever workloads are evicted there."""
        columns, version = self.machines, self.machines.version.copy()
        amounts = np.ascontiguousarray(columns.total[:, rows])
        shift_rows(columns, rows, amounts, -1)
        try:
            yield
        finally:
            shift_rows(columns, rows, amounts, 1)
            columns.version[:] = version  # The content is the same as before, so cached results stay valid.

    def compute_lost_work(self) -> None:
        """Computes the holders' `lost_gpu_ms` for the current time. Only requests that may evict need it."""
        self._holders.compute_lost_work(self.now_s)

    def _lay_out(self, machines: Iterable[MachineState], running: Iterable[RunningWorkload]) -> None:
        self._layout = Layout(machines)
        self._arrived.clear()
        self._closed.clear()
        columns = self._layout.machines
        self._holders = HolderTable(self._layout.row_of, self._closed, columns, self._protected_at_most_s)
        for workload in running:
            self._holders.put(workload)
        self.hardware += 1

    # ------------------------------------------------------------------------------------------------- lookups and
    # names

    @property
    def machines(self) -> Machines:
        """Columns of the machines."""
        return self._layout.machines

    @property
    def holders(self) -> Holders:
        """Columns of the holders."""
        return self._holders.columns

    @property
    def free_from_s(self) -> F8:
        """The time from which each running workload may be evicted, by its number here; infinity: never."""
        return self._holders.free_from_s

    @property
    def has_protected(self) -> bool:
        """Whether some running workloads may be evicted only later, as of the last refresh."""
        return self._holders.has_protected

    @property
    def state(self) -> tuple[object, ...]:
        """Version of the region: it changes whenever free resources or the set of machines may have changed."""
        return self.hardware, self._layout.machines.version.tobytes()

    @property
    def ids(self) -> Sequence[str]:
        """Machine ids by row."""
        return self._layout.ids

    @property
    def clusters(self) -> Sequence[str]:
        """Cluster names by number."""
        return self._layout.clusters

    @property
    def types(self) -> Mapping[str, int]:
        """Numbers by GPU type."""
        return self._layout.types

    @property
    def running(self) -> Sequence[str]:
        """Holder ids by number; an empty string for an unused number."""
        return self._holders.ids

    def row(self, machine: str) -> int | None:
        """Returns the row of an open machine, or None for any other machine."""
        return self._layout.row_of[machine] if self.is_open(machine) else None

    def number(self, workload: str) -> int | None:
        """Returns the number of a holder, or None if the workload holds nothing here."""
        return self._holders.number_of.get(workload)

    def workload(self, id_: str) -> RunningWorkload:
        """Returns the state of a holder.

        Raises:
            KeyError: the workload holds nothing here.
        """
        return self._holders.workloads[id_]

    def attempts(self, workloads: Iterable[str]) -> dict[str, int]:
        """Returns the current attempt number of each holder."""
        return {id_: self.workload(id_).attempt for id_ in workloads}

    def running_workloads(self) -> Iterable[RunningWorkload]:
        """Returns all workloads that hold resources in the region."""
        return self._holders.workloads.values()

    def clusters_of(self, rows: I4) -> list[int]:
        """Returns the distinct cluster numbers of machine rows, in ascending order."""
        return sorted({self._layout.cluster(row) for row in rows.tolist()})

    def cluster_of(self, row: int) -> int:
        """Returns the cluster number of a machine row."""
        return self._layout.cluster(row)

    def machines_of(self, cluster: int, rows: I4) -> B1:
        """Returns a mask of the `rows` that are machines of a cluster."""
        columns = self._layout.machines
        return np.asarray(columns.kind_cluster[columns.kind[rows]] == cluster)

    def group(self, name: str) -> Set[str]:
        """Returns the holders that belong to a group of workloads that are spread."""
        return self._groups.get(name, frozenset())

    def over_quota_of(self, tenant: str) -> Set[str]:
        """Returns the holders of a tenant that are over-quota."""
        return self._over_quota.get(tenant, frozenset())

    def places_of(self, workload: str) -> Iterator[MachinePlace]:
        """Yields where a holder has, or is promised, resources. It skips machines that are not in the region."""
        for held in self.workload(workload).holdings:
            if (row := self.row(held.machine)) is not None:
                yield self._layout.place(row)
            elif (place := self._closed_places.get(held.machine)) is not None:
                yield place

    def rows_at(self, level: SpreadLevel, name: tuple[str, ...]) -> I8:
        """Returns the rows of the machines in a place, which may include closed ones."""
        return self._layout.rows_at(level, name)

    def workloads(self) -> Iterable[RunningWorkload]:
        """Returns all holders."""
        return self._holders.workloads.values()

    def running_on(self, machine: str) -> Iterable[RunningWorkload]:
        """Returns the holders on a machine, sorted by id."""
        return self._holders.running_on(machine)

    def is_open(self, machine: str) -> bool:
        """Returns whether a machine is in the region and can be scheduled."""
        return machine in self._layout.row_of and machine not in self._closed

    def type_numbers(self, job: JobRequest) -> I4:
        """Returns the numbers of the job's GPU types, most preferred first; `MISSING` for a type that the region lacks.

        The result for a job without GPUs is `[NO_TYPE]`.
        """
        types = [self._layout.types.get(t, MISSING) for t in job.gpu_types] if job.gpus_per_task else [NO_TYPE]
        return np.array(types, np.int32)

    def choices(self, job: JobRequest) -> "Choices":
        """Returns the preference classes of a job (`rms.choices`), cached until `hardware` changes."""
        if self._choices_of != self.hardware:
            self._choices.clear()
            self._choices_of = self.hardware
        key = job.gpu_types, job.gpus_per_task, job.cpus_milli_per_task, job.capacity, job.moves
        if key not in self._choices:
            if len(self._choices) >= _MOST_CHOICES:  # Nearly every job that moves has a key of its own.
                self._choices.clear()
            self._choices[key] = choices(self._layout, self.name, job, self.type_numbers(job))
        return self._choices[key]

    @property
    def zones(self) -> Sequence[str]:
        """The zones of the clusters, by number of the cluster."""
        return self._layout.zones

    def terms(self, cluster: int, gpu_type: str | None) -> tuple[Terms, float]:
        """Returns a cluster's terms, and its price of one GPU in US dollars per hour."""
        name = self._layout.clusters[cluster]
        return self._layout.terms[name], self._layout.gpu_usd_per_h.get((name, gpu_type), 0.0)

    def capacity_kinds(self) -> set[str]:
        """Returns the capacity kinds of the machines that can be scheduled now."""
        return {terms.capacity for terms, _ in self._open_kinds()}

    def other_pools(self, job: JobRequest) -> list[str]:
        """Returns the pools with machines of a kind that the job accepts, which only other tenants may use."""
        if self._pooled_of != self.hardware:
            self._pooled_of = self.hardware
            has_pools = any(terms.pool for terms in self._layout.terms.values())
            self._pooled = [(terms, number) for terms, number in self._open_kinds() if terms.pool] if has_pools else []
        if not self._pooled:
            return []
        types = set(self.type_numbers(job).tolist())
        return sorted(
            {
                terms.pool
                for terms, gpu_type in self._pooled
                if (not job.gpus_per_task or gpu_type in types)
                and terms.capacity not in job.capacity
                and kind_in_pool(terms.capacity) in job.capacity
            }
        )

    def _open_kinds(self) -> list[tuple[Terms, int]]:
        """Returns the terms and GPU type numbers of the machines that can be scheduled now."""
        columns, layout = self.machines, self._layout
        if not len(layout):
            return []
        # The rows of machines that cannot be scheduled contain zeros, and every machine has a core.
        there = np.add.reduceat(columns.total[CPUS_MILLI], columns.kind_at[:-1]) > 0
        found = zip(columns.kind_cluster[there].tolist(), columns.kind_type[there].tolist(), strict=True)
        return [(layout.terms[layout.clusters[of]], gpu_type) for of, gpu_type in found]
