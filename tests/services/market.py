"""A service on a trace of spot capacity: carries out the controller's actions by the rules of a replay."""

from collections import Counter
from dataclasses import dataclass, field, replace

from domain.capacity import CapacityKind
from research.spot.traces import SpotTrace
from services.controller import decide
from services.values import (
    SERVICE_STATE,
    DrainReplica,
    EndReplica,
    LaunchReplica,
    Loss,
    LossKind,
    ReplicaFacts,
    ServicePlan,
    ServiceState,
    Stage,
)

Launched = tuple[float, str | None]
"""When a replica was launched, and in which zone; None: on-demand."""
_MOST_ROUNDS = 200


@dataclass
class Market:
    """The replicas of one service. Drains take no time, and a restarted controller gets the state from its JSON."""

    trace: SpotTrace
    plan: ServicePlan
    cold_s: float
    now_s: float = 0.0
    capacity: dict[str, int] = field(default_factory=dict)
    replicas: dict[int, ReplicaFacts] = field(default_factory=dict)
    ready_at_s: dict[int, float] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)
    number: int = 0
    state: ServiceState | None = None

    def run(self, first: int, ticks: int) -> list[Launched]:
        """Runs the ticks from `first`; returns the launches that succeeded."""
        self.state = ServiceState(self.plan.policy.start(), self.plan.autoscaler.start())
        for tick in range(ticks):
            self._change_capacity(first + tick)
            self._decide()
            end_s = (tick + 1) * self.trace.gap_s
            while (ready_s := min(self.ready_at_s.values(), default=end_s)) < end_s:
                self.now_s = ready_s
                self._decide()
            self.now_s = end_s
        return self.launched

    def _change_capacity(self, tick: int) -> None:
        for zone, counts in zip(self.trace.zones, self.trace.capacity, strict=True):
            self.capacity[zone.name] = counts[tick]
            here = sorted(number for number, one in self.replicas.items() if one.zone == zone.name)
            for number in here[counts[tick] :]:
                self._lose(self.replicas.pop(number), LossKind.PREEMPTED)
                self.ready_at_s.pop(number, None)

    def _lose(self, one: ReplicaFacts, kind: LossKind) -> None:
        self.losses.append(Loss(one, kind))

    def _decide(self) -> None:
        for _ in range(_MOST_ROUNDS):
            for number in [n for n, at_s in self.ready_at_s.items() if at_s <= self.now_s]:
                del self.ready_at_s[number]
                self.replicas[number] = replace(self.replicas[number], stage=Stage.READY, since_s=self.now_s)
            assert self.state is not None
            restarted = SERVICE_STATE.validate_json(SERVICE_STATE.dump_json(self.state))
            losses, self.losses = self.losses, []
            decision = decide(self.plan, restarted, list(self.replicas.values()), losses, 0, self.now_s)
            self.state = decision.state
            for number, one in self.replicas.items():
                self.replicas[number] = replace(one, was_ready=one.was_ready or one.stage is Stage.READY)
            if not decision.actions:
                return
            for action in decision.actions:
                if isinstance(action, LaunchReplica):
                    self._launch(action)
                else:
                    assert isinstance(action, DrainReplica | EndReplica)
                    self.replicas.pop(action.number, None)
                    self.ready_at_s.pop(action.number, None)
        raise AssertionError(f"still actions after {_MOST_ROUNDS} decisions at one time")

    def _launch(self, action: LaunchReplica) -> None:
        one = ReplicaFacts(self.number, action.version, action.kind, action.zone, Stage.STARTING, self.now_s)
        self.number += 1
        held = Counter(other.zone for other in self.replicas.values())
        if action.zone is not None and held[action.zone] >= self.capacity[action.zone]:
            self._lose(one, LossKind.REFUSED)
            return
        assert (action.zone is not None) == (action.kind is CapacityKind.SPOT)
        self.replicas[one.number] = one
        self.ready_at_s[one.number] = self.now_s + self.cold_s
        self.launched.append((self.now_s, action.zone))
