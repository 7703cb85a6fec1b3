"""The controller of a service's replicas: the same decisions as a replay, updates, failures and draining."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activities.services.replica_rows import LiveReplica
from domain.capacity import CapacityKind
from domain.phases import Phase
from infra.db.services import ServiceReplica
from research.spot.answers import AnswerSettings
from research.spot.replay import ReplaySettings, replay_spans
from research.spot.traces import SpotTrace
from services.controller import decide
from services.losses import FAILURES_IN_A_ROW
from services.spot.autoscaler import LoadAutoscaler, ScalingState
from services.spot.policies import POLICIES, PolicySettings, make_policy
from services.spot.values import Action, Launch, Observation, PolicyState, SpotPolicy, Zone
from services.values import (
    REPLICA_EJECTED,
    SERVICE_STATE,
    DrainReplica,
    EndCause,
    EndReplica,
    LaunchReplica,
    Loss,
    LossKind,
    ReleaseReplica,
    ReplicaFacts,
    ServiceDecision,
    ServicePlan,
    ServiceState,
    SetReplicaBase,
    Stage,
)
from tests.services.market import Launched, Market
from tests.services.spot.strategies import traces

_ZONES = (Zone("z-0", "r"), Zone("z-1", "r"), Zone("z-2", "s"))
_DRAIN_S = 30.0


class _Recording:
    """A policy that records its launches, with their times."""

    def __init__(self, policy: SpotPolicy) -> None:
        self._policy = policy
        self.asked: list[Launched] = []

    def start(self) -> PolicyState:
        return self._policy.start()

    def decide(self, state: PolicyState, observation: Observation) -> tuple[PolicyState, tuple[Action, ...]]:
        after, actions = self._policy.decide(state, observation)
        self.asked += [(observation.now_s, action.zone) for action in actions if isinstance(action, Launch)]
        return after, actions


@st.composite
def _answers(draw: st.DrawFn) -> AnswerSettings:
    mean_s = st.sampled_from([0.0, 1.0, 20.0])
    return AnswerSettings(draw(mean_s), draw(mean_s), draw(st.sampled_from([0.0, 0.3])), str(draw(st.integers(0, 99))))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=200)
@given(traces(), st.integers(0, 45), st.integers(1, 4), st.integers(0, 2), _answers(), st.sampled_from([1.0, 64.0]))
def test_a_live_service_decides_as_a_replay(
    name: str, trace: SpotTrace, cold_s: int, target: int, extra: int, answers: AnswerSettings, speed: float
) -> None:
    """On the same capacity, the controller makes the policy ask for the same launches at the same times as a replay.

    Answers come late, in any order and partly as refusals. The controller's state passes through JSON before each
    decision, as after a restart. With a policy speed, everything around it happens in as much less time.
    """
    made = PolicySettings(trace.zones, extra, retry_s=trace.gap_s)
    replayed, live = _Recording(make_policy(name, made)), _Recording(make_policy(name, made))
    rules = ReplaySettings(target, float(cold_s), 3.0, answers)
    result = replay_spans(trace, replayed, rules, 0, trace.ticks)[0]
    plan = ServicePlan(live, _fixed(target), version=1, policy_speed=speed)
    fast = replace(trace, gap_s=trace.gap_s / speed)
    soon = replace(answers, refused_s=answers.refused_s / speed, granted_s=answers.granted_s / speed)
    launched = Market(fast, plan, cold_s / speed, soon).run(0, trace.ticks)
    assert live.asked == replayed.asked
    assert len(launched) == result.launches


# ------------------------------------------------------------------------------------------------------------- examples


def _fixed(target: int) -> LoadAutoscaler:
    return LoadAutoscaler(1.0, least=target, most=target)


def _plan(version: int = 1, target: int = 2, policy: str = "on-demand", **other: object) -> ServicePlan:
    made = make_policy(policy, PolicySettings(_ZONES, 0))
    plan = ServicePlan(made, _fixed(target), version, min_replicas=target, drain_s=_DRAIN_S)
    return replace(plan, **other)  # type: ignore[arg-type]


def _state(plan: ServicePlan, **other: object) -> ServiceState:
    return replace(ServiceState(plan.policy.start(), plan.autoscaler.start()), **other)  # type: ignore[arg-type]


def _replica(number: int, version: int = 1, stage: Stage = Stage.READY, **other: object) -> ReplicaFacts:
    one = ReplicaFacts(number, version, CapacityKind.ON_DEMAND, None, stage, 0.0, was_ready=stage is Stage.READY)
    return replace(one, **other)  # type: ignore[arg-type]


def _decide(
    plan: ServicePlan,
    replicas: Sequence[ReplicaFacts],
    losses: Sequence[Loss] = (),
    state: ServiceState | None = None,
    now_s: float = 100.0,
) -> ServiceDecision:
    return decide(plan, state or _state(plan), replicas, losses, 0, now_s)


def test_a_rolling_update_adds_one_replica_at_a_time() -> None:
    """A predecessor is drained only when its successor is ready, and the next successor is launched only then."""
    plan = _plan(version=2)
    first = _decide(plan, [_replica(0), _replica(1)])
    assert first.actions == (LaunchReplica(2, CapacityKind.ON_DEMAND, None, True, replaces=0),)
    starting = _replica(2, 2, Stage.STARTING, replaces=0)
    assert _decide(plan, [_replica(0), _replica(1), starting]).actions == ()
    ready = replace(starting, stage=Stage.READY)
    second = _decide(plan, [_replica(0), _replica(1), ready])
    assert second.actions == (
        DrainReplica(0, EndCause.SUPERSEDED),
        LaunchReplica(2, CapacityKind.ON_DEMAND, None, True, replaces=1),
    )
    assert second.wake_at_s == 100.0 + _DRAIN_S
    assert second.state.good_version == 2


def test_a_blue_green_update_switches_at_once() -> None:
    """All successors are launched together, and no predecessor is drained before all of them are ready."""
    plan = _plan(version=2, blue_green=True)
    old = [_replica(0), _replica(1)]
    launched = _decide(plan, old).actions
    assert [one.replaces for one in launched if isinstance(one, LaunchReplica)] == [0, 1]
    new = [_replica(2, 2, replaces=0), _replica(3, 2, Stage.STARTING, replaces=1)]
    assert _decide(plan, [*old, *new]).actions == ()
    switched = _decide(plan, [*old, new[0], _replica(3, 2, replaces=1)]).actions
    assert switched == (DrainReplica(0, EndCause.SUPERSEDED), DrainReplica(1, EndCause.SUPERSEDED))


def test_an_update_that_fails_is_given_up() -> None:
    """After some failed replicas of a version that was never ready, the version before stays and is launched again."""
    plan = _plan(version=2)
    state, now_s = _state(plan, good_version=1), 100.0
    old = [_replica(0), _replica(1)]
    for failure in range(FAILURES_IN_A_ROW):
        lost = Loss(_replica(2 + failure, 2, Stage.STARTING, replaces=0), LossKind.FAILED)
        found = _decide(plan, old, [lost], state, now_s)
        assert found.actions == ()  # The backoff has begun.
        state, now_s = found.state, state.retry_at_s + 1000.0
    assert state.failed_version == 2
    after = _decide(plan, old, (), state, now_s)
    assert (after.actions, after.notes) == ((), ("update_given_up",))
    replaced = _decide(plan, old[:1], [Loss(old[1], LossKind.PREEMPTED)], state, now_s).actions
    assert replaced == (LaunchReplica(1, CapacityKind.ON_DEMAND, None, True),)


def test_replicas_that_machines_refuse_to_start_give_up_no_update() -> None:
    """A launch that fails for a reason that is not the replica's own leads to a backoff, however often it happens."""
    plan = _plan(version=2)
    state, now_s, pauses_s = _state(plan, good_version=1), 100.0, []
    old = [_replica(0), _replica(1)]
    for refusal in range(2 * FAILURES_IN_A_ROW):
        lost = Loss(_replica(2 + refusal, 2, Stage.STARTING, replaces=0), LossKind.NOT_STARTED)
        found = _decide(plan, old, [lost], state, now_s)
        assert found.actions == ()  # The backoff has begun.
        pauses_s.append(found.state.retry_at_s - now_s)
        state, now_s = found.state, found.state.retry_at_s + 1.0
    assert (state.failed_version, state.failures) == (0, 0) and pauses_s[:3] == [5.0, 10.0, 20.0]
    assert _decide(plan, old, (), state, now_s).actions[0] == LaunchReplica(2, CapacityKind.ON_DEMAND, None, True, 0)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("launch_failed", LossKind.NOT_STARTED),
        ("launch_timed_out", LossKind.PREEMPTED),
        ("cannot_start", LossKind.FAILED),
        ("setup_failed", LossKind.FAILED),
    ],
)
def test_what_a_replica_is_to_blame_for(code: str, kind: LossKind) -> None:
    """Only an end for which the replica itself is to blame is a failure of its version."""
    assert LiveReplica(ServiceReplica(), Phase.FAILED, {"code": code}, False).loss is kind


