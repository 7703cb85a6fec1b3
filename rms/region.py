"""A region's snapshot laid out for planning: machines are positions in the order of their ids.

So a comparison of positions is a comparison of ids, and a bid does not depend on the order of its snapshot.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from domain.scheduling import JobRequest, MachineState, RegionSnapshot, RunningWorkload
from rms.lost_work import LostWork

Kind = tuple[str, str | None]
"""A dynamic cluster and a GPU type, None for machines without GPUs."""


class Held(NamedTuple):
    """What a workload holds on the machine at a position."""

    machine: int
    gpus: int
    cpus_milli: int
    memory_bytes: int


@dataclass(frozen=True)
class Group:
    """The machines from which one job's tasks may be served together: of one cluster and, with GPUs, of one type."""

    cluster: str
    gpu_type: str | None
    preference: int
    """Index of the GPU type in the job's list; 0 for a job without GPUs."""
    tiers: tuple[tuple[int, ...], ...]
    """Positions of machines: a plan uses the first tier that suffices. Each is part of the next."""

    @property
    def eligible(self) -> tuple[int, ...]:
        """Every machine that the job may use here."""
        return self.tiers[-1]


@dataclass(frozen=True)
class Holder:
    """A running workload and what it holds on the snapshot's machines."""

    workload: RunningWorkload
    held: tuple[Held, ...]
    by_kind: Mapping[Kind, tuple[Held, ...]]

    def on(self, group: Group) -> tuple[Held, ...]:
        """What it holds on the group's machines."""
        if group.gpu_type is not None:
            return self.by_kind.get((group.cluster, group.gpu_type), ())
        return tuple(h for kind, held in self.by_kind.items() if kind[0] == group.cluster for h in held)


@dataclass
class Free:
    """What is free on each machine, by position. A plan under way takes from a copy of its own."""

    gpus: list[int]
    cpus_milli: list[int]
    memory_bytes: list[int]

    def copy(self) -> "Free":
        """An independent copy."""
        return Free(self.gpus[:], self.cpus_milli[:], self.memory_bytes[:])

    def release(self, held: Iterable[Held]) -> None:
        """Adds what a victim gives up."""
        for machine, gpus, cpus_milli, memory_bytes in held:
            self.gpus[machine] += gpus
            self.cpus_milli[machine] += cpus_milli
            self.memory_bytes[machine] += memory_bytes

    def take(self, job: JobRequest, machines: Iterable[tuple[int, int]]) -> None:
        """Takes what the job's tasks need: `machines` is a list of (position, number of tasks)."""
        for machine, tasks in machines:
            self.gpus[machine] -= tasks * job.gpus_per_task
            self.cpus_milli[machine] -= tasks * job.cpus_milli_per_task
            self.memory_bytes[machine] -= tasks * job.memory_bytes_per_task

    def is_enough_on(self, machines: Iterable[int]) -> bool:
        """Whether nothing is overdrawn on these machines."""
        return all(self.gpus[m] >= 0 and self.cpus_milli[m] >= 0 and self.memory_bytes[m] >= 0 for m in machines)


@dataclass(frozen=True)
class Region:
    """A snapshot ready for any number of bids. Nothing in it changes."""

    snapshot: RegionSnapshot
    machines: tuple[MachineState, ...]
    """In the order of their ids."""
    racks: tuple[str, ...]
    """Each machine's rack; racks of the same name in two clusters are two racks."""
    kinds: Mapping[Kind, tuple[int, ...]]
    clusters: Mapping[str, tuple[int, ...]]
    """Each cluster's machines; clusters in the order of their names."""
    holders: tuple[Holder, ...]

    @classmethod
    def of(cls, snapshot: RegionSnapshot) -> "Region":
        """Lays a snapshot out. What is held on machines that it does not list is no concern of a bid."""
        machines = tuple(sorted(snapshot.machines, key=lambda m: m.id))
        positions = {machine.id: position for position, machine in enumerate(machines)}
        kinds: dict[Kind, list[int]] = defaultdict(list)
        clusters: dict[str, list[int]] = defaultdict(list)
        for position, machine in enumerate(machines):
            kinds[machine.cluster, machine.gpu_type].append(position)
            clusters[machine.cluster].append(position)
        return cls(
            snapshot,
            machines,
            tuple(machine.rack for machine in machines),
            {kind: tuple(members) for kind, members in kinds.items()},
            {name: tuple(clusters[name]) for name in sorted(clusters)},
            tuple(_holder(workload, machines, positions) for workload in snapshot.running),
        )

    def free(self) -> Free:
        """What is free now."""
        return Free(
            [machine.free_gpus for machine in self.machines],
            [machine.free_cpus_milli for machine in self.machines],
            [machine.free_memory_bytes for machine in self.machines],
        )

    def empty(self) -> Free:
        """What would be free if nothing ran."""
        return Free(
            [machine.gpus for machine in self.machines],
            [machine.cpus_milli for machine in self.machines],
            [machine.memory_bytes for machine in self.machines],
        )

    def groups(self, job: JobRequest) -> Sequence[Group]:
        """Where the job's tasks could go: each cluster with each acceptable GPU type that it has.

        A job without GPUs may use every machine of a cluster, but those with GPUs only where the others do not suffice.
        """
        if job.gpus_per_task:
            return [
                Group(cluster, gpu_type, preference, (self.kinds[cluster, gpu_type],))
                for preference, gpu_type in enumerate(job.gpu_types)
                for cluster in self.clusters
                if (cluster, gpu_type) in self.kinds
            ]
        return [
            Group(cluster, None, 0, (self.kinds.get((cluster, None), ()), everything))
            for cluster, everything in self.clusters.items()
        ]

    @cached_property
    def lost_work(self) -> LostWork:
        """What its running workloads would lose."""
        return LostWork.of(self.snapshot)


def _holder(workload: RunningWorkload, machines: Sequence[MachineState], positions: Mapping[str, int]) -> Holder:
    by_kind: dict[Kind, list[Held]] = defaultdict(list)
    for holding in workload.holdings:
        position = positions.get(holding.machine)
        if position is not None and (holding.gpus or holding.cpus_milli or holding.memory_bytes):
            machine = machines[position]
            held = Held(position, holding.gpus, holding.cpus_milli, holding.memory_bytes)
            by_kind[machine.cluster, machine.gpu_type].append(held)
    everything = tuple(held for part in by_kind.values() for held in part)
    return Holder(workload, everything, {kind: tuple(part) for kind, part in by_kind.items()})
