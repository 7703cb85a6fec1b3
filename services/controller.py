"""One decision about the replicas of a service: from facts to launches, drains and ends.

The policies of replays (`services.spot.policies`) also decide where the replicas of a live service run. A policy does
not see replicas that are leaving or draining. During an update, it sees a predecessor and its successor as one replica:
as the predecessor until the successor is ready, and then as the successor. An update is given up if its replicas only
fail, or find no machines. A newer update supersedes one that is in progress. While a version is judged by its canary,
only `services.canary` sees its replicas.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from domain.capacity import CapacityKind
from services.canary import step_canary
from services.losses import CANNOT_COUNT, after_losses, zone_events
from services.spot.values import Launch, Observation, ReplicaState, SpotReplica, ZoneEvent
from services.values import (
    NO_ANSWERS,
    REPLICA_EJECTED,
    CanaryAnswers,
    DrainReplica,
    EndCause,
    EndReplica,
    LaunchReplica,
    Loss,
    ReleaseReplica,
    ReplicaAction,
    ReplicaFacts,
    ServiceDecision,
    ServicePlan,
    ServiceState,
    SetReplicaBase,
    Stage,
)


def successions(
    newest: int, replicas: Sequence[ReplicaFacts], pairs: Mapping[int, ReplicaFacts], surge: int
) -> list[ReplicaFacts]:
    """Returns the replicas of older versions whose successors are launched now.

    Args:
        newest: the version of the update.
        replicas: the replicas of the service, except those in the stages leaving and draining.
        pairs: the existing successors, by their predecessor's number.
        surge: the largest number of successors that may exist beside their predecessors.

    Returns:
        First the replicas whose probe fails. Within each group, the oldest comes first.
    """
    old = [one for one in replicas if one.version != newest and one.number not in pairs]
    old.sort(key=lambda one: (one.stage is Stage.READY, one.number))
    return old[: max(0, surge - len(pairs))]


def decide(
    plan: ServicePlan,
    state: ServiceState,
    replicas: Sequence[ReplicaFacts],
    losses: Sequence[Loss],
    requests: int | None,
    now_s: float,
    waiting: int = 0,
    ongoing: int = 0,
    *,
    answers: CanaryAnswers = NO_ANSWERS,
) -> ServiceDecision:
    """Returns the actions for the replicas of a service.

    Args:
        plan: the desired state of the service.
        state: the state that the decision before returned.
        replicas: the replicas that have been launched and have not ended, by number.
        losses: the replicas that have ended since the decision before without a request to end them.
        requests: the number of requests that arrived since the decision before; None: unknown, because no balancer
            reports. Then the target only obeys its limits.
        waiting: the number of requests that wait in balancers because no replica is ready.
        ongoing: the number of requests in progress.
        answers: the answers since the canary of the newest version began.
        now_s: seconds since the epoch, not before those of the decision before.
    """
    if plan.stopping:
        return ServiceDecision(state, 0, tuple(EndReplica(one.number, EndCause.SERVICE_ENDED) for one in replicas))
    begun = state.begun(
        plan.version, now_s, has_canary=plan.canary is not None, policy_speed=plan.policy_speed
    )  # fmt: skip
    state = _scaled(plan, after_losses(plan, begun, losses, now_s), replicas, requests, waiting, ongoing)
    canary = step_canary(plan, state, replicas, losses, answers, now_s)
    plan, state, replicas = canary.plan, canary.state, canary.rest
    for one in replicas:
        if one.stage is Stage.READY and (not one.was_ready or one.version > state.good_version):
            state = state.ready_again(one.version)
    waiting_s = [one.since_s for one in replicas if one.is_queued and one.version == plan.version]
    due_s = min(waiting_s, default=math.inf) + plan.queued_s
    if 0 < state.good_version < plan.version and due_s <= now_s:
        state = replace(state, failed_version=plan.version)
    there = {one.number: one for one in replicas}
    step = _Step(plan, state, there, now_s, wakes_s=canary.wakes_s, notes=canary.notes)
    if now_s < due_s < math.inf:
        step.wakes_s.append(due_s)
    step.end_overdue(Stage.UNREADY, plan.unready_s, EndCause.NOT_ANSWERING)
    step.end_overdue(Stage.DRAINING, plan.drain_s, EndCause.SUPERSEDED)
    step.end_idle()
    if any(one.is_ejected for one in replicas):
        step.notes.append(REPLICA_EJECTED)
    step.end_superseded()
    step.succeed()
    step.make_room()
    step.follow_policy(zone_events(replicas, losses))
    step.retire_strays()
    step.set_levels()
    step.begin_successions()
    decision = step.result()
    return replace(decision, actions=(*canary.actions, *decision.actions))


def _scaled(
    plan: ServicePlan,
    state: ServiceState,
    replicas: Sequence[ReplicaFacts],
    requests: int | None,
    waiting: int,
    ongoing: int,
) -> ServiceState:
    """Returns the state with the target that follows the load, as far as it is known."""
    scaler = plan.autoscaler
    loads = [one.load for one in replicas if one.load is not None and one.stage not in CANNOT_COUNT]
    follows_load = scaler.load is not None and bool(loads)
    if requests is None and not waiting and not ongoing and not follows_load:
        return replace(state, scaling=scaler.limited(state.scaling))
    assert state.decided_at_s is not None
    numbers = {one.number for one in replicas}
    rates = sorted(  # In the order of `services.spot.spothedge.surplus`.
        (one.stage is not Stage.READY, -one.requests_per_s)
        for one in replicas
        # A predecessor and its successor count as one replica.
        if one.requests_per_s is not None and one.stage not in CANNOT_COUNT and one.replaces not in numbers
    )
    scaling = scaler.decide(
        state.scaling, state.decided_at_s, requests or 0, waiting, ongoing, [-rate for _, rate in rates],
        load=sum(loads),
    )  # fmt: skip
    return replace(state, scaling=scaling)


@dataclass
class _Step:
    plan: ServicePlan
    state: ServiceState
    replicas: dict[int, ReplicaFacts]
    """The replicas that are not ended by this decision."""
    now_s: float
    actions: list[ReplicaAction] = field(default_factory=list)
    wakes_s: list[float] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    """The replicas of older versions that the policy would end, but that are still needed."""
    notes: list[str] = field(default_factory=list)

    def end_overdue(self, stage: Stage, limit_s: float, cause: EndCause) -> None:
        """Ends replicas that have been in a stage for `limit_s` seconds."""
        for one in list(self.replicas.values()):
            if one.stage is stage:
                due_s = one.since_s + limit_s
                if due_s <= self.now_s and one.is_ejected:
                    self._retire(one, EndCause.FAILING)  # Some of its requests may be in progress.
                elif due_s <= self.now_s:
                    self._end(one, cause)
                else:
                    self.wakes_s.append(due_s)

    def end_idle(self) -> None:
        """Ends draining replicas that have no requests in progress, and the drains of those that leave."""
        for one in list(self.replicas.values()):
            if one.stage is Stage.DRAINING and one.ongoing == 0:
                self._end(one, EndCause.SUPERSEDED)
            elif one.stage is Stage.LEAVING and one.was_leaving and one.ongoing == 0:
                self.actions.append(ReleaseReplica(one.number))

    def set_levels(self) -> None:
        """Gives `min_replicas` of the replicas the service's own priority level, after this number has changed.

        Those that have the level keep it first, then ready ones get it, then the oldest. What is launched now counts.
        """
        launched = sum(isinstance(one, LaunchReplica) and one.is_base for one in self.actions)
        order = sorted(
            (one for one in self._visible() if one.number not in self.kept),
            key=lambda one: (not one.is_base, one.stage is not Stage.READY, one.number),
        )
        for at, one in enumerate(order):
            is_base = at < self.plan.min_replicas - launched
            if one.is_base != is_base:
                self.replicas[one.number] = replace(one, is_base=is_base)
                self.actions.append(SetReplicaBase(one.number, is_base))

    def end_superseded(self) -> None:
        """Ends replicas that do not serve and whose version is no longer launched: given up, or superseded."""
        for one in self._countable():
            if self.state.has_given_up and one.version == self.state.failed_version and one.stage is not Stage.READY:
                self._end(one, EndCause.UPDATE_GIVEN_UP)
            elif one.version != self.state.launching and one.stage is Stage.STARTING:
                self._end(one, EndCause.SUPERSEDED)

    def succeed(self) -> None:
        """Retires replicas of older versions whose successor is ready; in a blue-green update, all of them together.

        A blue-green update switches once the target number of replicas of the newest version are ready.
        """
        if self.plan.blue_green:
            if not self._is_given_up() and self._ready(newest=True) >= self.state.scaling.target:
                for one in self._old():
                    self._retire(one, EndCause.SUPERSEDED)
            return
        for number, successor in self._pairs().items():
            if successor.stage is Stage.READY:
                self._retire(self.replicas[number], EndCause.SUPERSEDED)

    def follow_policy(self, events: tuple[ZoneEvent, ...]) -> None:
        """Lets the policy decide, and applies its actions.

        A ready replica of an older version that the policy would end is kept while it is needed: its zone or its kind
        may not be what the newest version asks for, but it serves until others are ready.
        """
        seen = tuple(_seen(one) for one in self._visible())
        speed = self.plan.policy_speed
        observation = Observation(self.now_s * speed, self.state.scaling.target, seen, events)
        after, actions = self.plan.policy.decide(self.state.policy, observation)
        self.state = replace(self.state, policy=after)
        wake_s = after.wake_at_s(observation.now_s)
        self.wakes_s += [] if wake_s is None else [wake_s / speed]
        pairs = self._pairs()
        for action in actions:
            if isinstance(action, Launch):
                continue
            one, successor = self.replicas[action.number], pairs.get(action.number)
            if successor is not None:
                self._retire(successor, EndCause.SCALED_DOWN)
            if self._is_needed(one):
                self.kept.add(one.number)
            else:
                self._retire(one, EndCause.SCALED_DOWN)
        launches = [action for action in actions if isinstance(action, Launch)]
        for launch in self._within_surge(launches):
            self._launch(launch.kind, launch.zone)

    def retire_strays(self) -> None:
        """Retires spot replicas in zones that the service may no longer use, as soon as they are not needed."""
        for one in sorted(self._strays(), key=lambda one: (one.stage is Stage.READY, one.number)):
            if not self._is_needed(one):
                self._retire(one, EndCause.SUPERSEDED)

    def begin_successions(self) -> None:
        """Launches successors of replicas of older versions, as many as the update may add now."""
        if self._is_given_up() or self._is_paused():
            return
        strays = {one.number for one in self._strays()}
        candidates = [one for one in self._countable() if one.number not in strays | self.kept]
        for one in successions(self.plan.version, candidates, self._pairs(), self._surge()):
            as_before = one.number not in self.state.refused_for
            kind, zone = (one.kind, one.zone) if as_before else (CapacityKind.ON_DEMAND, None)
            if kind is CapacityKind.SPOT or self.now_s >= self.state.on_demand_at_s:
                self.actions.append(LaunchReplica(self.plan.version, kind, zone, one.is_base, one.number))

    def make_room(self) -> None:
        """Retires ready replicas of older versions, down to `max_unavailable` below the target.

        The policy then launches replicas of the newest version, which may need the room of the older ones.
        """
        if self.plan.blue_green or self._is_given_up() or self._is_paused():
            return
        ready = self._ready(newest=True) + self._ready(newest=False)
        spare = ready - max(0, self.state.scaling.target - self.plan.max_unavailable)
        old = [one for one in self._old() if one.stage is Stage.READY]
        for one in sorted(old, key=lambda one: one.number)[: max(0, spare)] if self.plan.max_unavailable else []:
            self._retire(one, EndCause.SUPERSEDED)

    def result(self) -> ServiceDecision:
        """Returns the decision."""
        there = set(self.replicas)
        self.state = replace(self.state, refused_for=tuple(n for n in self.state.refused_for if n in there))
        if self._is_given_up():
            self.notes.append("update_given_up")
        wake_s = min(self.wakes_s, default=None)
        notes = tuple(dict.fromkeys(self.notes))
        return ServiceDecision(self.state, self.state.scaling.target, tuple(self.actions), wake_s, notes)

    # --------------------------------------------------------------------------------------------------------- helpers

    def _countable(self) -> list[ReplicaFacts]:
        return [one for one in self.replicas.values() if one.stage not in CANNOT_COUNT]

    def _old(self) -> list[ReplicaFacts]:
        return [one for one in self._countable() if one.version != self.plan.version]

    def _strays(self) -> list[ReplicaFacts]:
        """Returns the spot replicas in zones that the service may no longer use. The policy does not see them."""
        return [one for one in self._countable() if self._is_stray(one)]

    def _is_stray(self, one: ReplicaFacts) -> bool:
        zones = self.plan.zones
        return one.kind is CapacityKind.SPOT and zones is not None and one.zone not in zones

    def _pairs(self) -> dict[int, ReplicaFacts]:
        """Returns the successors of replicas that have not ended, by the predecessor's number."""
        strays = {one.number for one in self._strays()}
        here = {one.number for one in self._countable()} - strays
        return {
            one.replaces: one for one in self._countable() if one.replaces in here and one.number not in strays
        }  # fmt: skip

    def _visible(self) -> list[ReplicaFacts]:
        """Returns the replicas that the policy sees: of a pair, the predecessor until its successor is ready."""
        hidden = {one.number if one.stage is not Stage.READY else number for number, one in self._pairs().items()}
        hidden |= {one.number for one in self._strays()}
        return [one for one in self._countable() if one.number not in hidden]

    def _is_given_up(self) -> bool:
        return self.state.has_given_up and self.state.failed_version == self.plan.version

    def _ready(self, *, newest: bool) -> int:
        """Returns the number of ready replicas of the newest version, or of older versions."""
        return sum(o.stage is Stage.READY and (o.version == self.plan.version) == newest for o in self._countable())

    def _is_needed(self, one: ReplicaFacts) -> bool:
        """Returns whether the end of a replica of an older version would leave too few that serve requests.

        Before the switch of a blue-green update, only replicas of older versions serve.
        """
        if one.stage is not Stage.READY or (one.version == self.plan.version and not self._is_stray(one)):
            return False
        others = 0 if self.plan.blue_green else self._ready(newest=True)
        return self._ready(newest=False) + others <= self.state.scaling.target

    def _surge(self) -> int:
        """Returns the largest number of replicas that an update may add to those that serve."""
        return self.state.scaling.target if self.plan.blue_green else self.plan.max_surge

    def _within_surge(self, launches: list[Launch]) -> list[Launch]:
        """Returns the launches that are carried out now.

        The policy asks at once for replacements of all replicas that still serve although it does not want them or does
        not see them. This limits how many replacements exist beside them. Spot replicas come first, because on-demand
        replicas are only their substitutes.
        """
        strays = self._strays()
        if not strays and not self.kept:
            return launches
        if self.plan.blue_green:
            room = self._surge() - (len(self._countable()) - len(self._old()))
        else:
            missing = max(0, self.state.scaling.target - self._ready(newest=False) - self._ready(newest=True))
            room = self._surge() + missing - sum(one.stage is Stage.STARTING for one in self._visible())
        return sorted(launches, key=lambda one: one.kind is not CapacityKind.SPOT)[: max(0, room)]

    def _launch(self, kind: CapacityKind, zone: str | None) -> None:
        if self._is_paused():
            return
        if kind is not CapacityKind.SPOT and self.now_s < self.state.on_demand_at_s:
            self.wakes_s.append(self.state.on_demand_at_s)
            self.notes.append("on_demand_refused")
            return
        base = sum(one.is_base for one in self._visible() if one.number not in self.kept)
        base += sum(isinstance(one, LaunchReplica) and one.is_base for one in self.actions)
        version = self.state.version_to_launch(self.plan.version)
        self.actions.append(LaunchReplica(version, kind, zone, base < self.plan.min_replicas))

    def _is_paused(self) -> bool:
        if self.now_s >= self.state.retry_at_s:
            return False
        self.wakes_s.append(self.state.retry_at_s)
        self.notes.append("replicas_fail" if self.state.failures else "installation_stopped")
        return True

    def _retire(self, one: ReplicaFacts, cause: EndCause) -> None:
        """Drains a replica that may have requests in progress, and ends one that has none."""
        if one.stage is Stage.STARTING:
            self._end(one, cause)
            return
        self.actions.append(DrainReplica(one.number, cause))
        # Requests may be on their way until all balancers have the new list.
        self.replicas[one.number] = replace(one, stage=Stage.DRAINING, since_s=self.now_s, ongoing=None)
        self.wakes_s.append(self.now_s + self.plan.drain_s)

    def _end(self, one: ReplicaFacts, cause: EndCause) -> None:
        self.actions.append(EndReplica(one.number, cause))
        del self.replicas[one.number]


def _seen(one: ReplicaFacts) -> SpotReplica:
    state = ReplicaState.PROVISIONING if one.is_granted else ReplicaState.REQUESTED
    state = ReplicaState.READY if one.stage is Stage.READY else state
    zone = one.zone if one.kind is CapacityKind.SPOT else None
    return SpotReplica(one.number, one.kind, zone, state, one.ongoing or 0, one.requests_per_s or 0.0)
