"""The capacity of the empty fleet, to find the places that could hold a job."""

from collections import defaultdict
from collections.abc import Mapping

from domain.scheduling import JobRequest, MachineState
from simulation.workloads import SimulatedWorkload

_Kind = tuple[str, str | None, int, int, int]
"""Capacity kind, GPU type, GPUs, thousandths of a core and bytes of memory of a machine."""


class Hardware:
    """The capacity of the empty fleet, to find the regions and clusters that could hold a job."""

    def __init__(self, machines: Mapping[str, tuple[MachineState, ...]]) -> None:
        self.supply = supply(machines)
        self.regions = tuple(sorted(machines))
        self._kinds: dict[tuple[str, str], dict[_Kind, int]] = {}
        self._merged: dict[str, dict[_Kind, int]] = {}
        """Number of machines of each kind in all clusters of a region, by region."""
        for region, states in machines.items():
            for m in states:
                for kinds in (
                    self._kinds.setdefault((region, m.cluster), defaultdict(int)),
                    self._merged.setdefault(region, defaultdict(int)),
                ):
                    kinds[m.capacity, m.gpu_type, m.gpus, m.cpus_milli, m.memory_bytes] += 1
        self._known: dict[tuple[object, ...], tuple[tuple[str, str], ...]] = {}

    def clusters_for(self, job: JobRequest) -> tuple[tuple[str, str], ...]:
        """Returns the (region, cluster) pairs that could hold all tasks of a job on machines of one of its GPU types.

        Only machines of the job's capacity kinds count.
        """
        key = (
            job.tasks, job.gpus_per_task, job.gpu_types, job.cpus_milli_per_task, job.memory_bytes_per_task,
            job.capacity,
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = tuple(sorted(place for place, kinds in self._kinds.items() if _holds(kinds, job)))
        return self._known[key]

    def regions_for(self, job: JobRequest) -> tuple[str, ...]:
        """Returns the regions in which one cluster could hold a job, or all clusters together if it may span them."""
        able = {region for region, _ in self.clusters_for(job)}
        if job.span_clusters:
            able |= {region for region, kinds in self._merged.items() if _holds(kinds, job)}
        return tuple(sorted(able))

    def has_without_data(self, workload: SimulatedWorkload) -> bool:
        """Returns whether a workload is not colocated: some regions could hold it, but none of them has its data."""
        if workload.regions is None:
            return False
        able = set.intersection(*(set(self.regions_for(job)) for job in workload.jobs))
        return bool(able) and able.isdisjoint(workload.regions)


def _holds(kinds: Mapping[_Kind, int], job: JobRequest) -> bool:
    wants = (job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task)
    room: dict[str | None, int] = defaultdict(int)
    for (capacity, gpu_type, *amounts), count in kinds.items():
        if capacity not in job.capacity:
            continue
        fit = min(amount // want for amount, want in zip(amounts, wants, strict=True) if want)
        room[gpu_type if job.gpus_per_task else None] += count * fit
    types: tuple[str | None, ...] = job.gpu_types if job.gpus_per_task else (None,)
    return any(room.get(gpu_type, 0) >= job.tasks for gpu_type in types)


def supply(machines: Mapping[str, tuple[MachineState, ...]]) -> dict[str, int]:
    """Returns the GPU slots of all regions by GPU type, sorted by type."""
    out: dict[str, int] = defaultdict(int)
    for states in machines.values():
        for m in states:
            if m.gpu_type:
                out[m.gpu_type] += m.gpus
    return dict(sorted(out.items()))
