"""The input of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from domain.scheduling import RunningWorkload, TenantState
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
class Scenario:
    """The input of a run that is the same for all policies."""

    machines: Machines
    """Machines by region."""
    tenants: dict[str, TenantState]
    workloads: Sequence[SimulatedWorkload]
    settings: SimulationSettings
    seed: int = 0
    until_s: float = inf
    measure_from_s: float = 0.0
    measure_to_s: float = inf
    starts_s: float = 0.0
    """The start of the simulation's clock in reported times: seconds of the trace, or since the snapshot."""
    holding: dict[str, InitialHolder] = field(default_factory=dict)
    """Slots that workloads hold at the start, by workload id."""
    sources: Supply = field(default_factory=Supply)
    """What supplies more machines during the run."""
    says: dict[str, Any] = field(default_factory=dict)
    """Facts about the scenario's origin, which are copied to the JSON object."""

    @property
    def possible(self) -> Machines:
        """The machines by region, with all machines that pools may launch."""
        return self.sources.possible(self.machines)
