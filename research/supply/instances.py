"""An instance of a pool in the simulation. It follows the same step table as the live workflow."""

from dataclasses import dataclass, field
from math import inf

from capacity.offers import Offer
from capacity.pools import Instance, PoolKey
from capacity.providers.trace.market import MarketInstance as Launched
from capacity.scaling import Claims
from domain.lifecycle.instances import (
    FIRST_STEPS,
    INSTANCE_TABLES,
    LATEST_INSTANCES,
    InstanceEvent,
    InstancePhase,
    InstanceStep,
)
from domain.scheduling import MachineState

_TABLE = INSTANCE_TABLES[LATEST_INSTANCES]


@dataclass
class PoolInstance:
    """One machine that was requested from a cloud. Times are seconds on the simulation's clock."""

    id: str
    pool: PoolKey
    offer: Offer
    machine: MachineState
    launched: Launched | None = None
    """The cloud's record of the machine; None: it was not launched yet."""
    step: InstanceStep | None = field(default=FIRST_STEPS[InstancePhase.REQUESTED])
    """The step of the instance; None: it is gone."""
    claims: Claims = field(default_factory=dict)
    """The waiting workloads for which the last round reserved this machine."""
    idle_since_s: float = inf
    """Since when the machine has been idle; infinity: it is busy or not ready."""

    @property
    def location(self) -> tuple[str, str]:
        """The region and the machine id of the instance."""
        return self.pool[0], self.machine.id

    @property
    def is_noticed(self) -> bool:
        """Whether the cloud has announced that it reclaims the machine."""
        return self.launched is not None and self.launched.ends_at_s < inf

    @property
    def is_counted(self) -> bool:
        """Whether the instance counts towards its pool's size: it is launching or serving, and was not told to end."""
        return self.step in (InstanceStep.LAUNCH, InstanceStep.AWAIT_AGENT, InstanceStep.SERVE)

    def go_on(self, event: InstanceEvent) -> None:
        """Enters the step that follows the present one after an event."""
        assert self.step is not None
        self.step = _TABLE[self.step].after[event]

    def seen(self, now_s: float) -> Instance:
        """Returns the instance as the pool rules (`capacity`) take it."""
        assert self.step is not None
        phase = _TABLE[self.step].phase
        is_ready = self.step is InstanceStep.SERVE
        idle_s = now_s - self.idle_since_s if is_ready and self.idle_since_s < inf else None
        is_busy = is_ready and idle_s is None
        return Instance(self.id, phase, is_busy, self.offer, idle_s=idle_s, claims=self.claims)
