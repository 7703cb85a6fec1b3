"""The values that policies exchange with their caller: zones, replicas, events, observations and actions."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from domain.capacity import CapacityKind
from services.spot.knowledge import Knowledge

LONGEST_RETRY_S = 300.0
"""The limit of the pause of a zone that refuses launches, unless the first pause is longer."""


@dataclass(frozen=True)
class PolicyState:
    """The state of a policy between decisions. A policy leaves the fields that it does not use at their defaults."""

    available: tuple[str, ...] = ()
    """Z_A of Algorithm 1: the active zones, in the order of the enabled zones."""
    preempting: tuple[str, ...] = ()
    """Z_P of Algorithm 1: the zones that recently preempted a replica or refused a launch, in the same order."""
    retry_at_s: tuple[tuple[str, float], ...] = ()
    """Zones that refused a launch, sorted by name, with the time from which a launch is tried there again."""
    refusals: tuple[tuple[str, int], ...] = ()
    """The number of refusals in a row of each zone that has had no replica since, sorted by name."""
    knowledge: Knowledge = field(default_factory=Knowledge)
    """What `spothedge+` has learned about the zones."""
    review_at_s: float = 0.0
    """Until then `spothedge+` decides only if something has changed."""
    settings: int = 0
    """The checksum of the settings with which `spothedge+` decided last."""

    def waiting(self, now_s: float) -> frozenset[str]:
        """Returns the zones in which no launch is tried now, because they recently refused one."""
        return frozenset(zone for zone, at_s in self.retry_at_s if at_s > now_s)

    def refused(self, zones: Collection[str], now_s: float, retry_s: float) -> "PolicyState":
        """Returns the state in which these zones wait, each for `retry_s` seconds after its first refusal.

        The pause doubles with each further refusal in a row, up to `LONGEST_RETRY_S`. Refusals while a zone waits are
        answers to launches of the same time: they begin the pause again, but do not double it. Waits that have ended
        are dropped.
        """
        until = {zone: at_s for zone, at_s in self.retry_at_s if at_s > now_s}
        counts = dict(self.refusals)
        for zone in zones:
            counts[zone] = max(1, counts.get(zone, 0) + (zone not in until))
            # 2 ** 20 is above any useful limit, and keeps the number finite.
            pause_s = min(max(retry_s, LONGEST_RETRY_S), retry_s * 2.0 ** min(20, counts[zone] - 1))
            until[zone] = now_s + pause_s
        return replace(self, retry_at_s=tuple(sorted(until.items())), refusals=tuple(sorted(counts.items())))

    def paused(self, zones: Collection[str], until_s: float) -> "PolicyState":
        """Returns the state in which these zones wait at least until `until_s`, without a refusal."""
        until = dict(self.retry_at_s)
        for zone in zones:
            until[zone] = max(until_s, until.get(zone, until_s))
        return replace(self, retry_at_s=tuple(sorted(until.items())))

    def granted(self, zones: Collection[str]) -> "PolicyState":
        """Returns the state in which the next refusal of these zones is the first one in a row."""
        return replace(self, refusals=tuple(one for one in self.refusals if one[0] not in zones))

    def wake_at_s(self, now_s: float) -> float | None:
        """Returns when the policy has to decide next, if nothing changes before; None: never."""
        times_s = (self.review_at_s, *(at_s for _, at_s in self.retry_at_s))
        return min((at_s for at_s in times_s if at_s > now_s), default=None)

    def moved(self, by_s: float) -> "PolicyState":
        """Returns the state with all times moved by `by_s` seconds, after the clock was set."""
        waits = tuple((zone, at_s + by_s) for zone, at_s in self.retry_at_s)
        return replace(
            self, retry_at_s=waits, knowledge=self.knowledge.moved(by_s), review_at_s=self.review_at_s + by_s
        )


@dataclass(frozen=True)
class Zone:
    """An enabled zone: it has the machine type of the service, and the service may use the zone.

    If a service accepts several machine types, each pair of a zone and a type is a `Zone` with a name of its own, such
    as `us-east-1a/v100`, because each pair has its own spot capacity.
    """

    name: str
    region: str
    usd_per_h: float = 1.0
    """The price of a spot replica."""
    accelerator: str = ""
    """The machine type; empty if the service accepts only one."""


class ReplicaState(StrEnum):
    """The state of a replica that has been launched and has not ended."""

    REQUESTED = "requested"
    """From the launch until the provider's answer, which may be a refusal. The replica is not billed."""
    PROVISIONING = "provisioning"
    """From the grant until the end of the cold start. The replica is billed, and serves no requests."""
    READY = "ready"
    """The replica serves requests."""


@dataclass(frozen=True)
class SpotReplica:
    """A replica that has been launched and has not ended."""

    number: int
    """Numbers are assigned in the order of launches, so the highest number is the newest replica."""
    kind: CapacityKind
    """Spot or on-demand."""
    zone: str | None
    """The zone; None for on-demand replicas, for which any zone will do."""
    state: ReplicaState
    ongoing: int = 0
    """The number of its requests in progress."""
    requests_per_s: float = 0.0
    """Q_tar of the replica, if it depends on its machines; otherwise 0."""

    @property
    def is_spot(self) -> bool:
        """Whether the provider may reclaim the replica."""
        return self.kind is CapacityKind.SPOT

    @property
    def is_granted(self) -> bool:
        """Whether the provider has granted the launch."""
        return self.state is not ReplicaState.REQUESTED

    @property
    def is_ready(self) -> bool:
        """Whether the replica serves requests."""
        return self.state is ReplicaState.READY


class ZoneEventKind(StrEnum):
    """An event of a spot replica, or of the request for one."""

    PREEMPTED = "preempted"
    """The provider reclaimed a replica, whether it was ready or not."""
    REFUSED = "refused"
    """The zone had no capacity for a launch."""
    READY = "ready"
    """The cold start of a replica has ended."""


@dataclass(frozen=True)
class ZoneEvent:
    """An event of a zone."""

    kind: ZoneEventKind
    zone: str


@dataclass(frozen=True)
class Observation:
    """The input of a policy. Events are those since the observation before, in the order in which they happened."""

    now_s: float
    """Seconds since any fixed time, the same for all observations of a service."""
    target: int
    """N_tar, the number of replicas that should be ready: 0 or more."""
    replicas: tuple[SpotReplica, ...]
    """All replicas that have been launched and have not ended, by number."""
    events: tuple[ZoneEvent, ...] = ()


@dataclass(frozen=True)
class Launch:
    """The action to launch a replica; `zone` is None for on-demand replicas."""

    kind: CapacityKind
    zone: str | None = None


@dataclass(frozen=True)
class Terminate:
    """The action to end a replica."""

    number: int


Action = Launch | Terminate


class SpotPolicy(Protocol):
    """A policy. Its methods are pure: equal arguments give equal results."""

    def start(self) -> PolicyState:
        """Returns the state before the first observation."""
        ...

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        """Returns the next state and the actions. The next observation must include their effects.

        A launch is in the next observation: as requested, as granted or, if it was refused, as an event. Answers may
        come late and in any order. The caller stores the state in the transaction that records the actions. If the
        caller decides again at the same time, with the refusals as events, the policy tries other zones; it returns no
        action once all were refused.
        """
        ...
