"""A region as columns, kept up to date from its change log: its machines, and who holds what on them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from domain.priority import OVER_QUOTA_RANK
from domain.scheduling import JobRequest, MachineState, RegionSnapshot, RunningWorkload
from rms.arrays import B1, I4, I8
from rms.choices import Choices, choices
from rms.holders import Holders, HolderTable
from rms.machines import MISSING, NO_TYPE, Layout, Machines, sort_key


@dataclass(frozen=True)
class Promise:
    """What a victim gives up goes to its evictor."""

    to: str
    amounts: Mapping[str, I8]
    """By machine."""


class Region:
    """A region's columns, with the names of what is numbered in them.

    Machines and workloads are put and dropped one by one; `refresh` makes the columns follow. What an award changes
    (`rms.award`) shows at once. What is held on machines that are not there is no concern of a bid.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.now_s = 0.0
        self.hardware = 0
        """Another number whenever machines may have come, gone or changed what they have."""
        self.promises: dict[str, Promise] = {}
        """By victim: who has been awarded what it holds (`rms.award`)."""
        self._closed: set[str] = set()
        """Machines that are not there now: their rows stay, and are empty."""
        self._choices: dict[tuple[object, ...], Choices] = {}
        self._choices_of = -1
        """The `hardware` for which `_choices` were found."""
        self._arrived: dict[str, MachineState] = {}
        """Machines at places where no row is: the layout is made anew at the next refresh."""
        self._lay_out((), ())

    @classmethod
    def of(cls, snapshot: RegionSnapshot) -> "Region":
        """A region that holds what a snapshot does."""
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
        """A machine as it is now, new or known."""
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
        """A machine is not there any more: lost, cordoned or draining."""
        self._arrived.pop(machine, None)
        if self.is_open(machine):
            self._closed.add(machine)
            self._layout.write(self._layout.row_of[machine], None)
            self._holders.renew(machine)
            self.hardware += 1

    def put_running(self, workload: RunningWorkload) -> None:
        """A workload that holds something here, as it is now. What is free is its machines' to say."""
        self._holders.put(workload)

    def drop_running(self, workload: str) -> None:
        """A workload holds nothing here any more."""
        self._holders.drop(workload)
        self.promises.pop(workload, None)

    def spare_no_more(self, workload: str) -> None:
        """A workload that may be evicted is so at once, not only from the next refresh on."""
        self._holders.refresh_one(workload, self.now_s)

    def refresh(self, now_s: float) -> None:
        """Makes the columns what they have to be at a moment."""
        self.now_s = now_s
        if self._arrived:
            stay = [m for m in self._layout.ids if m not in self._closed and m not in self._arrived]
            machines = [self._layout.machine(self._layout.row_of[m]) for m in stay]
            self._lay_out((*machines, *self._arrived.values()), tuple(self.running_workloads()))
        self._holders.refresh(now_s)

    @contextmanager
    def demoted(self, workloads: Iterable[str], below: int) -> Iterator[None]:
        """Those of `workloads` that are here, with ranks after `below`, count as over-quota while the block runs."""
        numbers = [n for n in map(self.number, workloads) if n is not None and self.holders.rank[n] > below]
        before, version = [(n, int(self.holders.rank[n])) for n in numbers], self.machines.version.copy()
        for number in numbers:
            self._holders.rerank(number, OVER_QUOTA_RANK)
        try:
            yield
        finally:
            for number, rank in before:
                self._holders.rerank(number, rank)
            self.machines.version[:] = version  # All is as it was.

    def judge_losses(self) -> None:
        """Makes the holders' `lost_gpu_ms` that of the moment: only who may evict asks for it."""
        self._holders.judge_losses(self.now_s)

    def _lay_out(self, machines: Iterable[MachineState], running: Iterable[RunningWorkload]) -> None:
        self._layout = Layout(machines)
        self._arrived.clear()
        self._closed.clear()
        columns = self._layout.machines
        self._holders = HolderTable(self._layout.row_of, self._closed, columns)
        for workload in running:
            self._holders.put(workload)
        self.hardware += 1

    # ---------------------------------------------------------------------------------------------------- what is there

    @property
    def machines(self) -> Machines:
        """The machines' columns."""
        return self._layout.machines

    @property
    def holders(self) -> Holders:
        """The holders' columns."""
        return self._holders.columns

    @property
    def state(self) -> tuple[object, ...]:
        """Another value whenever what is free, or which machines there are, may be another."""
        return self.hardware, self._layout.machines.version.tobytes()

    @property
    def ids(self) -> Sequence[str]:
        """Machines by row."""
        return self._layout.ids

    @property
    def clusters(self) -> Sequence[str]:
        """Clusters by number."""
        return self._layout.clusters

    @property
    def types(self) -> Mapping[str, int]:
        """GPU types to numbers."""
        return self._layout.types

    @property
    def running(self) -> Sequence[str]:
        """Ids of the holders by number; empty for a number that nobody has."""
        return self._holders.ids

    def row(self, machine: str) -> int | None:
        """The row of a machine that is there."""
        return self._layout.row_of[machine] if self.is_open(machine) else None

    def number(self, workload: str) -> int | None:
        """The number of a holder."""
        return self._holders.number_of.get(workload)

    def workload(self, id_: str) -> RunningWorkload:
        """A holder.

        Raises:
            KeyError: it holds nothing here.
        """
        return self._holders.workloads[id_]

    def attempts(self, workloads: Iterable[str]) -> dict[str, int]:
        """Which of their attempts holders are in."""
        return {id_: self.workload(id_).attempt for id_ in workloads}

    def running_workloads(self) -> Iterable[RunningWorkload]:
        """All holders."""
        return self._holders.workloads.values()

    def clusters_of(self, rows: I4) -> list[int]:
        """Numbers of the clusters of machines, each once, ascending."""
        return sorted({self._layout.cluster(row) for row in rows.tolist()})

    def cluster_of(self, row: int) -> int:
        """The number of a machine's cluster."""
        return self._layout.cluster(row)

    def machines_of(self, cluster: int, rows: I4) -> B1:
        """Which of `rows` are machines of a cluster."""
        columns = self._layout.machines
        return np.asarray(columns.kind_cluster[columns.kind[rows]] == cluster)

    def running_on(self, machine: str) -> Iterable[RunningWorkload]:
        """Those who hold something on a machine, by id."""
        return self._holders.running_on(machine)

    def is_open(self, machine: str) -> bool:
        """Whether a machine is there."""
        return machine in self._layout.row_of and machine not in self._closed

    def type_numbers(self, job: JobRequest) -> I4:
        """The job's GPU types as numbers, most preferred first: `MISSING` for those that the region lacks.

        A job without GPUs has one, `NO_TYPE`.
        """
        types = [self._layout.types.get(t, MISSING) for t in job.gpu_types] if job.gpus_per_task else [NO_TYPE]
        return np.array(types, np.int32)

    def choices(self, job: JobRequest) -> "Choices":
        """The places of the region where the job may run, by how its document prefers them."""
        if self._choices_of != self.hardware:
            self._choices.clear()
            self._choices_of = self.hardware
        key = job.gpu_types, job.gpus_per_task, job.cpus_milli_per_task, job.capacity
        if key not in self._choices:
            self._choices[key] = choices(self._layout, job, self.type_numbers(job))
        return self._choices[key]

    def terms(self, cluster: int, gpu_type: str | None) -> tuple[str, float, float]:
        """The kind of capacity of a cluster, and its prices of a GPU of a type and of a core in US dollars an hour."""
        name = self._layout.clusters[cluster]
        capacity, core_usd_per_h = self._layout.terms[name]
        return capacity, self._layout.gpu_usd_per_h.get((name, gpu_type), 0.0), core_usd_per_h