def test_a_newer_update_supersedes_one_that_is_under_way() -> None:
    """Replicas of an unfinished update that do not serve end at once, and the newest version takes their place."""
    plan = _plan(version=3)
    stuck = _replica(2, 2, Stage.STARTING, replaces=0, is_queued=True)
    found = _decide(plan, [_replica(0), _replica(1), stuck], state=_state(plan, good_version=1))
    assert found.actions == (
        EndReplica(2, EndCause.SUPERSEDED),
        LaunchReplica(3, CapacityKind.ON_DEMAND, None, True, replaces=0),
    )
    back = [_replica(0, 3), _replica(1, 3)]  # Version 3 is the way back: `continue_replicas` has moved them.
    found = _decide(plan, [*back, stuck], state=_state(plan, good_version=1))
    assert (found.actions, found.state.good_version) == ((EndReplica(2, EndCause.SUPERSEDED),), 3)


def test_an_update_that_finds_no_machines_is_given_up() -> None:
    """Once a replica of it has waited long enough, if none has been ready. The service wakes up for it."""
    plan, waits = _plan(version=2, queued_s=50.0), _replica(2, 2, Stage.STARTING, replaces=0, is_queued=True)
    old, state = [_replica(0), _replica(1)], _state(_plan(version=2), good_version=1)
    early = _decide(plan, [*old, waits], state=state, now_s=49.0)
    assert (early.actions, early.wake_at_s) == ((), 50.0)
    late = _decide(plan, [*old, waits], state=state, now_s=50.0)
    assert (late.actions, late.notes) == ((EndReplica(2, EndCause.UPDATE_GIVEN_UP),), ("update_given_up",))
    again = _decide(plan, old, state=late.state, now_s=51.0)
    assert (again.actions, again.notes) == ((), ("update_given_up",))
    for other in (replace(waits, is_queued=False), replace(waits, since_s=1.0)):
        assert _decide(plan, [*old, other], state=state, now_s=50.0).notes == ()
    assert _decide(plan, [*old, waits], state=_state(plan, good_version=2), now_s=50.0).notes == ()


