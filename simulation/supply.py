"""Machines that join and leave during a run: none in the simulation of a live fleet (`research.supply` adds pools)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from capacity.scaling import Shortage
from domain.scheduling import MachineState

if TYPE_CHECKING:
    from simulation.meter import Meter
    from simulation.transitions import Transitions

Machines = Mapping[str, tuple[MachineState, ...]]
"""Machines by region."""


def usd_per_h(machine: MachineState) -> float:
    """Returns the hourly cost of a machine: that of its GPUs and of its cores, if they have prices."""
    return machine.gpus * machine.gpu_usd_per_h + machine.cpus_milli * machine.core_usd_per_h / 1000


@dataclass
class Counts:
    """Numbers of launches, refusals and terminations of pool machines."""

    launched: int = 0
    refused: int = 0
    """Launches that failed because the cloud had no machine."""
    taken: int = 0
    """Machines that clouds reclaimed."""
    ended: int = 0
    """Machines that pools terminated."""


@dataclass
class Keeper:
    """Changes the machines during a run. This one changes nothing."""

    counts: Counts = field(default_factory=Counts)
    due_s: float = inf
    """Time of the next change; infinity: none."""

    def hope(self, at_s: float) -> None:
        """Is called after a workload arrived or released its slots."""

    def changed(self, at_s: float) -> None:
        """Is called after another change."""

    def happen(self, at_s: float) -> bool:
        """Processes what is due; returns whether machines were added or removed."""
        return False


@dataclass(frozen=True)
class Supply:
    """The supply of machines during a run: none, the fleet is fixed."""

    @property
    def grows(self) -> bool:
        """Whether machines may join."""
        return False

    def possible(self, machines: Machines) -> Machines:
        """Returns the machines of a fleet, with all machines that may join."""
        return machines

    def keeper(
        self, transitions: "Transitions", meter: "Meter", waiting: Callable[[], list[Shortage]], seed: int
    ) -> Keeper:
        """Returns the keeper of a run; `waiting` returns the workloads that fit in no region, in queue order."""
        return Keeper()
