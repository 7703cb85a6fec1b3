"""SpotHedge: Dynamic Placement of spot replicas with Dynamic Fallback to on-demand replicas (SkyServe, section 3)."""

from dataclasses import dataclass

from domain.capacity import CapacityKind
from services.spot.changes import on_demand, split, surplus
from services.spot.fallback import on_demand_wanted, spot_wanted
from services.spot.placement import DynamicPlacement
from services.spot.state import PolicyState
from services.spot.values import Action, Launch, Observation, ZoneEventKind


@dataclass(frozen=True)
class SpotHedge:
    """The policy. At most N_tar + N_extra spot and N_tar on-demand replicas are launched, also if none can be had."""

    placement: DynamicPlacement
    extra: int = 1
    """N_extra, the number of spot replicas beyond the target."""
    base: int = 0
    """The number of on-demand replicas that are always kept; they count towards the target."""
    fallback: bool = True
    """Whether on-demand replicas stand in for spot replicas that are not ready; otherwise only the base is kept."""
    retry_s: float = 300.0
    """The time in seconds after which a zone that refused a launch may be tried again."""

    def start(self) -> PolicyState:
        """See `Policy.start`."""
        return self.placement.start()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        """See `Policy.decide`."""
        state = self._after_events(self.placement.known(state), observation)
        spot, others = split(observation.replicas)
        wanted = spot_wanted(observation.target, self.extra, self.base)
        actions: list[Action] = list(surplus(spot, wanted))
        placed = [one.zone for one in spot if one.zone is not None]
        waiting = state.waiting(observation.now_s)
        for _ in range(wanted - len(spot)):
            zone = self.placement.select(state, placed, waiting)
            if zone is None:
                break
            placed.append(zone)
            actions.append(Launch(CapacityKind.SPOT, zone))
        ready = sum(one.is_ready for one in spot)
        fallback = on_demand_wanted(observation.target, self.extra, ready, self.base)
        actions += on_demand(others, fallback if self.fallback else min(self.base, observation.target))
        return state, tuple(actions)

    def _after_events(self, state: PolicyState, observation: Observation) -> PolicyState:
        refused = [event.zone for event in observation.events if event.kind is ZoneEventKind.REFUSED]
        if refused:
            state = state.refused(refused, observation.now_s, self.retry_s)
        for event in observation.events:
            if event.kind is ZoneEventKind.READY:
                state = self.placement.launched(state, event.zone)
            else:
                state = self.placement.preempted(state, event.zone)
        return state
