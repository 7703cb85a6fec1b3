"""The controller of a service's replicas: the same decisions as a replay, failures and draining."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domain.capacity import CapacityKind
from research.spot.answers import AnswerSettings
from research.spot.replay import ReplaySettings, replay_spans
from research.spot.traces import SpotTrace
from services.controller import decide
from services.spot.autoscaler import LoadAutoscaler, ScalingState
from services.spot.policies import POLICIES, PolicySettings, make_policy
from services.spot.values import Action, Launch, Observation, PolicyState, SpotPolicy
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
    ServicePlan,
    SetReplicaBase,
    Stage,
)
from tests.depth import examples
from tests.services.controlling import ZONES, decide_on, fixed_load, make_plan, make_replica, make_state
from tests.services.market import Launched, Market
from tests.services.spot.strategies import traces


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
@settings(max_examples=examples(200))
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
    plan = ServicePlan(live, fixed_load(target), version=1, policy_speed=speed)
    fast = replace(trace, gap_s=trace.gap_s / speed)
    soon = replace(answers, refused_s=answers.refused_s / speed, granted_s=answers.granted_s / speed)
    launched = Market(fast, plan, cold_s / speed, soon).run(0, trace.ticks)
    assert live.asked == replayed.asked
    assert len(launched) == result.launches


def test_times_follow_a_clock_that_is_set_back() -> None:
    """A pause does not last until the clock has caught up."""
    plan = make_plan(target=1, policy="spothedge")
    spot = make_replica(0, kind=CapacityKind.SPOT, zone="z-0")
    state = decide_on(plan, [spot], now_s=5000.0).state
    state = decide_on(plan, [], [Loss(spot, LossKind.PREEMPTED)], state, now_s=6000.0).state
    refused = Loss(make_replica(1, stage=Stage.STARTING, kind=CapacityKind.SPOT, zone="z-1"), LossKind.REFUSED)
    state = decide_on(plan, [], [refused, Loss(make_replica(2), LossKind.FAILED)], state, now_s=6010.0).state
    back = state.begun(1, 10.0)
    assert (back.retry_at_s, dict(back.policy.retry_at_s)) == (15.0, {"z-1": 310.0})


def test_failures_are_retried_with_backoff() -> None:
    """Replicas that fail by themselves are launched again after 5, 10, 20 seconds; a ready replica ends the backoff."""
    plan, now_s = make_plan(target=1), 100.0
    state = make_state(plan)
    for pause_s in (5.0, 10.0, 20.0):
        lost = Loss(make_replica(0, stage=Stage.STARTING), LossKind.FAILED)
        paused = decide_on(plan, [], [lost], state, now_s)
        assert (paused.actions, paused.wake_at_s, paused.notes) == ((), now_s + pause_s, ("replicas_fail",))
        state, now_s = paused.state, now_s + pause_s
        assert len(decide_on(plan, [], (), state, now_s).actions) == 1
    again = decide_on(plan, [make_replica(1, was_ready=False)], (), state, now_s)
    assert (again.state.failures, again.state.retry_at_s) == (0, 0.0)


@pytest.mark.parametrize("stage", [Stage.DRAINING, Stage.LEAVING])
def test_a_replica_that_was_to_end_does_not_fail(stage: Stage) -> None:
    """Whatever the exit status of a replica that drains or leaves is, the next launch is not delayed."""
    lost = Loss(make_replica(0, stage=stage), LossKind.FAILED)
    decision = decide_on(make_plan(), [], [lost])
    assert (decision.state.failures, decision.state.retry_at_s) == (0, 0.0)
    assert any(isinstance(action, LaunchReplica) for action in decision.actions)


def test_nothing_is_launched_while_the_installation_stops() -> None:
    """After the pause, which covers the stop, replicas are launched again."""
    lost = Loss(make_replica(0, stage=Stage.LEAVING), LossKind.STOPPED)
    decision = decide_on(make_plan(), [], [lost])
    assert (decision.actions, decision.notes, decision.wake_at_s) == ((), ("installation_stopped",), 130.0)
    later = decide_on(make_plan(), [], (), decision.state, 130.0)
    assert any(isinstance(action, LaunchReplica) for action in later.actions)


def test_a_notice_starts_the_replacement_at_once() -> None:
    """A spot replica that is leaving counts as preempted: it is replaced elsewhere, and its end is no second event."""
    plan = make_plan(target=1, policy="spothedge")
    state = make_state(plan)
    leaving = make_replica(0, stage=Stage.LEAVING, kind=CapacityKind.SPOT, zone="z-0", was_ready=True)
    found = decide_on(plan, [leaving], (), state)
    assert LaunchReplica(1, CapacityKind.SPOT, "z-1", True) in found.actions
    assert found.state.policy.preempting == ("z-0",)
    replacement = make_replica(1, stage=Stage.STARTING, kind=CapacityKind.SPOT, zone="z-1")
    stand_in = make_replica(2, stage=Stage.STARTING, is_base=False)
    gone = Loss(replace(leaving, was_leaving=True), LossKind.PREEMPTED)
    after = decide_on(plan, [replacement, stand_in], [gone], found.state)
    assert (after.actions, after.state.policy) == ((), found.state.policy)


def test_a_refused_successor_is_followed_by_an_on_demand_one() -> None:
    """If the zone of a predecessor has no capacity, its successor is an on-demand replica, so the update goes on."""
    plan = make_plan(version=2, target=1, policy="spothedge")
    old = make_replica(0, kind=CapacityKind.SPOT, zone="z-0")
    successor = make_replica(1, 2, Stage.STARTING, kind=CapacityKind.SPOT, zone="z-0", replaces=0)
    found = decide_on(plan, [old], [Loss(successor, LossKind.REFUSED)])
    assert found.actions == (LaunchReplica(2, CapacityKind.ON_DEMAND, None, True, replaces=0),)


def test_drained_replicas_end_after_their_time() -> None:
    """A draining replica is ended after `drain_s`, not before; one that does not answer for too long is ended, too."""
    plan = make_plan(target=0)
    draining = make_replica(0, stage=Stage.DRAINING, since_s=100.0)
    assert decide_on(plan, [draining], now_s=129.0).actions == ()
    assert decide_on(plan, [draining], now_s=129.0).wake_at_s == 130.0
    assert decide_on(plan, [draining], now_s=130.0).actions == (EndReplica(0, EndCause.SUPERSEDED),)
    silent = make_replica(1, stage=Stage.UNREADY, since_s=0.0, was_ready=True)
    ended = decide_on(make_plan(target=1, unready_s=60.0), [silent], now_s=60.0).actions
    assert ended == (EndReplica(1, EndCause.NOT_ANSWERING), LaunchReplica(1, CapacityKind.ON_DEMAND, None, True))


def test_replicas_above_the_minimum_have_a_lower_level() -> None:
    """`min_replicas` run at the service's level; a lost one is replaced at that level. The number may change."""
    plan = make_plan(target=3, min_replicas=1)
    levels = [one.is_base for one in decide_on(plan, []).actions if isinstance(one, LaunchReplica)]
    assert levels == [True, False, False]
    rest = [make_replica(1, is_base=False), make_replica(2, is_base=False)]
    lost = Loss(make_replica(0), LossKind.EVICTED)
    assert decide_on(plan, rest, [lost]).actions == (LaunchReplica(1, CapacityKind.ON_DEMAND, None, True),)
    three = [make_replica(0), *rest]
    assert decide_on(plan, three).actions == ()
    raised = decide_on(
        replace(plan, min_replicas=2), [three[0], make_replica(1, stage=Stage.UNREADY, is_base=False), rest[1]]
    )
    assert raised.actions == (SetReplicaBase(2, is_base=True),)
    lowered = decide_on(plan, [make_replica(0), make_replica(1), make_replica(2, is_base=False)])
    assert lowered.actions == (SetReplicaBase(1, is_base=False),)


