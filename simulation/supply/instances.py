"""An instance of a pool in the simulation, by the table that its live workflow follows."""

from dataclasses import dataclass, field
from math import inf

from capacity.offers import Offer
from capacity.pools import Instance, PoolKey
from capacity.scaling import Claims
from domain.scheduling import MachineState
from lifecycle.instances import (
    FIRST_STEPS,
    INSTANCE_TABLES,
    LATEST_INSTANCES,
    InstanceEvent,
    InstancePhase,
    InstanceStep,
)
from providers.trace.market import Instance as Launched

_TABLE = INSTANCE_TABLES[LATEST_INSTANCES]


@dataclass
class Bought:
    """One machine that a cloud was asked for. Times are seconds on the simulation's clock."""

    id: str
    pool: PoolKey
    offer: Offer
    machine: MachineState
    launched: Launched | None = None
    """It in its cloud; None: it was not launched yet."""
    step: InstanceStep | None = field(default=FIRST_STEPS[InstancePhase.REQUESTED])
    """None: it is gone."""
    claims: Claims = field(default_factory=dict)
    """Workloads that waited for it at the last round."""
    idle_since_s: float = inf
    """Since when it has had no work; infinity: it has, or is not ready."""

    @property
    def place(self) -> tuple[str, str]:
        """Its region, and its machine's id."""
        return self.pool[0], self.machine.id

    @property
    def is_noticed(self) -> bool:
        """Whether its cloud has said that it takes it."""
        return self.launched is not None and self.launched.ends_at_s < inf

    @property
    def is_counted(self) -> bool:
        """Whether its pool has it, or is about to: it is not to end."""
        return self.step in (InstanceStep.LAUNCH, InstanceStep.AWAIT_AGENT, InstanceStep.SERVE)

    def go_on(self, event: InstanceEvent) -> None:
        """Begins the step that follows."""
        assert self.step is not None
        self.step = _TABLE[self.step].after[event]

    def seen(self, now_s: float) -> Instance:
        """It for the rules of pools."""
        assert self.step is not None
        phase = _TABLE[self.step].phase
        is_ready = self.step is InstanceStep.SERVE
        idle_s = now_s - self.idle_since_s if is_ready and self.idle_since_s < inf else None
        is_busy = is_ready and idle_s is None
        return Instance(self.id, phase, is_busy, self.offer, idle_s=idle_s, claims=self.claims)
