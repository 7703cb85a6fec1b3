"""The policies that SpotHedge is compared with. None of them remembers which zones preempt."""

from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from math import ceil

from domain.capacity import CapacityKind
from research.spot.state import ReplayState
from services.spot.spothedge import on_demand, split, surplus
from services.spot.values import Action, Launch, Observation, PolicyState, SpotReplica, Zone, ZoneEventKind


@dataclass(frozen=True)
class SpotPool(ABC):
    """A pool of spot replicas only, of N_tar + `extra` replicas. Its subclasses choose the zones."""

    zones: tuple[Zone, ...]
    extra: int = 0
    """The number of replicas beyond the target."""
    retry_s: float = 300.0
    """The time in seconds after which a zone that refused a launch is tried again."""

    def start(self) -> PolicyState:
        """See `Policy.start`."""
        return PolicyState()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        """See `Policy.decide`."""
        spot, others = split(observation.replicas)
        state, actions = self.resized(state, observation, spot, observation.target + self.extra)
        return state, (*actions, *on_demand(others, 0))

    def resized(
        self, state: PolicyState, observation: Observation, spot: list[SpotReplica], wanted: int
    ) -> tuple[PolicyState, list[Action]]:
        """Returns the next state, and the actions after which `wanted` spot replicas are launched."""
        refused = [event.zone for event in observation.events if event.kind is ZoneEventKind.REFUSED]
        if refused:
            state = state.refused(refused, observation.now_s, self.retry_s)
        return self._resized(state, state.waiting(observation.now_s), spot, wanted)

    @abstractmethod
    def _resized(
        self, state: PolicyState, waiting: frozenset[str], spot: list[SpotReplica], wanted: int
    ) -> tuple[PolicyState, list[Action]]:
        """`resized`, without launches in the zones of `waiting`, which recently refused one."""


class EvenSpread(SpotPool):
    """Each zone has a fixed number of replicas (the static spread of section 3.1).

    Replica k belongs to zone k modulo the number of zones. A replica is replaced only in its own zone, so the service
    has fewer replicas while a zone has no capacity. With more zones than replicas, the last zones are not used.
    """

    def _resized(
        self, state: PolicyState, waiting: frozenset[str], spot: list[SpotReplica], wanted: int
    ) -> tuple[PolicyState, list[Action]]:
        shares = Counter(self.zones[k % len(self.zones)].name for k in range(wanted))
        actions: list[Action] = []
        for zone in self.zones:
            here = [one for one in spot if one.zone == zone.name]
            share = shares[zone.name]
            actions += surplus(here, share)
            if zone.name not in waiting:
                actions += [Launch(CapacityKind.SPOT, zone.name)] * (share - len(here))
        return state, actions


class RoundRobin(SpotPool):
    """Each launch is tried in the zone after the one that was tried last (section 3.1).

    If a zone refuses, the next zone is tried at once. If all zones refuse, they are tried again after `retry_s`.
    """

    def start(self) -> PolicyState:
        """See `Policy.start`."""
        return ReplayState()

    def _resized(
        self, state: PolicyState, waiting: frozenset[str], spot: list[SpotReplica], wanted: int
    ) -> tuple[PolicyState, list[Action]]:
        actions: list[Action] = list(surplus(spot, wanted))
        if all(zone.name in waiting for zone in self.zones):
            return state, actions
        state = ReplayState.of(state)
        cursor = state.cursor
        for _ in range(wanted - len(spot)):
            while (zone := self.zones[cursor % len(self.zones)].name) in waiting:
                cursor += 1
            cursor += 1
            actions.append(Launch(CapacityKind.SPOT, zone))
        return replace(state, cursor=cursor), actions


class SpotOnly(SpotPool):
    """Each launch is in the zone with the fewest replicas that did not recently refuse one.

    Ties are broken by the order of the zones. This is the spot node pool that balances zones as well as it can; unlike
    `EvenSpread` it replaces a replica in another zone if its own zone has no capacity.
    """

    def _resized(
        self, state: PolicyState, waiting: frozenset[str], spot: list[SpotReplica], wanted: int
    ) -> tuple[PolicyState, list[Action]]:
        return state, [*surplus(spot, wanted), *balanced(self.zones, waiting, spot, wanted - len(spot))]


def balanced(zones: tuple[Zone, ...], waiting: frozenset[str], spot: list[SpotReplica], count: int) -> list[Action]:
    """Returns `count` launches, each in the zone with the fewest replicas; none if all zones are in `waiting`."""
    held = Counter(one.zone for one in spot)
    usable = [zone.name for zone in zones if zone.name not in waiting]
    launches: list[Action] = []
    for _ in range(count if usable else 0):
        zone = min(usable, key=lambda name: (held[name], usable.index(name)))
        held[zone] += 1
        launches.append(Launch(CapacityKind.SPOT, zone))
    return launches


@dataclass(frozen=True)
class AsgLike:
    """Two pools of fixed sizes, as in an AWS Auto Scaling group: a share of the target is always on-demand.

    The on-demand pool has the share of N_tar, rounded up; the rest are spot replicas with an even spread. No on-demand
    replica replaces a lost spot replica (section 2.4).
    """

    spread: EvenSpread
    share: float = 0.1
    """The share of on-demand replicas, from 0 to 1. The default is that of section 5.1."""

    def start(self) -> PolicyState:
        """See `Policy.start`."""
        return self.spread.start()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        """See `Policy.decide`."""
        fixed = ceil(observation.target * self.share)
        spot, others = split(observation.replicas)
        wanted = observation.target - fixed + self.spread.extra
        state, actions = self.spread.resized(state, observation, spot, wanted)
        return state, (*actions, *on_demand(others, fixed))


@dataclass(frozen=True)
class MarkLike:
    """Spot replicas only, launched without counting the replicas that are still starting, as MArk does.

    MArk was made for CPU machines that are ready within seconds. Once in `retry_s`, this policy launches as many
    replicas as ready ones are missing, in the zones with the fewest replicas, but never has more than `most_starting`
    times the target provisioning. A refused launch waits for the next round. Replicas beyond the target are ended once
    they are ready. With cold starts longer than `retry_s` the policy therefore launches too many replicas (Figure 12);
    with shorter ones it is as good as `EvenSpread`. MArk's prediction of the load is not modelled: the target is given.
    """

    zones: tuple[Zone, ...]
    most_starting: int = 3
    """The largest number of provisioning replicas, as a multiple of the target."""
    retry_s: float = 300.0
    """The time in seconds between two rounds of launches."""

    def start(self) -> PolicyState:
        """See `Policy.start`."""
        return PolicyState()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        """See `Policy.decide`."""
        spot, others = split(observation.replicas)
        ready = [one for one in spot if one.is_ready]
        starting = len(spot) - len(ready)
        actions: tuple[Action, ...] = (*surplus(ready, observation.target), *on_demand(others, 0))
        missing = min(observation.target - len(ready), self.most_starting * observation.target - starting)
        # Zones that were asked in this round wait for the next round, whether they refused or not.
        names = {zone.name for zone in self.zones}
        if missing <= 0 or names <= state.waiting(observation.now_s):
            return state, actions
        launches = balanced(self.zones, frozenset(), spot, missing)
        return state.refused(names, observation.now_s, self.retry_s), (*actions, *launches)
