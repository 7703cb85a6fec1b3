"""One decision about the replicas of a service: from facts to launches, drains and ends.

The policies of replays (`spot.policies`) also decide where the replicas of a live service run. A policy does not see
replicas that are leaving or draining. During an update, it sees a predecessor and its successor as one replica: as the
predecessor until the successor is ready, and then as the successor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from domain.capacity import CapacityKind
from services.updates import is_halted, successions, version_to_launch
from services.values import (
    DrainReplica,
    EndCause,
    EndReplica,
    LaunchReplica,
    Loss,
    LossKind,
    ReplicaAction,
    ReplicaFacts,
    ServiceDecision,
    ServicePlan,
    ServiceState,
    Stage,
)
from spot.values import Event, EventKind, Launch, Observation, Replica, ReplicaState

_LONGEST_PAUSE_S = 300.0
"""The longest backoff after failed replicas. It doubles with each failure in a row."""
_STOPPED_PAUSE_S = 30.0
"""The pause after a replica was stopped with the installation: what would be launched meanwhile is stopped, too."""
_CANNOT_COUNT = frozenset({Stage.LEAVING, Stage.DRAINING})


def decide(
    plan: ServicePlan,
    state: ServiceState,
    replicas: Sequence[ReplicaFacts],
    losses: Sequence[Loss],
    requests: int | None,
    now_s: float,
) -> ServiceDecision:
    """Returns the actions for the replicas of a service.

    Args:
        plan: what the service should be.
        state: the state that the decision before returned.
        replicas: the replicas that have been launched and have not ended, by number.
        losses: the replicas that have ended since the decision before without a request to end them.
        requests: the number of requests that arrived since the decision before; None: unknown, because no balancer
            reports. Then the target only obeys its limits.
        now_s: seconds since the epoch, not before those of the decision before.
    """
    if plan.stopping:
        return ServiceDecision(state, 0, tuple(EndReplica(one.number, EndCause.SERVICE_ENDED) for one in replicas))
    state = _after_losses(plan, state, losses, now_s)
    for one in replicas:
        if one.stage is Stage.READY and not one.was_ready:
            state = state.ready_again(one.version)
    scaler = plan.autoscaler
    if requests is None:
        state = replace(state, scaling=scaler.limited(state.scaling))
    else:
        state = replace(state, scaling=scaler.decide(state.scaling, now_s, requests))
    step = _Step(plan, state, {one.number: one for one in replicas}, now_s)
    step.end_unready()
    step.end_drained()
    step.succeed()
    step.follow_policy(_events(replicas, losses))
    step.begin_successions()
    return step.result()


def _after_losses(plan: ServicePlan, state: ServiceState, losses: Sequence[Loss], now_s: float) -> ServiceState:
    for loss in losses:
        one = loss.replica
        if loss.kind is LossKind.FAILED and one.stage not in _CANNOT_COUNT:
            failures = state.failures + 1
            pause_s = min(_LONGEST_PAUSE_S, plan.failed_pause_s * 2.0 ** min(failures - 1, 10))
            state = replace(state, failures=failures, retry_at_s=now_s + pause_s)
            if is_halted(plan.version, one.version, failures, state.good_version):
                state = replace(state, failed_version=plan.version)
        elif loss.kind is LossKind.STOPPED:
            state = replace(state, retry_at_s=max(state.retry_at_s, now_s + _STOPPED_PAUSE_S))
        elif loss.kind is LossKind.REFUSED:
            if one.kind is not CapacityKind.SPOT:
                state = replace(state, on_demand_at_s=now_s + plan.refused_pause_s)
            if one.replaces is not None:
                state = replace(state, refused_for=tuple(sorted({*state.refused_for, one.replaces})))
    return state


def _events(replicas: Sequence[ReplicaFacts], losses: Sequence[Loss]) -> tuple[Event, ...]:
    """Returns the events for the policy. A replica counts as preempted when it begins to leave, not when it ends."""
    events: list[Event] = []
    kinds = {LossKind.PREEMPTED: EventKind.PREEMPTED, LossKind.REFUSED: EventKind.REFUSED}
    for loss in losses:
        one = loss.replica
        told = one.was_leaving or one.stage is Stage.DRAINING
        if one.zone is not None and one.kind is CapacityKind.SPOT and loss.kind in kinds and not told:
            events.append(Event(kinds[loss.kind], one.zone))
    for one in replicas:
        if one.zone is None or one.kind is not CapacityKind.SPOT:
            continue
        if one.stage is Stage.LEAVING and not one.was_leaving:
            events.append(Event(EventKind.PREEMPTED, one.zone))
        elif one.stage is Stage.READY and not one.was_ready:
            events.append(Event(EventKind.READY, one.zone))
    return tuple(events)


@dataclass
class _Step:
    plan: ServicePlan
    state: ServiceState
    replicas: dict[int, ReplicaFacts]
    """The replicas that are not ended by this decision."""
    now_s: float
    actions: list[ReplicaAction] = field(default_factory=list)
    wakes_s: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def end_unready(self) -> None:
        """Ends replicas whose probe has failed for too long."""
        for one in list(self.replicas.values()):
            if one.stage is Stage.UNREADY:
                due_s = one.since_s + self.plan.unready_s
                if due_s <= self.now_s:
                    self._end(one, EndCause.NOT_ANSWERING)
                else:
                    self.wakes_s.append(due_s)

    def end_drained(self) -> None:
        """Ends replicas that have had the time of the drain."""
        for one in list(self.replicas.values()):
            if one.stage is Stage.DRAINING:
                due_s = one.since_s + self.plan.drain_s
                if due_s <= self.now_s:
                    self._end(one, EndCause.SUPERSEDED)
                else:
                    self.wakes_s.append(due_s)

    def succeed(self) -> None:
        """Drains predecessors whose successor is ready; in a blue-green update, once all successors are ready."""
        pairs = self._pairs()
        old = [one for one in self._countable() if one.version != self.plan.version and one.replaces is None]
        waiting = [one for one in old if one.number not in pairs or pairs[one.number].stage is not Stage.READY]
        for number, successor in pairs.items():
            if successor.stage is Stage.READY and not (self.plan.blue_green and waiting):
                self._drain(self.replicas[number], EndCause.SUPERSEDED)

    def follow_policy(self, events: tuple[Event, ...]) -> None:
        """Lets the policy decide, and applies its actions."""
        target = self.state.scaling.target
        seen = tuple(_seen(one) for one in self._visible())
        after, actions = self.plan.policy.decide(self.state.policy, Observation(self.now_s, target, seen, events))
        self.state = replace(self.state, policy=after)
        pairs = self._pairs()
        for action in actions:
            if isinstance(action, Launch):
                self._launch(action.kind, action.zone)
                continue
            for one in (self.replicas[action.number], pairs.get(action.number)):
                if one is not None and one.stage in (Stage.READY, Stage.UNREADY):
                    self._drain(one, EndCause.SCALED_DOWN)
                elif one is not None:
                    self._end(one, EndCause.SCALED_DOWN)

    def begin_successions(self) -> None:
        """Launches successors of replicas of older versions, as many as the update may add now."""
        if self.state.failed_version == self.plan.version or self._is_paused():
            return
        pairs = self._pairs()
        for one in successions(self.plan, self._countable(), pairs):
            if one.stage is Stage.STARTING and not one.was_ready:
                self._end(one, EndCause.SUPERSEDED)  # The policy launches the next one at the new version.
                continue
            as_before = one.number not in self.state.refused_for
            kind, zone = (one.kind, one.zone) if as_before else (CapacityKind.ON_DEMAND, None)
            if kind is CapacityKind.SPOT or self.now_s >= self.state.on_demand_at_s:
                self.actions.append(LaunchReplica(self.plan.version, kind, zone, one.is_base, one.number))

    def result(self) -> ServiceDecision:
        """Returns the decision."""
        there = set(self.replicas)
        self.state = replace(self.state, refused_for=tuple(n for n in self.state.refused_for if n in there))
        if self.state.failed_version == self.plan.version:
            self.notes.append("update_given_up")
        wake_s = min(self.wakes_s, default=None)
        notes = tuple(dict.fromkeys(self.notes))
        return ServiceDecision(self.state, self.state.scaling.target, tuple(self.actions), wake_s, notes)

    # --------------------------------------------------------------------------------------------------------- helpers

    def _countable(self) -> list[ReplicaFacts]:
        return [one for one in self.replicas.values() if one.stage not in _CANNOT_COUNT]

    def _pairs(self) -> dict[int, ReplicaFacts]:
        """Returns the successors of replicas that are still there, by the predecessor's number."""
        here = {one.number for one in self._countable()}
        return {one.replaces: one for one in self._countable() if one.replaces is not None and one.replaces in here}

    def _visible(self) -> list[ReplicaFacts]:
        """Returns the replicas that the policy sees: of a pair, the predecessor until its successor is ready."""
        pairs = self._pairs()
        hidden = {one.number if one.stage is not Stage.READY else number for number, one in pairs.items()}
        return [one for one in self._countable() if one.number not in hidden]

    def _launch(self, kind: CapacityKind, zone: str | None) -> None:
        if self._is_paused():
            return
        if kind is not CapacityKind.SPOT and self.now_s < self.state.on_demand_at_s:
            self.wakes_s.append(self.state.on_demand_at_s)
            self.notes.append("on_demand_refused")
            return
        base = sum(one.is_base for one in self._visible())
        base += sum(isinstance(one, LaunchReplica) and one.is_base for one in self.actions)
        version = version_to_launch(self.plan.version, self.state)
        self.actions.append(LaunchReplica(version, kind, zone, base < self.plan.min_replicas))

    def _is_paused(self) -> bool:
        if self.now_s >= self.state.retry_at_s:
            return False
        self.wakes_s.append(self.state.retry_at_s)
        self.notes.append("replicas_fail" if self.state.failures else "installation_stopped")
        return True

    def _drain(self, one: ReplicaFacts, cause: EndCause) -> None:
        self.actions.append(DrainReplica(one.number, cause))
        self.replicas[one.number] = replace(one, stage=Stage.DRAINING, since_s=self.now_s)
        self.wakes_s.append(self.now_s + self.plan.drain_s)

    def _end(self, one: ReplicaFacts, cause: EndCause) -> None:
        self.actions.append(EndReplica(one.number, cause))
        del self.replicas[one.number]


def _seen(one: ReplicaFacts) -> Replica:
    state = ReplicaState.READY if one.stage is Stage.READY else ReplicaState.PROVISIONING
    return Replica(one.number, one.kind, one.zone if one.kind is CapacityKind.SPOT else None, state)
