"""Replays one window of a trace with one policy, and measures availability and cost.

The rules: capacity changes at the start of a tick. A zone with more replicas than capacity loses the newest ones,
without notice. Then launches are answered and cold starts end that are due, and the policy decides. A launch in a zone
with free capacity is granted, and otherwise refused. `AnswerSettings` say how long the answer takes. By default it
comes at once, and the policy decides again at the same time, until it returns no action. A launch that will be granted
holds its capacity from the start; if the capacity falls before the answer, the launch is refused. The policy also
decides at each answer, at the end of each cold start, and when a zone that refused may be tried again. On-demand
replicas are always available. A replica is billed from its grant to its end, and is ready once its cold start is over.
A window starts without replicas, so its first cold start counts as unavailable.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from domain.capacity import CapacityKind
from research.spot.answers import AT_ONCE, Answers, AnswerSettings
from research.spot.traces import SpotTrace
from services.spot.values import (
    Action,
    Launch,
    Observation,
    PolicyState,
    ReplicaState,
    SpotPolicy,
    SpotReplica,
    ZoneEvent,
    ZoneEventKind,
)

_MOST_ROUNDS = 100
"""The limit on decisions at one instant, in addition to four for each zone. Each decision of a valid policy, except the
last few, follows the refusal of another zone."""


@dataclass(frozen=True)
class ReplaySettings:
    """The settings of a replay."""

    target: int = 3
    """N_tar, the number of replicas that should be ready."""
    cold_start_s: float = 120.0
    """The time in seconds from the grant of a replica until the replica is ready."""
    od_price_ratio: float = 3.0
    """k, the price of an on-demand replica over that of a spot replica with price 1."""
    answers: AnswerSettings = AT_ONCE
    drain_s: float = 0.0
    """For how long a ready replica that the policy ends is still billed, and holds its capacity."""


@dataclass(frozen=True)
class WindowResult:
    """The measurements of one window."""

    first_tick: int
    availability: float
    """The share of the time in which at least N_tar replicas were ready."""
    cost: float
    """The cost over that of N_tar on-demand replicas during the whole window."""
    launches: int
    """The number of granted replicas, spot and on-demand."""
    preemptions: int
    refusals: int
    """The number of launches that were refused. Launches that ended before their answer are not counted."""
    on_demand_share: float
    """The share of on-demand replicas in the billed replica seconds; 0 if none were billed."""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as values of JSON."""
        return asdict(self)


@dataclass(frozen=True)
class ReplicaSpan:
    """The time of one replica, in seconds since the start of its window."""

    number: int
    """Numbers are assigned in the order of launches, also to those that are refused."""
    kind: CapacityKind
    zone: str | None
    """The zone; None for on-demand replicas."""
    launched_s: float
    """When the launch was granted."""
    ready_s: float | None
    """When the replica became ready; None: it ended before."""
    ended_s: float
    """When the replica ended; the end of the window if it was still running then."""
    preempted: bool
    """Whether the provider reclaimed the replica."""


@dataclass
class _Asked:
    """A requested launch that the zone has not answered yet."""

    kind: CapacityKind
    zone: str | None
    answer_at_s: float
    is_granted: bool

    def seen(self, number: int) -> SpotReplica:
        return SpotReplica(number, self.kind, self.zone, ReplicaState.REQUESTED)


@dataclass
class _Running:
    number: int
    kind: CapacityKind
    zone: str | None
    usd_per_h: float
    launched_s: float
    ready_at_s: float
    state: ReplicaState = ReplicaState.PROVISIONING

    def seen(self) -> SpotReplica:
        return SpotReplica(self.number, self.kind, self.zone, self.state)

    def span(self, ended_s: float, *, preempted: bool) -> ReplicaSpan:
        ready_s = self.ready_at_s if self.state is ReplicaState.READY else None
        return ReplicaSpan(self.number, self.kind, self.zone, self.launched_s, ready_s, ended_s, preempted)


