"""The controller of a service during updates: rolling and blue-green ones, those that fail, and those without room."""

from dataclasses import replace

import pytest

from activities.services.replica_rows import LiveReplica
from domain.capacity import CapacityKind
from domain.phases import Phase
from infra.db.services import ServiceReplica
from services.losses import FAILURES_IN_A_ROW
from services.spot.policies import PolicySettings, make_policy
from services.values import (
    DrainReplica,
    EndCause,
    EndReplica,
    LaunchReplica,
    Loss,
    LossKind,
    Stage,
)
from tests.services.controlling import DRAIN_S, ZONES, decide_on, make_plan, make_replica, make_state

_SPOT = {"kind": CapacityKind.SPOT, "zone": "old"}


def test_a_rolling_update_adds_one_replica_at_a_time() -> None:
    """A predecessor is drained only when its successor is ready, and the next successor is launched only then."""
    plan = make_plan(version=2)
    first = decide_on(plan, [make_replica(0), make_replica(1)])
    assert first.actions == (LaunchReplica(2, CapacityKind.ON_DEMAND, None, True, replaces=0),)
    starting = make_replica(2, 2, Stage.STARTING, replaces=0)
    assert decide_on(plan, [make_replica(0), make_replica(1), starting]).actions == ()
    ready = replace(starting, stage=Stage.READY)
    second = decide_on(plan, [make_replica(0), make_replica(1), ready])
    assert second.actions == (
        DrainReplica(0, EndCause.SUPERSEDED),
        LaunchReplica(2, CapacityKind.ON_DEMAND, None, True, replaces=1),
    )
    assert second.wake_at_s == 100.0 + DRAIN_S
    assert second.state.good_version == 2


def test_a_blue_green_update_switches_at_once() -> None:
    """All successors are launched together, and no predecessor is drained before all of them are ready."""
    plan = make_plan(version=2, blue_green=True)
    old = [make_replica(0), make_replica(1)]
    launched = decide_on(plan, old).actions
    assert [one.replaces for one in launched if isinstance(one, LaunchReplica)] == [0, 1]
    new = [make_replica(2, 2, replaces=0), make_replica(3, 2, Stage.STARTING, replaces=1)]
    assert decide_on(plan, [*old, *new]).actions == ()
    switched = decide_on(plan, [*old, new[0], make_replica(3, 2, replaces=1)]).actions
    assert switched == (DrainReplica(0, EndCause.SUPERSEDED), DrainReplica(1, EndCause.SUPERSEDED))


def test_an_update_that_fails_is_given_up() -> None:
    """After some failed replicas of a version that was never ready, the version before stays and is launched again."""
    plan = make_plan(version=2)
    state, now_s = make_state(plan, good_version=1), 100.0
    old = [make_replica(0), make_replica(1)]
    for failure in range(FAILURES_IN_A_ROW):
        lost = Loss(make_replica(2 + failure, 2, Stage.STARTING, replaces=0), LossKind.FAILED)
        found = decide_on(plan, old, [lost], state, now_s)
        assert found.actions == ()  # The backoff has begun.
        state, now_s = found.state, state.retry_at_s + 1000.0
    assert state.failed_version == 2
    after = decide_on(plan, old, (), state, now_s)
    assert (after.actions, after.notes) == ((), ("update_given_up",))
    replaced = decide_on(plan, old[:1], [Loss(old[1], LossKind.PREEMPTED)], state, now_s).actions
    assert replaced == (LaunchReplica(1, CapacityKind.ON_DEMAND, None, True),)


