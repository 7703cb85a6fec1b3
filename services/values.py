"""Inputs and outputs of the decisions about a service's replicas: facts, losses, state and actions.

Times are seconds since the epoch.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum

from pydantic import TypeAdapter

from domain.capacity import CapacityKind
from services.spot.autoscaler import LoadAutoscaler, ScalingState
from services.spot.values import PolicyState, SpotPolicy

REPLICA_EJECTED = "replica_ejected"
"""The note that balancers send a replica no requests because it fails."""


class Stage(StrEnum):
    """The stage of a replica that has been launched and has not ended."""

    STARTING = "starting"
    """Its machine, its tasks or its probe are not ready yet."""
    READY = "ready"
    UNREADY = "unready"
    """It was ready, and its probe fails; or balancers have ejected it, because its requests fail."""
    LEAVING = "leaving"
    """It is about to end: its platform reclaims the machine, or another workload evicts it."""
    DRAINING = "draining"
    """It gets no new requests, and is ended when those in progress have had their time."""


@dataclass(frozen=True)
class ReplicaFacts:
    """A replica that has been launched and has not ended."""

    number: int
    """Numbers are assigned in the order of launches."""
    version: int
    kind: CapacityKind
    """Spot or on-demand; other kinds of shared machines count as on-demand."""
    zone: str | None
    """The name of its zone for the policy; None for a replica that any zone will do for."""
    stage: Stage
    since_s: float
    """Since when it has been in this stage."""
    was_ready: bool = False
    """Whether it has ever been ready, according to the decision before."""
    was_leaving: bool = False
    """Whether it was leaving, according to the decision before."""
    is_base: bool = True
    """Whether it runs at the service's own priority level, not at the lower one."""
    replaces: int | None = None
    """The replica of an older version that it succeeds during an update."""
    is_queued: bool = False
    """Whether it waits for machines of the installation."""
    is_ejected: bool = False
    """Whether its probe succeeds, but its balancers have ejected it."""
    is_granted: bool = True
    """Whether its provider has launched its machines; False: a launch is not answered yet."""
    load: float | None = None
    """The load that it reports; None: it reports none."""
    ongoing: int | None = None
    """The number of its requests in progress; None: unknown. While it drains, 0 means that none can arrive any more."""
    requests_per_s: float | None = None
    """The requests for each second that it should get; None: they do not depend on its machines, or these are
    unknown."""


class LossKind(StrEnum):
    """Why a replica has ended without a request to end it."""

    PREEMPTED = "preempted"
    """Its machine was reclaimed or lost."""
    REFUSED = "refused"
    """Its machine could not be launched: no capacity, or no agent registered in time."""
    EVICTED = "evicted"
    """A workload of higher priority took its machine, or an operator preempted it."""
    STOPPED = "stopped"
    """The installation was stopped."""
    NOT_STARTED = "not_started"
    """A machine refused to start it for a reason that is not its own, such as a full disk or a changed launch
    description."""
    FAILED = "failed"
    """Its own setup, command or probe failed."""


@dataclass(frozen=True)
class Loss:
    """A replica that has ended without a request to end it. Each loss is part of exactly one decision."""

    replica: ReplicaFacts
    kind: LossKind


@dataclass(frozen=True)
class CanaryRules:
    """How a version that begins as a canary is judged."""

    share: float
    """Its share of the requests, and of the number of replicas, which is rounded up."""
    for_s: float
    error_rate: float | None
    """The largest share of failed answers; None: no limit. The same holds for the next field."""
    p90_s: float | None
    """The longest 90th percentile of the total time of the answers."""
    zones: frozenset[str] = frozenset()
    """The names of the zones in which the version may have spot replicas."""


@dataclass(frozen=True)
class CanaryAnswers:
    """The answers since a canary began, of its replicas and of the others."""

    answered: int = 0
    """Complete answers with a status below 500."""
    failed: int = 0
    """Requests without such an answer. Each repetition of a request is one more."""
    slow: int = 0
    """The answers that took longer than the limit."""
    others_answered: int = 0
    others_failed: int = 0

    @property
    def total(self) -> int:
        """The number of requests that its replicas answered or failed."""
        return self.answered + self.failed

    @property
    def others_total(self) -> int:
        """The number of requests that the other replicas answered or failed."""
        return self.others_answered + self.others_failed


