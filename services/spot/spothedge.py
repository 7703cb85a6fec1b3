"""SpotHedge: Dynamic Placement of spot replicas with Dynamic Fallback to on-demand replicas (SkyServe, section 3)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from domain.capacity import CapacityKind
from services.spot.placement import DynamicPlacement
from services.spot.values import Action, Launch, Observation, PolicyState, SpotReplica, Terminate, ZoneEventKind


def surplus(replicas: Iterable[SpotReplica], keep: int) -> tuple[Action, ...]:
    """Returns the terminations after which `keep` replicas are left.

    Unready replicas go first, then the slowest, then those with the fewest requests in progress; of these, the newest.
    """
    kept_first = sorted(replicas, key=lambda one: (not one.is_ready, -one.requests_per_s, -one.ongoing, one.number))
    return tuple(Terminate(one.number) for one in kept_first[keep:])


def on_demand(replicas: Sequence[SpotReplica], wanted: int) -> tuple[Action, ...]:
    """Returns the actions after which `wanted` on-demand replicas are launched; `replicas` are those there now."""
    missing = wanted - len(replicas)
    return (Launch(CapacityKind.ON_DEMAND),) * missing if missing > 0 else surplus(replicas, wanted)


def split(replicas: Iterable[SpotReplica]) -> tuple[list[SpotReplica], list[SpotReplica]]:
    """Returns the spot replicas and the on-demand replicas."""
    spot: list[SpotReplica] = []
    others: list[SpotReplica] = []
    for one in replicas:
        (spot if one.is_spot else others).append(one)
    return spot, others


def spot_wanted(target: int, extra: int, base: int = 0) -> int:
    """Returns how many spot replicas to keep launched: N_tar + N_extra, less the base of on-demand replicas.

    Args:
        target: N_tar, the number of replicas that should be ready.
        extra: N_extra, the number of spot replicas beyond the target.
        base: the number of on-demand replicas that are always kept. If the base covers the target, the result is 0.
    """
    rest = max(0, target - base)
    return rest + extra if rest else 0


def on_demand_wanted(target: int, extra: int, ready_spot: int, base: int = 0) -> int:
    """Returns O(t) = min(N_tar, N_tar + N_extra - S_r(t)), the number of on-demand replicas to keep launched.

    With a base, the formula applies to the target without the base, and the base is added. The result is from
    min(base, target) to the target, also if more spot replicas are ready than wanted.

    Args:
        target: N_tar, the number of replicas that should be ready.
        extra: N_extra, the number of spot replicas beyond the target.
        ready_spot: S_r(t), the number of spot replicas that are ready.
        base: the number of on-demand replicas that are always kept.
    """
    kept = min(base, target)
    rest = target - kept
    return kept + max(0, min(rest, rest + extra - ready_spot))


@dataclass(frozen=True)
class SpotHedge:
    """The policy. At most N_tar + N_extra spot and N_tar on-demand replicas are launched, even if none is available."""

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
                state = self.placement.launched(state.granted([event.zone]), event.zone)
            else:
                state = self.placement.preempted(state, event.zone)
        return state