def test_an_update_makes_room_where_the_document_allows_it() -> None:
    """With max_unavailable, a replica is retired before its successor runs; never more than that are missing."""
    plan = _plan(version=2, max_surge=0, max_unavailable=1)
    old = [_replica(0), _replica(1)]
    launch = LaunchReplica(2, CapacityKind.ON_DEMAND, None, True)
    first = _decide(plan, old, state=_state(plan, good_version=1))
    assert first.actions == (DrainReplica(0, EndCause.SUPERSEDED), launch)
    rest = [_replica(0, 1, Stage.DRAINING, since_s=100.0), _replica(1)]
    assert _decide(plan, [*rest, _replica(2, 2, Stage.STARTING)], state=first.state).actions == ()
    second = _decide(plan, [*rest, _replica(2, 2)], state=first.state)
    assert second.actions == (DrainReplica(1, EndCause.SUPERSEDED), launch)


def test_late_replicas_of_a_failed_version_end() -> None:
    """When an update is given up, its replicas that are not ready are ended; one that is ready saves the update."""
    plan = _plan(version=2, max_surge=2)
    state = _state(plan, good_version=1, failures=FAILURES_IN_A_ROW - 1, launching=2)
    lost = Loss(_replica(2, 2, Stage.STARTING, replaces=0), LossKind.FAILED)
    late = _replica(3, 2, Stage.STARTING, replaces=1)
    old = [_replica(0), _replica(1)]
    given_up = _decide(plan, [*old, late], [lost], state)
    assert given_up.actions == (EndReplica(3, EndCause.UPDATE_GIVEN_UP),)
    ready = replace(late, stage=Stage.READY)
    saved = _decide(plan, [*old, ready], [lost], state)
    assert saved.actions[0] == DrainReplica(1, EndCause.SUPERSEDED)
    assert (saved.state.version_to_launch(2), saved.notes) == (2, ())