def test_the_drain_of_a_replica_that_leaves_ends_when_it_is_idle() -> None:
    """A replica that is evicted or reclaimed is released once all balancers say that nothing is in progress."""
    plan = make_plan(target=0)
    leaving = make_replica(0, stage=Stage.LEAVING, was_leaving=True)
    for ongoing, actions in ((None, ()), (1, ()), (0, (ReleaseReplica(0),))):
        assert decide_on(plan, [replace(leaving, ongoing=ongoing)]).actions == actions
    # Counts from before it left do not show that no request is on its way.
    assert decide_on(plan, [replace(leaving, ongoing=0, was_leaving=False)]).actions == ()


def test_the_target_follows_what_replicas_report() -> None:
    """Without a balancer, too, the loads of replicas that serve decide; those of replicas that leave do not count."""
    scaler = LoadAutoscaler(math.inf, most=9, upscale_delay_s=0.0, downscale_delay_s=0.0, load=100.0)
    plan = make_plan(autoscaler=scaler)
    two = [make_replica(0, load=180.0), make_replica(1, load=90.0), make_replica(2, stage=Stage.DRAINING, load=500.0)]
    assert decide(plan, make_state(plan), two, (), None, 100.0).target == 3
    silent = [replace(one, load=None) for one in two]
    assert decide(plan, make_state(plan, scaling=ScalingState(2)), silent, (), None, 100.0).target == 2