@dataclass
class _Window:
    trace: SpotTrace
    policy: SpotPolicy
    settings: ReplaySettings
    state: PolicyState
    answers: Answers
    decide_at_s: deque[float] | None = None
    """When the policy decides, once at each of these times; None: whenever something changes."""
    now_s: float = 0.0
    capacity: dict[str, int] = field(default_factory=dict)
    asked: dict[int, _Asked] = field(default_factory=dict)
    replicas: dict[int, _Running] = field(default_factory=dict)
    draining: dict[int, tuple[float, _Running]] = field(default_factory=dict)
    """The replicas that drain, with the end of the drain."""
    events: list[ZoneEvent] = field(default_factory=list)
    spans: list[ReplicaSpan] = field(default_factory=list)
    """The replicas that have ended, in the order of their ends."""
    numbers: int = 0
    launches: int = 0
    preemptions: int = 0
    refusals: int = 0
    available_s: float = 0.0
    spent: float = 0.0
    billed_s: float = 0.0
    on_demand_s: float = 0.0

    def change_capacity(self, tick: int) -> None:
        """Sets the capacity of a tick, and takes the newest replicas of each zone with too many."""
        for zone, counts in zip(self.trace.zones, self.trace.capacity, strict=True):
            self.capacity[zone.name] = counts[tick]
            here = [number for number, one in self.replicas.items() if one.zone == zone.name]
            here += [number for number, (_, one) in self.draining.items() if one.zone == zone.name]
            here += [number for number, one in self.asked.items() if one.zone == zone.name and one.is_granted]
            for number in sorted(here)[counts[tick] :]:
                if number in self.asked:
                    self.asked[number].is_granted = False
                    continue
                if self.draining.pop(number, None) is not None:
                    continue
                self._end(number, preempted=True)
                self.preemptions += 1
                self.events.append(ZoneEvent(ZoneEventKind.PREEMPTED, zone.name))

    def decide(self) -> None:
        """Lets the policy decide until it returns no action; with times of decisions, once if one is due."""
        most = _MOST_ROUNDS + 4 * len(self.trace.zones)
        for _ in range(most):
            self._answer()
            self._end_cold_starts()
            if self.decide_at_s is not None:
                if self.decide_at_s and self.decide_at_s[0] <= self.now_s:
                    self.decide_at_s.popleft()
                    self._decide_once()
                return
            if not self._decide_once():
                return
        raise RuntimeError(f"{self.policy!r} still returns actions after {most} decisions at one time")

    def _decide_once(self) -> bool:
        """Carries out the actions of one decision; returns whether there were any."""
        both = {number: one.seen(number) for number, one in self.asked.items()}
        both |= {number: one.seen() for number, one in self.replicas.items()}
        seen = tuple(both[number] for number in sorted(both))
        observation = Observation(self.now_s, self.settings.target, seen, tuple(self.events))
        self.events.clear()
        self.state, actions = self.policy.decide(self.state, observation)
        for action in actions:
            self._apply(action)
        return bool(actions)

    def pass_time(self, until_s: float) -> None:
        """Advances the time, and adds up availability and cost. No replica changes in between."""
        span_s = until_s - self.now_s
        self.now_s = until_s
        if sum(one.state is ReplicaState.READY for one in self.replicas.values()) >= self.settings.target:
            self.available_s += span_s
        for one in (*self.replicas.values(), *(one for _, one in self.draining.values())):
            self.spent += span_s * one.usd_per_h
            self.billed_s += span_s
            self.on_demand_s += span_s if one.kind is CapacityKind.ON_DEMAND else 0.0

    def next_s(self) -> float:
        """Returns the next answer, end of a cold start or drain, or time of a decision; infinity if there is none."""
        times_s = [one.ready_at_s for one in self.replicas.values() if one.state is ReplicaState.PROVISIONING]
        times_s += [one.answer_at_s for one in self.asked.values()]
        times_s += [end_s for end_s, _ in self.draining.values()]
        if self.decide_at_s is not None:
            times_s += [self.decide_at_s[0]] if self.decide_at_s else []
        elif (wake_s := self.state.wake_at_s(self.now_s)) is not None:
            times_s.append(wake_s)
        return min(times_s, default=float("inf"))

    def _answer(self) -> None:
        self.draining = {number: one for number, one in self.draining.items() if one[0] > self.now_s}
        due = [(one.answer_at_s, number) for number, one in self.asked.items() if one.answer_at_s <= self.now_s]
        for _, number in sorted(due):
            one = self.asked.pop(number)
            if one.is_granted:
                self._grant(number, one.kind, one.zone)
            else:
                self._refuse(one.zone)

    def _end_cold_starts(self) -> None:
        for one in self.replicas.values():
            if one.state is ReplicaState.PROVISIONING and one.ready_at_s <= self.now_s:
                one.state = ReplicaState.READY
                if one.zone is not None:
                    self.events.append(ZoneEvent(ZoneEventKind.READY, one.zone))

    def all_spans(self) -> tuple[ReplicaSpan, ...]:
        """Returns the spans of all replicas so far, sorted by number. A running replica's span ends now."""
        running = (one.span(self.now_s, preempted=False) for one in self.replicas.values())
        return tuple(sorted((*self.spans, *running), key=lambda one: one.number))

    def _end(self, number: int, *, preempted: bool) -> None:
        self.spans.append(self.replicas.pop(number).span(self.now_s, preempted=preempted))

    def _apply(self, action: Action) -> None:
        if isinstance(action, Launch):
            self._launch(action)
        elif self.asked.pop(action.number, None) is None:
            one = self.replicas[action.number]
            if one.state is ReplicaState.READY and self.settings.drain_s:
                self.draining[action.number] = self.now_s + self.settings.drain_s, one
            self._end(action.number, preempted=False)

    def _launch(self, action: Launch) -> None:
        number, self.numbers = self.numbers, self.numbers + 1
        tick = int(self.now_s // self.trace.gap_s)
        granted, after_s = self.answers.next(action.zone, tick, has_room=self._has_room(action.zone))
        if after_s > 0:
            self.asked[number] = _Asked(action.kind, action.zone, self.now_s + after_s, granted)
        elif granted:
            self._grant(number, action.kind, action.zone)
        else:
            self._refuse(action.zone)

    def _has_room(self, zone: str | None) -> bool:
        if zone is None:
            return True
        held = sum(one.zone == zone for one in self.replicas.values())
        held += sum(one.zone == zone for _, one in self.draining.values())
        held += sum(one.zone == zone and one.is_granted for one in self.asked.values())
        return held < self.capacity[zone]

    def _grant(self, number: int, kind: CapacityKind, zone: str | None) -> None:
        own = (one.usd_per_h for one in self.trace.zones if one.name == zone)
        price = next(own, self.settings.od_price_ratio)
        cold_s = self.answers.cold_start_s(zone, int(self.now_s // self.trace.gap_s))
        ready_at_s = self.now_s + (self.settings.cold_start_s if cold_s is None else cold_s)
        self.replicas[number] = _Running(number, kind, zone, price, self.now_s, ready_at_s)
        self.launches += 1

    def _refuse(self, zone: str | None) -> None:
        assert zone is not None
        self.refusals += 1
        self.events.append(ZoneEvent(ZoneEventKind.REFUSED, zone))


def replay_spans(
    trace: SpotTrace,
    policy: SpotPolicy,
    settings: ReplaySettings,
    first_tick: int,
    ticks: int,
    decide_at_s: Sequence[float] | None = None,
    answers: Answers | None = None,
) -> tuple[WindowResult, tuple[ReplicaSpan, ...]]:
    """Replays the ticks [first_tick, first_tick + ticks) with a policy. Equal arguments give equal results.

    Args:
        trace: the capacity.
        policy: the policy.
        settings: the settings.
        first_tick: the first tick.
        ticks: their number.
        decide_at_s: the times since the first tick at which the policy decides, in order, and once at each, for a
            comparison with a service that decided then; None: at each change, until it returns no action.
        answers: the answers to launches; None: those of the settings.

    Returns the measurements, and all replicas by number.

    Raises:
        ValueError: the trace does not contain these ticks.
        RuntimeError: the policy never stops returning actions.
    """
    if not (first_tick >= 0 and ticks > 0 and first_tick + ticks <= trace.ticks):
        raise ValueError(f"ticks {first_tick} to {first_tick + ticks}: the trace has {trace.ticks} ticks")
    times_s = None if decide_at_s is None else deque(decide_at_s)
    window = _Window(trace, policy, settings, policy.start(), answers or settings.answers.begin(), times_s)
    for tick in range(ticks):
        window.change_capacity(first_tick + tick)
        window.decide()
        end_s = (tick + 1) * trace.gap_s
        while (at_s := window.next_s()) < end_s:
            window.pass_time(at_s)
            window.decide()
        window.pass_time(end_s)
    whole_s = ticks * trace.gap_s
    most = settings.od_price_ratio * settings.target * whole_s
    result = WindowResult(
        first_tick,
        window.available_s / whole_s,
        window.spent / most if most else 0.0,
        window.launches,
        window.preemptions,
        window.refusals,
        window.on_demand_s / window.billed_s if window.billed_s else 0.0,
    )
    return result, window.all_spans()