NO_ANSWERS = CanaryAnswers()


class CanaryVerdict(StrEnum):
    """How a canary has ended."""

    PASSED = "passed"
    FAILED = "failed"


@dataclass(frozen=True)
class CanaryState:
    """The canary of the newest version, or of the last one that had a canary."""

    version: int
    since_s: float | None = None
    """Since when its replicas have got requests; None: not all of them have been ready."""
    failures: int = 0
    """The number of its replicas that failed by themselves."""
    retry_at_s: float = 0.0
    """None of its replicas is launched before this time."""
    verdict: CanaryVerdict | None = None
    """None: it is under way."""
    why: str = ""
    """The reason for the verdict, as a sentence."""

    def moved(self, by_s: float) -> "CanaryState":
        """Returns the canary with all times moved."""
        since_s = None if self.since_s is None else self.since_s + by_s
        return replace(self, since_s=since_s, retry_at_s=self.retry_at_s + by_s)


@dataclass(frozen=True)
class ServicePlan:
    """The desired state of a service now."""

    policy: SpotPolicy
    autoscaler: LoadAutoscaler
    version: int
    """The newest version."""
    zones: frozenset[str] | None = None
    """The names of the zones in which the service may have spot replicas; None: in any."""
    min_replicas: int = 1
    """The number of replicas at the service's own priority level; further ones run at a lower level."""
    blue_green: bool = False
    max_surge: int = 1
    max_unavailable: int = 0
    """The most replicas below the target that a rolling update leaves ready."""
    queued_s: float = 1800.0
    """An update is given up if none of its replicas has been ready and one has waited for machines this long."""
    drain_s: float = 30.0
    unready_s: float = 180.0
    """A replica that was ready is ended after its probe has failed, or balancers have ejected it, for this long."""
    failed_pause_s: float = 5.0
    """The pause after the first failed replica; it doubles with each failure in a row."""
    refused_pause_s: float = 60.0
    """After a refused on-demand launch, the time until the next one is requested."""
    canary: CanaryRules | None = None
    """How the newest version is judged before it replaces the version that works; None: it is not."""
    policy_speed: float = 1.0
    """The seconds that pass for the policy in one second. Times in the state of the policy are its own seconds."""
    stopping: bool = False
    """The service is to end, with all its replicas."""