def test_replicas_that_machines_refuse_to_start_give_up_no_update() -> None:
    """A launch that fails for a reason that is not the replica's own leads to a backoff, however often it happens."""
    plan = make_plan(version=2)
    state, now_s, pauses_s = make_state(plan, good_version=1), 100.0, []
    old = [make_replica(0), make_replica(1)]
    for refusal in range(2 * FAILURES_IN_A_ROW):
        lost = Loss(make_replica(2 + refusal, 2, Stage.STARTING, replaces=0), LossKind.NOT_STARTED)
        found = decide_on(plan, old, [lost], state, now_s)
        assert found.actions == ()  # The backoff has begun.
        pauses_s.append(found.state.retry_at_s - now_s)
        state, now_s = found.state, found.state.retry_at_s + 1.0
    assert (state.failed_version, state.failures) == (0, 0) and pauses_s[:3] == [5.0, 10.0, 20.0]
    assert decide_on(plan, old, (), state, now_s).actions[0] == LaunchReplica(2, CapacityKind.ON_DEMAND, None, True, 0)


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
    plan = make_plan(version=3)
    stuck = make_replica(2, 2, Stage.STARTING, replaces=0, is_queued=True)
    found = decide_on(plan, [make_replica(0), make_replica(1), stuck], state=make_state(plan, good_version=1))
    assert found.actions == (
        EndReplica(2, EndCause.SUPERSEDED),
        LaunchReplica(3, CapacityKind.ON_DEMAND, None, True, replaces=0),
    )
    back = [make_replica(0, 3), make_replica(1, 3)]  # Version 3 is the way back: `continue_replicas` has moved them.
    found = decide_on(plan, [*back, stuck], state=make_state(plan, good_version=1))
    assert (found.actions, found.state.good_version) == ((EndReplica(2, EndCause.SUPERSEDED),), 3)


def test_an_update_that_finds_no_machines_is_given_up() -> None:
    """Once a replica of it has waited long enough, if none has been ready. The service wakes up for it."""
    plan, waits = make_plan(version=2, queued_s=50.0), make_replica(2, 2, Stage.STARTING, replaces=0, is_queued=True)
    old, state = [make_replica(0), make_replica(1)], make_state(make_plan(version=2), good_version=1)
    early = decide_on(plan, [*old, waits], state=state, now_s=49.0)
    assert (early.actions, early.wake_at_s) == ((), 50.0)
    late = decide_on(plan, [*old, waits], state=state, now_s=50.0)
    assert (late.actions, late.notes) == ((EndReplica(2, EndCause.UPDATE_GIVEN_UP),), ("update_given_up",))
    again = decide_on(plan, old, state=late.state, now_s=51.0)
    assert (again.actions, again.notes) == ((), ("update_given_up",))
    for other in (replace(waits, is_queued=False), replace(waits, since_s=1.0)):
        assert decide_on(plan, [*old, other], state=state, now_s=50.0).notes == ()
    assert decide_on(plan, [*old, waits], state=make_state(plan, good_version=2), now_s=50.0).notes == ()


def test_an_update_makes_room_where_the_document_allows_it() -> None:
    """With max_unavailable, a replica is retired before its successor runs; never more than that are missing."""
    plan = make_plan(version=2, max_surge=0, max_unavailable=1)
    old = [make_replica(0), make_replica(1)]
    launch = LaunchReplica(2, CapacityKind.ON_DEMAND, None, True)
    first = decide_on(plan, old, state=make_state(plan, good_version=1))
    assert first.actions == (DrainReplica(0, EndCause.SUPERSEDED), launch)
    rest = [make_replica(0, 1, Stage.DRAINING, since_s=100.0), make_replica(1)]
    assert decide_on(plan, [*rest, make_replica(2, 2, Stage.STARTING)], state=first.state).actions == ()
    second = decide_on(plan, [*rest, make_replica(2, 2)], state=first.state)
    assert second.actions == (DrainReplica(1, EndCause.SUPERSEDED), launch)


def test_late_replicas_of_a_failed_version_end() -> None:
    """When an update is given up, its replicas that are not ready are ended; one that is ready saves the update."""
    plan = make_plan(version=2, max_surge=2)
    state = make_state(plan, good_version=1, failures=FAILURES_IN_A_ROW - 1, launching=2)
    lost = Loss(make_replica(2, 2, Stage.STARTING, replaces=0), LossKind.FAILED)
    late = make_replica(3, 2, Stage.STARTING, replaces=1)
    old = [make_replica(0), make_replica(1)]
    given_up = decide_on(plan, [*old, late], [lost], state)
    assert given_up.actions == (EndReplica(3, EndCause.UPDATE_GIVEN_UP),)
    ready = replace(late, stage=Stage.READY)
    saved = decide_on(plan, [*old, ready], [lost], state)
    assert saved.actions[0] == DrainReplica(1, EndCause.SUPERSEDED)
    assert (saved.state.version_to_launch(2), saved.notes) == (2, ())