def test_failures_belong_to_a_version() -> None:
    """The update that repairs a version which fails again and again is neither delayed nor given up because of it."""
    first = _plan(version=1, target=1)
    state = _state(first, good_version=1)
    for _ in range(FAILURES_IN_A_ROW):
        state = _decide(first, [], [Loss(_replica(0, stage=Stage.READY), LossKind.FAILED)], state).state
    assert (state.failures, state.retry_at_s) == (FAILURES_IN_A_ROW, 120.0)
    repaired = _plan(version=2, target=1)
    begun = _decide(repaired, [], [Loss(_replica(1), LossKind.FAILED)], state)
    assert begun.actions == (LaunchReplica(2, CapacityKind.ON_DEMAND, None, True),)
    assert (begun.state.failures, begun.state.version_to_launch(2)) == (0, 2)


_SPOT = {"kind": CapacityKind.SPOT, "zone": "old"}


@pytest.mark.parametrize("policy", ["spothedge", "on-demand"])
def test_a_rolling_update_to_other_zones_keeps_what_serves(policy: str) -> None:
    """Replicas in zones that the newest version does not allow serve until enough of those of the policy are ready."""
    zones = frozenset() if policy == "on-demand" else frozenset(zone.name for zone in _ZONES)
    plan = _plan(version=2, policy=policy, zones=zones)
    replicas = {number: _replica(number, **_SPOT) for number in range(2)}
    state, number, least = _state(plan, good_version=1), 2, 2
    for second in range(40):
        found = _decide(plan, list(replicas.values()), (), state, 100.0 + 10.0 * second)
        state = found.state
        for action in found.actions:
            if isinstance(action, LaunchReplica):
                one = _replica(number, action.version, Stage.STARTING, kind=action.kind, zone=action.zone)
                replicas[number], number = replace(one, replaces=action.replaces), number + 1
            elif isinstance(action, DrainReplica):
                del replicas[action.number]
            else:
                assert replicas.pop(action.number).stage is Stage.STARTING
        starting = [one for one in replicas.values() if one.stage is Stage.STARTING]
        old = [one for one in replicas.values() if one.version == 1]
        assert len(starting) <= 1 or not old
        least = min(least, len(replicas) - len(starting))
        for one in starting:
            replicas[one.number] = replace(one, stage=Stage.READY)
    assert least == 2
    assert {(one.version, one.zone in zones or one.zone is None) for one in replicas.values()} == {(2, True)}