@dataclass(frozen=True)
class ServiceState:
    """The state that is kept between decisions. It is stored in the transaction that records the actions."""

    policy: PolicyState
    scaling: ScalingState
    decided_at_s: float | None = None
    """The time of the decision before; None: there was none."""
    launching: int = 0
    """The version that was launched when the decision before was taken; `failures` are those of this version."""
    failures: int = 0
    """Number of replicas of the version that is launched that failed by themselves since one of them became ready."""
    retry_at_s: float = 0.0
    """No replica is launched before this time, because replicas have failed or were not started, or the installation
    is being stopped."""
    unstarted: int = 0
    """Number of replicas in a row that were not started, for reasons that are not their own."""
    on_demand_at_s: float = 0.0
    """No on-demand replica is launched before this time, because a launch was refused."""
    good_version: int = 0
    """The newest version of which a replica has been ready; 0: none."""
    failed_version: int = 0
    """The newest version whose update was given up because its replicas failed; 0: none."""
    refused_for: tuple[int, ...] = ()
    """Replicas whose successor was refused in their zone: the next successor is an on-demand replica."""
    canary: CanaryState | None = None
    """None: the newest version has none, or it has not begun."""

    @property
    def has_given_up(self) -> bool:
        """Whether the update to the newest version was given up, so that the last good version is launched."""
        return self.failed_version > self.good_version > 0

    def is_on_trial(self, newest: int, *, has_canary: bool) -> bool:
        """Returns whether the newest version has a canary that has not passed, and an older version works."""
        canary = self.canary
        passed = canary is not None and canary.version == newest and canary.verdict is CanaryVerdict.PASSED
        return has_canary and not passed and 0 < self.good_version < newest

    def version_to_launch(self, newest: int, *, has_canary: bool = False) -> int:
        """Returns the version of further replicas.

        It is the newest, or the last good one if the update to the newest was given up, or is judged by its canary.
        """
        given_up = self.failed_version == newest and self.has_given_up
        return self.good_version if given_up or self.is_on_trial(newest, has_canary=has_canary) else newest

    def begun(
        self, newest: int, now_s: float, *, has_canary: bool = False, policy_speed: float = 1.0
    ) -> "ServiceState":
        """Returns the state at the beginning of a decision.

        Failures of another version than the one that is launched now are forgotten. If the clock was set back, all
        times are moved by as much, because otherwise pauses would last until it has caught up.
        """
        state = self
        if state.decided_at_s is not None and now_s < state.decided_at_s:
            by_s = now_s - state.decided_at_s
            state = replace(
                state,
                policy=state.policy.moved(by_s * policy_speed),
                scaling=state.scaling.moved(by_s),
                retry_at_s=state.retry_at_s + by_s,
                on_demand_at_s=state.on_demand_at_s + by_s,
                canary=None if state.canary is None else state.canary.moved(by_s),
            )
        launching = state.version_to_launch(newest, has_canary=has_canary)
        if launching != state.launching:
            state = replace(state, launching=launching, failures=0, retry_at_s=0.0)
        return replace(state, decided_at_s=now_s)

    def ready_again(self, version: int) -> "ServiceState":
        """Returns the state after a replica of `version` became ready."""
        state = replace(self, good_version=max(self.good_version, version))
        return replace(state, failures=0, unstarted=0, retry_at_s=0.0) if version == self.launching else state


SERVICE_STATE = TypeAdapter(ServiceState)
"""Writes the state as values of JSON, and reads them. A body may lack fields with a default."""


@dataclass(frozen=True)
class LaunchReplica:
    """The action to launch a replica."""

    version: int
    kind: CapacityKind
    zone: str | None
    is_base: bool
    replaces: int | None = None


class EndCause(StrEnum):
    """Why a replica is ended by the service."""

    SCALED_DOWN = "scaled_down"
    """The policy no longer needs it."""
    SUPERSEDED = "superseded"
    """A replica of a newer version has taken its place."""
    UPDATE_GIVEN_UP = "update_given_up"
    """It belongs to a version whose update was given up."""
    NOT_ANSWERING = "not_answering"
    """Its probe has failed for too long."""
    FAILING = "failing"
    """Its balancers have ejected it for too long."""
    SERVICE_ENDED = "service_ended"


@dataclass(frozen=True)
class DrainReplica:
    """The action to send no new requests to a replica, and to end it later."""

    number: int
    cause: EndCause


@dataclass(frozen=True)
class EndReplica:
    """The action to end a replica now."""

    number: int
    cause: EndCause


@dataclass(frozen=True)
class ReleaseReplica:
    """The action to end the drain of a replica that leaves: it has no requests in progress, and gets none."""

    number: int


@dataclass(frozen=True)
class SetReplicaBase:
    """The action to run a replica at the service's own priority level (`is_base`), or at the lower one."""

    number: int
    is_base: bool


ReplicaAction = LaunchReplica | DrainReplica | EndReplica | ReleaseReplica | SetReplicaBase


@dataclass(frozen=True)
class ServiceDecision:
    """The result of one decision."""

    state: ServiceState
    target: int
    """N_tar, the number of replicas that should be ready."""
    actions: tuple[ReplicaAction, ...] = ()
    wake_at_s: float | None = None
    """When the next decision is due even if nothing else happens; None: at the usual interval."""
    notes: tuple[str, ...] = field(default=())
    """What the service's status should say: why no replica is launched, or that an update was given up."""
