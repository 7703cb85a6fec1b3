"""What a run starts from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from domain.scheduling import RunningWorkload, TenantState
from simulation.policies import Policy
from simulation.settings import Settings
from simulation.supply.sources import Machines, Sources
from simulation.workloads import Workload


@dataclass(frozen=True)
class InitialHolder:
    """A workload that holds slots at the start; its machines' free amounts reckon with that."""

    running: RunningWorkload
    region: str
    gpus: Mapping[str, int]
    works: bool
    """It runs; otherwise it is still provisioned."""


@dataclass(frozen=True)
class InitialState:
    """What a run starts from."""

    machines: Machines
    """By region."""
    tenants: Mapping[str, TenantState]
    workloads: Sequence[Workload]
    settings: Settings
    policy: Policy
    seed: int
    until_s: float = inf
    holding: Mapping[str, InitialHolder] = field(default_factory=dict)
    """By workload, those that hold slots at the start."""
    sources: Sources = field(default_factory=Sources)
    """Where more machines come from."""

    @property
    def possible(self) -> Machines:
        """Also machines that there may come to be."""
        return self.sources.possible(self.machines)