def test_a_blue_green_update_to_other_zones_switches_at_once() -> None:
    """All replacements are ready before any replica is drained, although the policy sees only the new ones."""
    plan = _plan(version=2, policy="spothedge", zones=frozenset(zone.name for zone in _ZONES), blue_green=True)
    old = [_replica(number, **_SPOT) for number in range(2)]
    first = _decide(plan, old)
    launched = [action for action in first.actions if isinstance(action, LaunchReplica)]
    assert [one.zone for one in launched] == ["z-0", "z-1"] and len(first.actions) == 2
    new = [_replica(2 + at, 2, kind=one.kind, zone=one.zone) for at, one in enumerate(launched)]
    starting = replace(new[1], stage=Stage.STARTING)
    assert _decide(plan, [*old, new[0], starting], (), first.state).actions == ()
    switched = _decide(plan, [*old, *new], (), first.state).actions
    assert switched == (DrainReplica(0, EndCause.SUPERSEDED), DrainReplica(1, EndCause.SUPERSEDED))


def test_an_update_to_spot_only_keeps_on_demand_replicas_until_spot_ones_are_ready() -> None:
    """The policy wants no on-demand replica from the first decision on."""
    plan = _plan(version=2, target=1, policy="spothedge", zones=frozenset(zone.name for zone in _ZONES))
    plan = replace(plan, policy=make_policy("spothedge", PolicySettings(_ZONES, 0, fallback=False)))
    first = _decide(plan, [_replica(0)])
    assert first.actions == (LaunchReplica(2, CapacityKind.SPOT, "z-0", True),)
    starting = _replica(1, 2, Stage.STARTING, kind=CapacityKind.SPOT, zone="z-0")
    assert _decide(plan, [_replica(0), starting], (), first.state).actions == ()
    ready = replace(starting, stage=Stage.READY)
    assert _decide(plan, [_replica(0), ready], (), first.state).actions == (DrainReplica(0, EndCause.SCALED_DOWN),)


def test_times_follow_a_clock_that_is_set_back() -> None:
    """A pause does not last until the clock has caught up."""
    plan = _plan(target=1, policy="spothedge")
    spot = _replica(0, kind=CapacityKind.SPOT, zone="z-0")
    state = _decide(plan, [spot], now_s=5000.0).state
    state = _decide(plan, [], [Loss(spot, LossKind.PREEMPTED)], state, now_s=6000.0).state
    refused = Loss(_replica(1, stage=Stage.STARTING, kind=CapacityKind.SPOT, zone="z-1"), LossKind.REFUSED)
    state = _decide(plan, [], [refused, Loss(_replica(2), LossKind.FAILED)], state, now_s=6010.0).state
    back = state.begun(1, 10.0)
    assert (back.retry_at_s, dict(back.policy.retry_at_s)) == (15.0, {"z-1": 310.0})


def test_failures_are_retried_with_backoff() -> None:
    """Replicas that fail by themselves are launched again after 5, 10, 20 seconds; a ready replica ends the backoff."""
    plan, now_s = _plan(target=1), 100.0
    state = _state(plan)
    for pause_s in (5.0, 10.0, 20.0):
        lost = Loss(_replica(0, stage=Stage.STARTING), LossKind.FAILED)
        paused = _decide(plan, [], [lost], state, now_s)
        assert (paused.actions, paused.wake_at_s, paused.notes) == ((), now_s + pause_s, ("replicas_fail",))
        state, now_s = paused.state, now_s + pause_s
        assert len(_decide(plan, [], (), state, now_s).actions) == 1
    again = _decide(plan, [_replica(1, was_ready=False)], (), state, now_s)
    assert (again.state.failures, again.state.retry_at_s) == (0, 0.0)


