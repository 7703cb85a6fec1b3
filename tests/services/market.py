"""A service on a trace of spot capacity: carries out the controller's actions by the rules of a replay."""

from dataclasses import dataclass, field, replace

from domain.capacity import CapacityKind
from research.spot.answers import AT_ONCE, AnswerSettings
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
    ServiceDecision,
    ServicePlan,
    ServiceState,
    SetReplicaBase,
    Stage,
)

Launched = tuple[float, str | None]
"""When a launch was granted, and in which zone; None: on-demand."""
_MOST_ROUNDS = 200


@dataclass
class Market:
    """The replicas of one service. Drains take no time, and a restarted controller gets the state from its JSON."""

    trace: SpotTrace
    plan: ServicePlan
    cold_s: float
    answers: AnswerSettings = AT_ONCE
    now_s: float = 0.0
    capacity: dict[str, int] = field(default_factory=dict)
    replicas: dict[int, ReplicaFacts] = field(default_factory=dict)
    answer_at_s: dict[int, tuple[float, bool]] = field(default_factory=dict)
    """When each launch without an answer is answered, and whether it is granted."""
    ready_at_s: dict[int, float] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)
    launched: list[Launched] = field(default_factory=list)
    number: int = 0
    state: ServiceState | None = None

    def __post_init__(self) -> None:
        self.drawn = self.answers.begin()

    def run(self, first: int, ticks: int) -> list[Launched]:
        """Runs the ticks from `first`; returns the launches that succeeded."""
        self.state = ServiceState(self.plan.policy.start(), self.plan.autoscaler.start())
        for tick in range(ticks):
            self._change_capacity(first + tick)
            self._decide()
            end_s = (tick + 1) * self.trace.gap_s
            while (at_s := self._next_s(end_s)) < end_s:
                self.now_s = at_s
                self._decide()
            self.now_s = end_s
        return self.launched

    def _change_capacity(self, tick: int) -> None:
        for zone, counts in zip(self.trace.zones, self.trace.capacity, strict=True):
            self.capacity[zone.name] = counts[tick]
            here = sorted(number for number, one in self.replicas.items() if self._holds(one, zone.name))
            for number in here[counts[tick] :]:
                if number in self.answer_at_s:
                    self.answer_at_s[number] = self.answer_at_s[number][0], False
                    continue
                self._lose(self.replicas.pop(number), LossKind.PREEMPTED)
                self.ready_at_s.pop(number, None)

    def _holds(self, one: ReplicaFacts, zone: str) -> bool:
        return one.zone == zone and (one.is_granted or self.answer_at_s[one.number][1])

    def _next_s(self, end_s: float) -> float:
        assert self.state is not None
        wake_s = self._wake_s(self.state)
        answers = [at_s for at_s, _ in self.answer_at_s.values()]
        return min([end_s, *self.ready_at_s.values(), *answers, *([] if wake_s is None else [wake_s])])

    def _wake_s(self, state: ServiceState) -> float | None:
        speed = self.plan.policy_speed
        wake_s = state.policy.wake_at_s(self.now_s * speed)
        return None if wake_s is None else wake_s / speed

    def _answer(self) -> None:
        due = sorted((at_s, number) for number, (at_s, _) in self.answer_at_s.items() if at_s <= self.now_s)
        for _, number in due:
            one = self.replicas[number]
            if self.answer_at_s.pop(number)[1]:
                self._grant(one)
            else:
                self._lose(self.replicas.pop(number), LossKind.REFUSED)

    def _lose(self, one: ReplicaFacts, kind: LossKind) -> None:
        self.losses.append(Loss(one, kind))

    def _decide(self) -> None:
        for _ in range(_MOST_ROUNDS):
            self._happen()
            if not self._step().actions:
                return
        raise AssertionError(f"still actions after {_MOST_ROUNDS} decisions at one time")

    def _happen(self) -> None:
        """Answers launches and ends cold starts that are due."""
        self._answer()
        for number in [n for n, at_s in self.ready_at_s.items() if at_s <= self.now_s]:
            del self.ready_at_s[number]
            self.replicas[number] = replace(self.replicas[number], stage=Stage.READY, since_s=self.now_s)

    def _step(self) -> ServiceDecision:
        """Lets the controller decide once, and carries the decision out."""
        assert self.state is not None
        restarted = SERVICE_STATE.validate_json(SERVICE_STATE.dump_json(self.state))
        losses, self.losses = self.losses, []
        decision = decide(self.plan, restarted, list(self.replicas.values()), losses, 0, self.now_s)
        self.state = decision.state
        wake_s = self._wake_s(decision.state)
        assert wake_s is None or (decision.wake_at_s is not None and decision.wake_at_s <= wake_s)
        for number, one in self.replicas.items():
            self.replicas[number] = replace(one, was_ready=one.was_ready or one.stage is Stage.READY)
        for action in decision.actions:
            if isinstance(action, LaunchReplica):
                self._launch(action)
            elif isinstance(action, SetReplicaBase):
                self.replicas[action.number] = replace(self.replicas[action.number], is_base=action.is_base)
            else:
                assert isinstance(action, DrainReplica | EndReplica)
                self._stop(action)
        return decision

    def _stop(self, action: DrainReplica | EndReplica) -> None:
        self.replicas.pop(action.number, None)
        self.ready_at_s.pop(action.number, None)
        self.answer_at_s.pop(action.number, None)

    def _launch(self, action: LaunchReplica) -> None:
        one = ReplicaFacts(self.number, action.version, action.kind, action.zone, Stage.STARTING, self.now_s)
        one = replace(one, is_base=action.is_base)
        self.number += 1
        assert (action.zone is not None) == (action.kind is CapacityKind.SPOT)
        held = sum(self._holds(other, action.zone) for other in self.replicas.values()) if action.zone else 0
        has_room = action.zone is None or held < self.capacity[action.zone]
        tick = int(self.now_s // self.trace.gap_s)
        granted, after_s = self.drawn.next(action.zone, tick, has_room=has_room)
        if after_s > 0:
            self.replicas[one.number] = replace(one, is_granted=False)
            self.answer_at_s[one.number] = self.now_s + after_s, granted
        elif granted:
            self._grant(one)
        else:
            self._lose(one, LossKind.REFUSED)

    def _grant(self, one: ReplicaFacts) -> None:
        self.replicas[one.number] = replace(one, is_granted=True)
        self.ready_at_s[one.number] = self.now_s + self.cold_s
        self.launched.append((self.now_s, one.zone))
