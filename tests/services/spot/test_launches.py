"""Launches that are answered late, partly and in any order: what was granted is kept, and refusals are no storm."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.capacity import CapacityKind
from research.spot.answers import AnswerSettings
from research.spot.replay import ReplaySettings, WindowResult, replay_spans
from research.spot.traces import SpotTrace
from services.spot.estimates import Estimates
from services.spot.knowledge import Knowledge
from services.spot.policies import PolicySettings, make_policy
from services.spot.spothedge_plus import KEPT_S
from services.spot.values import (
    Action,
    Launch,
    Observation,
    PolicyState,
    ReplicaState,
    SpotPolicy,
    SpotReplica,
    Terminate,
    Zone,
    ZoneEvent,
    ZoneEventKind,
)
from tests.depth import examples
from tests.services.spot.strategies import zones_of

_HOUR_S = 3600.0
_PARTIAL = {"eu": 2, "us": 0, "as": 1, "uc": 0}
"""Four zones that have three machines, of which no zone has all."""


@dataclass
class _Counting:
    """A policy with the times of its decisions, its launches, and its decisions that launch one and end a ready one."""

    policy: SpotPolicy
    launched_s: list[float] = field(default_factory=list)
    swapped_s: list[float] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)

    def start(self) -> PolicyState:
        return self.policy.start()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        after, actions = self.policy.decide(state, observation)
        self.asked_s.append(observation.now_s)
        launches = [action for action in actions if isinstance(action, Launch)]
        ends = {action.number for action in actions if isinstance(action, Terminate)}
        self.launched_s += [observation.now_s] * len(launches)
        if any(one.zone for one in launches) and any(
            one.number in ends and one.is_ready and one.is_spot for one in observation.replicas
        ):
            self.swapped_s.append(observation.now_s)
        return after, actions


def _replayed(
    name: str, trace: SpotTrace, answers: AnswerSettings, retry_s: float = 300.0
) -> tuple[WindowResult, list[float], list[float]]:
    """Returns the result, the times of all launches, and how long each spot replica that was ended had been granted."""
    counting = _Counting(make_policy(name, PolicySettings(trace.zones, retry_s=retry_s)))
    result, spans = replay_spans(trace, counting, ReplaySettings(3, 120.0, 3.0, answers), 0, trace.ticks)
    end_s = trace.ticks * trace.gap_s
    ended = [one for one in spans if one.kind is CapacityKind.SPOT and not one.preempted and one.ended_s < end_s]
    return result, counting.launched_s, [one.ended_s - one.launched_s for one in ended]


def _partial(hours: int = 4) -> SpotTrace:
    zones = tuple(Zone(name, "east" if name in ("eu", "us") else "west") for name in _PARTIAL)
    return SpotTrace(zones, 300.0, tuple((count,) * (12 * hours) for count in _PARTIAL.values()))


@pytest.mark.parametrize("refused_s", [0.0, 0.3, 10.0, 60.0])
@pytest.mark.parametrize("retry_s", [10.0, 300.0])
def test_a_partial_grant_is_kept(refused_s: float, retry_s: float) -> None:
    """Three zones of four have fewer machines than the target; together they have three.

    Granted machines are kept, and the service costs little more than its spot machines alone (0.33), not as much as
    its on-demand machines. SpotHedge launches at least half as much.
    """
    answers = AnswerSettings(refused_s, granted_s=min(refused_s, 3.0))
    hedge, launched_by_hedge, _ = _replayed("spothedge", _partial(), answers, retry_s)
    plus, launched, ended_after_s = _replayed("spothedge+", _partial(), answers, retry_s)
    assert min(ended_after_s, default=KEPT_S) >= KEPT_S
    assert plus.availability >= hedge.availability - 0.001
    assert plus.cost < 0.75 * hedge.cost
    for until_s in (150.0, _HOUR_S, 4 * _HOUR_S):
        assert sum(at_s < until_s for at_s in launched) <= 2 * sum(at_s < until_s for at_s in launched_by_hedge)


@pytest.mark.parametrize("name", ["spothedge", "spothedge+"])
def test_refusals_without_end_are_no_storm(name: str) -> None:
    """If every zone refuses for ever, the pause of a zone doubles from `retry_s` to five minutes."""
    trace = SpotTrace(zones_of(4), 300.0, ((0,) * 48,) * 4)
    _, launched_s, _ = _replayed(name, trace, AnswerSettings(2.0, 2.0), retry_s=10.0)
    # Each zone is tried about five times within 150 s. SpotHedge tries a zone with up to four launches at a time.
    assert sum(at_s < 150.0 for at_s in launched_s) <= 60
    assert sum(at_s > _HOUR_S for at_s in launched_s) <= 4 * 36 * (4 if name == "spothedge" else 1)


@pytest.mark.parametrize("capacity", [(1, 1, 2), (2, 1, 1, 1)])
@pytest.mark.parametrize("answered_s", [0.0, 10.0])
def test_full_zones_are_not_asked_in_circles(capacity: tuple[int, ...], answered_s: float) -> None:
    """For a day, each zone has fewer machines than the plan would like, and all together have enough.

    The policy asks a zone for more less and less often, also after it moved a replica to another zone and back. It ends
    no ready replica for a launch that may be refused.
    """
    zones = zones_of(len(capacity))
    trace = SpotTrace(zones, 300.0, tuple((count,) * 288 for count in capacity))
    counting = _Counting(make_policy("spothedge+", PolicySettings(zones)))
    answers = AnswerSettings(answered_s, answered_s)
    result, _ = replay_spans(trace, counting, ReplaySettings(3, 120.0, 3.0, answers), 0, trace.ticks)
    assert len(counting.launched_s) <= 28
    assert not counting.swapped_s
    assert result.availability > 0.998


def test_a_full_zone_is_rarely_asked_for_more() -> None:
    """A zone that holds replicas and refuses another one is full: it is asked every 20 minutes, not every five."""
    zones = zones_of(1)
    counting = _Counting(make_policy("spothedge+", PolicySettings(zones)))
    trace = SpotTrace(zones, 300.0, ((2,) * 288,))
    result, _ = replay_spans(trace, counting, ReplaySettings(3, 120.0, 3.0), 0, trace.ticks)
    assert sum(at_s > 0.0 for at_s in counting.launched_s) in range(60, 90)
    assert result.availability > 0.998


@pytest.mark.parametrize("left", [1, 2])
def test_a_zone_that_preempted_replicas_is_not_asked_at_once(left: int) -> None:
    """A zone has no capacity at the time of a preemption, even if it keeps some of its replicas; it is asked later."""
    zones = zones_of(1)
    policy = make_policy("spothedge+", PolicySettings(zones))
    held = tuple(SpotReplica(at, CapacityKind.SPOT, zones[0].name, ReplicaState.READY) for at in range(3))
    state, _ = policy.decide(policy.start(), Observation(0.0, 3, held))
    lost = (ZoneEvent(ZoneEventKind.PREEMPTED, zones[0].name),) * (3 - left)
    asked_s: list[float] = []
    for step in range(13):
        now_s = 3600.0 + step * 300.0
        state, actions = policy.decide(state, Observation(now_s, 3, held[:left], () if step else lost))
        asked_s += [now_s for one in actions if isinstance(one, Launch) and one.zone]
    assert asked_s and asked_s[0] > 3600.0


def test_a_full_zone_is_asked_again_while_an_on_demand_replica_stands_in() -> None:
    """A zone of two machines has a third one from the second hour on: it replaces the on-demand replica soon."""
    zones = zones_of(1)
    trace = SpotTrace(zones, 300.0, ((2,) * 24 + (4,) * 24,))
    _, spans = replay_spans(trace, make_policy("spothedge+", PolicySettings(zones)), ReplaySettings(), 0, trace.ticks)
    spot_s = [one.launched_s for one in spans if one.kind is CapacityKind.SPOT]
    assert 2 * _HOUR_S <= spot_s[2] <= 2 * _HOUR_S + 1200.0 + 300.0


def test_a_full_zone_is_asked_for_what_it_has_had() -> None:
    """A zone that held two replicas when it refused a third is asked for the second again during its pause."""
    zones = zones_of(3)
    policy = make_policy("spothedge+", PolicySettings(zones))
    full = zones[0].name
    held = tuple(SpotReplica(at, CapacityKind.SPOT, full, ReplicaState.READY) for at in range(2))
    refused = tuple(ZoneEvent(ZoneEventKind.REFUSED, zone.name) for zone in zones)
    state, actions = policy.decide(policy.start(), Observation(0.0, 3, held, refused))
    assert not any(isinstance(one, Launch) and one.zone for one in actions)
    _, actions = policy.decide(state, Observation(60.0, 3, held[:1]))
    assert [one.zone for one in actions if isinstance(one, Launch) and one.zone] == [full]


def _ready(zone: str, count: int) -> tuple[SpotReplica, ...]:
    return tuple(SpotReplica(at, CapacityKind.SPOT, zone, ReplicaState.READY) for at in range(count))


@pytest.mark.parametrize("seed", range(4))
def test_decisions_do_not_depend_on_how_often_the_policy_is_asked(seed: int) -> None:
    """A replay asks in each tick. With ticks of a fifth of the length, the same launches follow at the same times.

    Otherwise a live service, which asks at its own intervals, would not do what the replay of its fleet says.
    """
    rng, zones = random.Random(seed), zones_of(3)
    rows = [tuple(count for _ in range(12) for count in [rng.choice((0, 1, 2, 4))] * 24) for _ in zones]
    found = []
    for parts in (1, 5):
        fine = tuple(tuple(count for count in row for _ in range(parts)) for row in rows)
        counting = _Counting(make_policy("spothedge+", PolicySettings(zones)))
        trace = SpotTrace(zones, 300.0 / parts, fine)
        found.append((replay_spans(trace, counting, ReplaySettings(), 0, trace.ticks)[1], counting.launched_s))
    assert found[0] == found[1]
    assert len(found[0][1]) > 10


def test_a_replay_repeats_the_decisions_of_given_times() -> None:
    """The times at which a policy was asked give the same result again; without them, nothing is launched."""
    zones = zones_of(2)
    trace, rules = SpotTrace(zones, 300.0, ((2, 0, 0, 3) * 6, (1, 1, 4, 4) * 6)), ReplaySettings()
    counting = _Counting(make_policy("spothedge+", PolicySettings(zones)))
    result = replay_spans(trace, counting, rules, 0, trace.ticks)
    again = make_policy("spothedge+", PolicySettings(zones))
    assert replay_spans(trace, again, rules, 0, trace.ticks, counting.asked_s) == result
    assert replay_spans(trace, again, rules, 0, trace.ticks, [])[0].launches == 0


def test_a_launch_counts_after_its_replica_has_ended() -> None:
    """Replicas do not move for hours after a launch, also if the plan has ended the launched replica since.

    Otherwise the end of a spare replica allows a move at once, the move's replica becomes the next spare, and so on.
    """
    zones = zones_of(2)
    estimates, held = Estimates(zones), _ready(zones[0].name, 3)
    spare = SpotReplica(3, CapacityKind.SPOT, zones[1].name, ReplicaState.PROVISIONING)
    known = estimates.learn(Knowledge(), Observation(0.0, 3, held))
    for now_s, seen in ((600.0, held), (1200.0, (*held, spare)), (2400.0, held), (3000.0, held)):
        known = estimates.learn(known, Observation(now_s, 3, seen))
    assert known.launched_at_s == 600.0
    refused = (ZoneEvent(ZoneEventKind.REFUSED, zones[1].name),)
    assert estimates.learn(known, Observation(3600.0, 3, held, refused)).launched_at_s == 3600.0


@pytest.mark.parametrize("changed", [{"outage_price_s": 1e6}, {"base": 1}])
def test_changed_settings_are_obeyed_at_once(changed: dict[str, Any]) -> None:
    """The policy does not wait for its next review if a setting of the service has changed."""
    zones = zones_of(1)
    held = _ready(zones[0].name, 3)
    policy = make_policy("spothedge+", PolicySettings(zones, outage_price_s=0.0))
    state, actions = policy.decide(policy.start(), Observation(0.0, 3, held))
    assert not actions
    assert not policy.decide(state, Observation(1.0, 3, held))[1]
    other = make_policy("spothedge+", replace(PolicySettings(zones, outage_price_s=0.0), **changed))
    assert other.decide(state, Observation(1.0, 3, held))[1]


@st.composite
def _fleets(draw: st.DrawFn) -> SpotTrace:
    count = draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 4), min_size=4, max_size=16)
    rows = draw(st.lists(row, min_size=count, max_size=count))
    ticks = min(map(len, rows))
    return SpotTrace(zones_of(count), 300.0, tuple(tuple(row[:ticks]) for row in rows))


_MEAN_S = st.sampled_from([0.0, 2.0, 10.0, 60.0])


@settings(max_examples=examples(200))
@given(
    _fleets(),
    _MEAN_S,
    _MEAN_S,
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([10.0, 300.0]),
    st.integers(0, 99).map(str),
)
def test_no_granted_machine_is_ended_early(
    trace: SpotTrace, refused_s: float, granted_s: float, share: float, retry_s: float, seed: str
) -> None:
    """`spothedge+` keeps each granted spot machine for ten minutes, however late and partly launches are answered."""
    answers = AnswerSettings(refused_s, granted_s, share, seed)
    _, _, ended_after_s = _replayed("spothedge+", trace, answers, retry_s)
    assert min(ended_after_s, default=KEPT_S) >= KEPT_S