def test_on_demand_launches_pause_after_a_refusal() -> None:
    """A refused on-demand launch is not repeated before `refused_pause_s`, and the service says why it waits."""
    plan = make_plan(target=1, refused_pause_s=60.0)
    found = decide_on(plan, [], [Loss(make_replica(0, stage=Stage.STARTING), LossKind.REFUSED)])
    assert (found.actions, found.wake_at_s, found.notes) == ((), 160.0, ("on_demand_refused",))
    assert len(decide_on(plan, [], (), found.state, 160.0).actions) == 1


def test_a_stopping_service_ends_all_replicas() -> None:
    """When a service is to end, every replica is ended, and none is launched."""
    found = decide_on(make_plan(stopping=True), [make_replica(0), make_replica(1, stage=Stage.DRAINING)])
    assert found.actions == (EndReplica(0, EndCause.SERVICE_ENDED), EndReplica(1, EndCause.SERVICE_ENDED))


def test_new_limits_apply_at_once() -> None:
    """An update that changes the numbers of replicas does not wait for the delays of the autoscaler."""
    state = make_state(make_plan(target=5))
    fixed = decide(make_plan(target=2), state, [], (), 0, 100.0)
    assert fixed.target == 2
    scaled = replace(make_plan(), autoscaler=LoadAutoscaler(1.0, least=1, most=3))
    assert decide(scaled, state, [], (), 0, 100.0).target == 3


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[ServicePlan, list[ReplicaFacts], list[Loss]]:
    plan = make_plan(draw(st.integers(1, 3)), draw(st.integers(0, 4)), draw(st.sampled_from(sorted(POLICIES))))
    plan = replace(
        plan, blue_green=draw(st.booleans()), max_surge=draw(st.integers(0, 2)), max_unavailable=draw(st.integers(0, 2))
    )
    replicas: list[ReplicaFacts] = []
    for number in range(draw(st.integers(0, 6))):
        zone = draw(st.sampled_from([None, *(zone.name for zone in ZONES)]))
        kind = CapacityKind.ON_DEMAND if zone is None else CapacityKind.SPOT
        stage = draw(st.sampled_from(Stage))
        one = make_replica(number, draw(st.integers(1, plan.version)), stage, kind=kind, zone=zone)
        one = replace(one, was_ready=draw(st.booleans()), since_s=draw(st.sampled_from([0.0, 90.0])))
        taken = {other.replaces for other in replicas}
        before = [other.number for other in replicas if other.replaces is None and other.number not in taken]
        replaces = draw(st.sampled_from([None, *before]))
        replicas.append(replace(one, replaces=replaces))
    lost = [one for one in replicas if draw(st.booleans())]
    losses = [Loss(one, draw(st.sampled_from(LossKind))) for one in lost]
    return plan, [one for one in replicas if one not in lost], losses


@settings(max_examples=examples(300))
@given(_worlds())
def test_a_decision_is_consistent(world: tuple[ServicePlan, list[ReplicaFacts], list[Loss]]) -> None:
    """From any facts: each replica gets at most one action, surge is bounded, and the state survives JSON."""
    plan, replicas, losses = world
    found = decide(plan, make_state(plan), replicas, losses, 0, 100.0)
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
    plan = make_plan(version=2)
    sick = make_replica(2, 2, Stage.UNREADY, since_s=50.0, was_ready=True, is_ejected=True, replaces=0)
    early = decide_on(plan, [make_replica(0), make_replica(1), sick])
    assert early.actions == () and early.notes == (REPLICA_EJECTED,)
    assert early.wake_at_s == 50.0 + plan.unready_s
    alone = make_plan(target=1)
    late = decide_on(alone, [replace(sick, version=1, replaces=None)], now_s=50.0 + alone.unready_s)
    assert late.actions == (
        DrainReplica(2, EndCause.FAILING),
        LaunchReplica(1, CapacityKind.ON_DEMAND, None, True),
    )


def test_idle_replicas_end_first_and_drains_end_when_idle() -> None:
    """The busy replica stays although it is the newest. A drain ends once the replica is known to be idle."""
    replicas = [make_replica(number, ongoing=int(number == 2)) for number in range(3)]
    after = decide_on(make_plan(target=1), replicas)
    assert after.actions == (DrainReplica(0, EndCause.SCALED_DOWN), DrainReplica(1, EndCause.SCALED_DOWN))
    idle = make_replica(0, stage=Stage.DRAINING, since_s=99.0, ongoing=0)
    for one, ended in ((idle, True), (replace(idle, ongoing=2), False), (replace(idle, ongoing=None), False)):
        actions = decide_on(make_plan(target=1), [one, replicas[2]]).actions
        assert actions == ((EndReplica(0, EndCause.SUPERSEDED),) if ended else ())