@pytest.mark.parametrize("stage", [Stage.DRAINING, Stage.LEAVING])
def test_a_replica_that_was_to_end_does_not_fail(stage: Stage) -> None:
    """Whatever the exit status of a replica that drains or leaves is, the next launch is not delayed."""
    lost = Loss(_replica(0, stage=stage), LossKind.FAILED)
    decision = _decide(_plan(), [], [lost])
    assert (decision.state.failures, decision.state.retry_at_s) == (0, 0.0)
    assert any(isinstance(action, LaunchReplica) for action in decision.actions)


def test_nothing_is_launched_while_the_installation_stops() -> None:
    """After the pause, which covers the stop, replicas are launched again."""
    lost = Loss(_replica(0, stage=Stage.LEAVING), LossKind.STOPPED)
    decision = _decide(_plan(), [], [lost])
    assert (decision.actions, decision.notes, decision.wake_at_s) == ((), ("installation_stopped",), 130.0)
    later = _decide(_plan(), [], (), decision.state, 130.0)
    assert any(isinstance(action, LaunchReplica) for action in later.actions)


def test_a_notice_starts_the_replacement_at_once() -> None:
    """A spot replica that is leaving counts as preempted: it is replaced elsewhere, and its end is no second event."""
    plan = _plan(target=1, policy="spothedge")
    state = _state(plan)
    leaving = _replica(0, stage=Stage.LEAVING, kind=CapacityKind.SPOT, zone="z-0", was_ready=True)
    found = _decide(plan, [leaving], (), state)
    assert LaunchReplica(1, CapacityKind.SPOT, "z-1", True) in found.actions
    assert found.state.policy.preempting == ("z-0",)
    replacement = _replica(1, stage=Stage.STARTING, kind=CapacityKind.SPOT, zone="z-1")
    stand_in = _replica(2, stage=Stage.STARTING, is_base=False)
    gone = Loss(replace(leaving, was_leaving=True), LossKind.PREEMPTED)
    after = _decide(plan, [replacement, stand_in], [gone], found.state)
    assert (after.actions, after.state.policy) == ((), found.state.policy)


def test_a_refused_successor_is_followed_by_an_on_demand_one() -> None:
    """If the zone of a predecessor has no capacity, its successor is an on-demand replica, so the update goes on."""
    plan = _plan(version=2, target=1, policy="spothedge")
    old = _replica(0, kind=CapacityKind.SPOT, zone="z-0")
    successor = _replica(1, 2, Stage.STARTING, kind=CapacityKind.SPOT, zone="z-0", replaces=0)
    found = _decide(plan, [old], [Loss(successor, LossKind.REFUSED)])
    assert found.actions == (LaunchReplica(2, CapacityKind.ON_DEMAND, None, True, replaces=0),)


def test_drained_replicas_end_after_their_time() -> None:
    """A draining replica is ended after `drain_s`, not before; one that does not answer for too long is ended, too."""
    plan = _plan(target=0)
    draining = _replica(0, stage=Stage.DRAINING, since_s=100.0)
    assert _decide(plan, [draining], now_s=129.0).actions == ()
    assert _decide(plan, [draining], now_s=129.0).wake_at_s == 130.0
    assert _decide(plan, [draining], now_s=130.0).actions == (EndReplica(0, EndCause.SUPERSEDED),)
    silent = _replica(1, stage=Stage.UNREADY, since_s=0.0, was_ready=True)
    ended = _decide(_plan(target=1, unready_s=60.0), [silent], now_s=60.0).actions
    assert ended == (EndReplica(1, EndCause.NOT_ANSWERING), LaunchReplica(1, CapacityKind.ON_DEMAND, None, True))