def test_failures_belong_to_a_version() -> None:
    """The update that repairs a version which fails again and again is neither delayed nor given up because of it."""
    first = make_plan(version=1, target=1)
    state = make_state(first, good_version=1)
    for _ in range(FAILURES_IN_A_ROW):
        state = decide_on(first, [], [Loss(make_replica(0, stage=Stage.READY), LossKind.FAILED)], state).state
    assert (state.failures, state.retry_at_s) == (FAILURES_IN_A_ROW, 120.0)
    repaired = make_plan(version=2, target=1)
    begun = decide_on(repaired, [], [Loss(make_replica(1), LossKind.FAILED)], state)
    assert begun.actions == (LaunchReplica(2, CapacityKind.ON_DEMAND, None, True),)
    assert (begun.state.failures, begun.state.version_to_launch(2)) == (0, 2)


@pytest.mark.parametrize("policy", ["spothedge", "on-demand"])
def test_a_rolling_update_to_other_zones_keeps_what_serves(policy: str) -> None:
    """Replicas in zones that the newest version does not allow serve until enough of those of the policy are ready."""
    zones = frozenset() if policy == "on-demand" else frozenset(zone.name for zone in ZONES)
    plan = make_plan(version=2, policy=policy, zones=zones)
    replicas = {number: make_replica(number, **_SPOT) for number in range(2)}
    state, number, least = make_state(plan, good_version=1), 2, 2
    for second in range(40):
        found = decide_on(plan, list(replicas.values()), (), state, 100.0 + 10.0 * second)
        state = found.state
        for action in found.actions:
            if isinstance(action, LaunchReplica):
                one = make_replica(number, action.version, Stage.STARTING, kind=action.kind, zone=action.zone)
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
    plan = make_plan(version=2, policy="spothedge", zones=frozenset(zone.name for zone in ZONES), blue_green=True)
    old = [make_replica(number, **_SPOT) for number in range(2)]
    first = decide_on(plan, old)
    launched = [action for action in first.actions if isinstance(action, LaunchReplica)]
    assert [one.zone for one in launched] == ["z-0", "z-1"] and len(first.actions) == 2
    new = [make_replica(2 + at, 2, kind=one.kind, zone=one.zone) for at, one in enumerate(launched)]
    starting = replace(new[1], stage=Stage.STARTING)
    assert decide_on(plan, [*old, new[0], starting], (), first.state).actions == ()
    switched = decide_on(plan, [*old, *new], (), first.state).actions
    assert switched == (DrainReplica(0, EndCause.SUPERSEDED), DrainReplica(1, EndCause.SUPERSEDED))


def test_an_update_to_spot_only_keeps_on_demand_replicas_until_spot_ones_are_ready() -> None:
    """The policy wants no on-demand replica from the first decision on."""
    plan = make_plan(version=2, target=1, policy="spothedge", zones=frozenset(zone.name for zone in ZONES))
    plan = replace(plan, policy=make_policy("spothedge", PolicySettings(ZONES, 0, fallback=False)))
    first = decide_on(plan, [make_replica(0)])
    assert first.actions == (LaunchReplica(2, CapacityKind.SPOT, "z-0", True),)
    starting = make_replica(1, 2, Stage.STARTING, kind=CapacityKind.SPOT, zone="z-0")
    assert decide_on(plan, [make_replica(0), starting], (), first.state).actions == ()
    ready = replace(starting, stage=Stage.READY)
    assert decide_on(plan, [make_replica(0), ready], (), first.state).actions == (
        DrainReplica(0, EndCause.SCALED_DOWN),
    )
