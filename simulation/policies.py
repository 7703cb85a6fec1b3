"""The policies that are compared: when a workload is bound to a region or cluster, and the order of the queue."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from domain.scheduling import JobRequest, MachineState
from infra.errors import ConfigurationError
from simulation.hardware import Hardware
from simulation.supply import Machines
from simulation.workloads import SimulatedWorkload

if TYPE_CHECKING:
    from simulation.engine import Engine
    from simulation.run import Scenario


@dataclass(frozen=True)
class SchedulingPolicy:
    """A scheduling policy. A place is a region, or a cluster if `by_cluster` is set."""

    name: str
    says: str
    binds_early: bool = False
    """Early binding: at submission, permanently; otherwise late binding, when a place has room (MAST 4.1)."""
    by_cluster: bool = False
    """A place is a cluster; otherwise a region."""
    in_order: bool = False
    """First in, first out: a workload that does not fit blocks all later ones."""
    may_evict: bool = True
    flat_over_quota: bool = False
    """All over-quota workloads have the same rank (MAST); otherwise they keep the order of their levels."""
    engine: "Callable[[Scenario, Machines], Engine] | None" = None
    """Returns the engine for a scenario on these machines; None: the engine on the production code."""
    fixed_fleet: bool = False
    """Whether the engine requires a fixed fleet, as early binding does."""


POLICIES = {
    policy.name: policy
    for policy in (
        SchedulingPolicy("global", "MAST: one queue, every region bids, late binding"),
        SchedulingPolicy(
            "federated", "bound at submission to the region with the lowest demand over supply", binds_early=True
        ),
        SchedulingPolicy("cluster", "bound at submission to a cluster", binds_early=True, by_cluster=True),
        SchedulingPolicy("fifo", "first in, first out, without priority or eviction", in_order=True, may_evict=False),
    )
}


def policies(names: Iterable[str], known: Mapping[str, SchedulingPolicy] = POLICIES) -> list[SchedulingPolicy]:
    """Returns the policies with these names, without duplicates; `all` stands for all policies of `POLICIES`.

    Raises:
        ConfigurationError: a name is unknown.
    """
    out: dict[str, SchedulingPolicy] = {}
    for name in names:
        if name != "all" and name not in known:
            raise ConfigurationError(f"--policy {name}: must be one of {', '.join(known)}, all")
        out.update(POLICIES if name == "all" else {name: known[name]})
    return list(out.values())


def split_by_cluster(machines: Machines) -> dict[str, tuple[MachineState, ...]]:
    """Returns the machines with each cluster as a separate region, named REGION/CLUSTER."""
    out: dict[str, list[MachineState]] = {}
    for region, states in machines.items():
        for m in states:
            out.setdefault(f"{region}/{m.cluster}", []).append(m)
    return {place: tuple(states) for place, states in out.items()}


def place_of(region: str, cluster: str, by_cluster: bool) -> str:
    """Returns the name of the place that contains a cluster."""
    return f"{region}/{cluster}" if by_cluster else region


class Binding:
    """Early binding to the place with the lowest ratio of demand to supply of the GPU type (MAST 5.6).

    Demand is the slots of the type that workloads bound to the place hold or wait for; supply is the place's slots of
    the type. A workload without GPUs is bound by CPUs. Candidates are the places that have the workload's data and
    could hold the gang if they were empty. Ties are broken by name. A workload without candidates is not bound.
    """

    def __init__(self, machines: Machines, by_cluster: bool) -> None:
        self._hardware, self._by_cluster = Hardware(machines), by_cluster
        self._supply: dict[tuple[str, str], int] = {}
        for region, states in machines.items():
            for m in states:
                place = place_of(region, m.cluster, by_cluster)
                for resource, amount in ((m.gpu_type, m.gpus), ("", m.cpus_milli)):
                    if resource is not None:
                        key = place, resource
                        self._supply[key] = self._supply.get(key, 0) + amount
        self._demand: dict[tuple[str, str], int] = {}
        self._bound: dict[str, list[tuple[tuple[str, str], int]]] = {}

    def bind(self, workload: SimulatedWorkload) -> str | None:
        """Binds a workload at its submission, and returns the place; None: no place could hold it.

        The ratio is that of the first job with GPUs, for the job's first GPU type that an allowed place offers.
        """
        allowed = self._places_for(workload, workload.jobs)
        if not allowed:
            return None
        resource = ""
        with_gpus = [job for job in workload.jobs if job.gpus][:1]
        for one in (replace(job, gpu_types=(gpu_type,)) for job in with_gpus for gpu_type in job.gpu_types):
            offering = allowed & self._places_for(workload, (one,))
            if offering:
                allowed, resource = offering, one.gpu_types[0]
                break
        place = min(allowed, key=lambda p: (self._rate(p, resource), p))
        self.bound(workload, place, resource)
        return place

    def _places_for(self, workload: SimulatedWorkload, jobs: Iterable[JobRequest]) -> set[str]:
        """Returns the allowed places that could hold each of the jobs if they were empty."""
        sets = [
            {
                place_of(region, cluster, self._by_cluster)
                for region, cluster in self._hardware.clusters_for(job)
                if workload.regions is None or region in workload.regions
            }
            for job in jobs
        ]
        return set.intersection(*sets)

    def bound(self, workload: SimulatedWorkload, place: str, resource: str = "") -> None:
        """Adds a workload to a place's demand. `resource`: its GPU type; empty: the first type of each job."""
        amounts: dict[tuple[str, str], int] = {}
        for job in workload.jobs:
            key = place, (resource or job.gpu_types[0]) if job.gpus else ""
            amounts[key] = amounts.get(key, 0) + (job.gpus or job.cpus_milli)
        for key, amount in amounts.items():
            self._demand[key] = self._demand.get(key, 0) + amount
        self._bound[workload.id] = list(amounts.items())

    def finished(self, workload: SimulatedWorkload) -> None:
        """Removes a finished workload from its place's demand."""
        for key, amount in self._bound.pop(workload.id, ()):
            self._demand[key] -= amount

    def _rate(self, place: str, resource: str) -> float:
        return self._demand.get((place, resource), 0) / self._supply[place, resource]