def test_replicas_above_the_minimum_have_a_lower_level() -> None:
    """`min_replicas` run at the service's level; a lost one is replaced at that level. The number may change."""
    plan = _plan(target=3, min_replicas=1)
    levels = [one.is_base for one in _decide(plan, []).actions if isinstance(one, LaunchReplica)]
    assert levels == [True, False, False]
    rest = [_replica(1, is_base=False), _replica(2, is_base=False)]
    lost = Loss(_replica(0), LossKind.EVICTED)
    assert _decide(plan, rest, [lost]).actions == (LaunchReplica(1, CapacityKind.ON_DEMAND, None, True),)
    three = [_replica(0), *rest]
    assert _decide(plan, three).actions == ()
    raised = _decide(
        replace(plan, min_replicas=2), [three[0], _replica(1, stage=Stage.UNREADY, is_base=False), rest[1]]
    )
    assert raised.actions == (SetReplicaBase(2, is_base=True),)
    lowered = _decide(plan, [_replica(0), _replica(1), _replica(2, is_base=False)])
    assert lowered.actions == (SetReplicaBase(1, is_base=False),)


def test_the_drain_of_a_replica_that_leaves_ends_when_it_is_idle() -> None:
    """A replica that is evicted or reclaimed is released once all balancers say that nothing is in progress."""
    plan = _plan(target=0)
    leaving = _replica(0, stage=Stage.LEAVING, was_leaving=True)
    for ongoing, actions in ((None, ()), (1, ()), (0, (ReleaseReplica(0),))):
        assert _decide(plan, [replace(leaving, ongoing=ongoing)]).actions == actions
    # Counts from before it left do not show that no request is on its way.
    assert _decide(plan, [replace(leaving, ongoing=0, was_leaving=False)]).actions == ()


def test_the_target_follows_what_replicas_report() -> None:
    """Without a balancer, too, the loads of replicas that serve decide; those of replicas that leave do not count."""
    scaler = LoadAutoscaler(math.inf, most=9, upscale_delay_s=0.0, downscale_delay_s=0.0, load=100.0)
    plan = _plan(autoscaler=scaler)
    two = [_replica(0, load=180.0), _replica(1, load=90.0), _replica(2, stage=Stage.DRAINING, load=500.0)]
    assert decide(plan, _state(plan), two, (), None, 100.0).target == 3
    silent = [replace(one, load=None) for one in two]
    assert decide(plan, _state(plan, scaling=ScalingState(2)), silent, (), None, 100.0).target == 2


def test_on_demand_launches_pause_after_a_refusal() -> None:
    """A refused on-demand launch is not repeated before `refused_pause_s`, and the service says why it waits."""
    plan = _plan(target=1, refused_pause_s=60.0)
    found = _decide(plan, [], [Loss(_replica(0, stage=Stage.STARTING), LossKind.REFUSED)])
    assert (found.actions, found.wake_at_s, found.notes) == ((), 160.0, ("on_demand_refused",))
    assert len(_decide(plan, [], (), found.state, 160.0).actions) == 1


def test_a_stopping_service_ends_all_replicas() -> None:
    """When a service is to end, every replica is ended, and none is launched."""
    found = _decide(_plan(stopping=True), [_replica(0), _replica(1, stage=Stage.DRAINING)])
    assert found.actions == (EndReplica(0, EndCause.SERVICE_ENDED), EndReplica(1, EndCause.SERVICE_ENDED))


