"""The initial state of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from domain.scheduling import RunningWorkload, TenantState
from simulation.policies import SchedulingPolicy
from simulation.settings import SimulationSettings
from simulation.supply import Machines, Supply
from simulation.workloads import SimulatedWorkload


@dataclass(frozen=True)
class InitialHolder:
    """A workload that holds slots at the start; the free amounts of its machines exclude these slots already."""

    running: RunningWorkload
    region: str
    gpus: Mapping[str, int]
    works: bool
    """Whether the workload runs; otherwise it is still being provisioned."""


@dataclass(frozen=True)
class InitialState:
    """The initial state of a run: machines, tenants, workloads, settings and policy."""

    machines: Machines
    """Machines by region."""
    tenants: Mapping[str, TenantState]
    workloads: Sequence[SimulatedWorkload]
    settings: SimulationSettings
    policy: SchedulingPolicy
    seed: int
    until_s: float = inf
    holding: Mapping[str, InitialHolder] = field(default_factory=dict)
    """Slots that workloads hold at the start, by workload id."""
    sources: Supply = field(default_factory=Supply)
    """What supplies more machines during the run."""

    @property
    def possible(self) -> Machines:
        """The machines by region, with all machines that pools may launch."""
        return self.sources.possible(self.machines)