def test_new_limits_apply_at_once() -> None:
    """An update that changes the numbers of replicas does not wait for the delays of the autoscaler."""
    state = _state(_plan(target=5))
    fixed = decide(_plan(target=2), state, [], (), 0, 100.0)
    assert fixed.target == 2
    scaled = replace(_plan(), autoscaler=LoadAutoscaler(1.0, least=1, most=3))
    assert decide(scaled, state, [], (), 0, 100.0).target == 3


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[ServicePlan, list[ReplicaFacts], list[Loss]]:
    plan = _plan(draw(st.integers(1, 3)), draw(st.integers(0, 4)), draw(st.sampled_from(sorted(POLICIES))))
    plan = replace(
        plan, blue_green=draw(st.booleans()), max_surge=draw(st.integers(0, 2)), max_unavailable=draw(st.integers(0, 2))
    )
    replicas: list[ReplicaFacts] = []
    for number in range(draw(st.integers(0, 6))):
        zone = draw(st.sampled_from([None, *(zone.name for zone in _ZONES)]))
        kind = CapacityKind.ON_DEMAND if zone is None else CapacityKind.SPOT
        stage = draw(st.sampled_from(Stage))
        one = _replica(number, draw(st.integers(1, plan.version)), stage, kind=kind, zone=zone)
        one = replace(one, was_ready=draw(st.booleans()), since_s=draw(st.sampled_from([0.0, 90.0])))
        taken = {other.replaces for other in replicas}
        before = [other.number for other in replicas if other.replaces is None and other.number not in taken]
        replaces = draw(st.sampled_from([None, *before]))
        replicas.append(replace(one, replaces=replaces))
    lost = [one for one in replicas if draw(st.booleans())]
    losses = [Loss(one, draw(st.sampled_from(LossKind))) for one in lost]
    return plan, [one for one in replicas if one not in lost], losses


@settings(max_examples=300)
@given(_worlds())
def test_a_decision_is_consistent(world: tuple[ServicePlan, list[ReplicaFacts], list[Loss]]) -> None:
    """From any facts: each replica gets at most one action, surge is bounded, and the state survives JSON."""
    plan, replicas, losses = world
    found = decide(plan, _state(plan), replicas, losses, 0, 100.0)
    changed = [action.number for action in found.actions if not isinstance(action, LaunchReplica)]
    assert len(changed) == len(set(changed)) and set(changed) <= {one.number for one in replicas}
    ended = {one.number for one in found.actions if isinstance(one, DrainReplica | EndReplica)}
    successors = [one for one in found.actions if isinstance(one, LaunchReplica) and one.replaces is not None]
    there = {one.number for one in replicas} - ended
    assert {one.replaces for one in successors} <= there
    if not plan.blue_green:
        assert len(successors) <= plan.max_surge
    assert SERVICE_STATE.validate_json(SERVICE_STATE.dump_json(found.state)) == found.state


def test_an_ejected_replica_is_replaced_after_a_time() -> None:
    """Its successor during an update does not count as ready; after `unready_s` it is drained, and the policy replaces
    it. A note says so.
    """
    plan = _plan(version=2)
    sick = _replica(2, 2, Stage.UNREADY, since_s=50.0, was_ready=True, is_ejected=True, replaces=0)
    early = _decide(plan, [_replica(0), _replica(1), sick])
    assert early.actions == () and early.notes == (REPLICA_EJECTED,)
    assert early.wake_at_s == 50.0 + plan.unready_s
    alone = _plan(target=1)
    late = _decide(alone, [replace(sick, version=1, replaces=None)], now_s=50.0 + alone.unready_s)
    assert late.actions == (
        DrainReplica(2, EndCause.FAILING),
        LaunchReplica(1, CapacityKind.ON_DEMAND, None, True),
    )


def test_idle_replicas_end_first_and_drains_end_when_idle() -> None:
    """The busy replica stays although it is the newest. A drain ends once the replica is known to be idle."""
    replicas = [_replica(number, ongoing=int(number == 2)) for number in range(3)]
    after = _decide(_plan(target=1), replicas)
    assert after.actions == (DrainReplica(0, EndCause.SCALED_DOWN), DrainReplica(1, EndCause.SCALED_DOWN))
    idle = _replica(0, stage=Stage.DRAINING, since_s=99.0, ongoing=0)
    for one, ended in ((idle, True), (replace(idle, ongoing=2), False), (replace(idle, ongoing=None), False)):
        actions = _decide(_plan(target=1), [one, replicas[2]]).actions
        assert actions == ((EndReplica(0, EndCause.SUPERSEDED),) if ended else ())
