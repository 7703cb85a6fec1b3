"""The policies: their bounds under arbitrary events, their examples, and their independence of the process."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

import services.spot.policies
from domain.capacity import CapacityKind
from research.spot.baselines import EvenSpread, MarkLike, RoundRobin
from research.spot.policies import POLICIES, make_policy
from services.spot.placement import DynamicPlacement
from services.spot.policies import PolicySettings
from services.spot.spothedge import SpotHedge, on_demand_wanted, spot_wanted
from services.spot.values import (
    Launch,
    Observation,
    PolicyState,
    ReplicaState,
    SpotReplica,
    Terminate,
    ZoneEvent,
    ZoneEventKind,
)
from tests.services.spot.strategies import zones_of

_STATE = TypeAdapter(PolicyState)

SPOT, ON_DEMAND = CapacityKind.SPOT, CapacityKind.ON_DEMAND
READY, STARTING = ReplicaState.READY, ReplicaState.PROVISIONING
_SMALL = st.integers(0, 6)


@given(_SMALL, _SMALL, st.integers(0, 20), _SMALL)
def test_bounds_of_on_demand(target: int, extra: int, ready: int, base: int) -> None:
    """O(t) is the formula where no base is set, and always from min(base, target) to the target."""
    wanted = on_demand_wanted(target, extra, ready, base)
    assert min(base, target) <= wanted <= target
    assert wanted >= on_demand_wanted(target, extra, ready + 1, base)
    if base == 0:
        assert wanted == max(0, min(target, target + extra - ready))
        assert spot_wanted(target, extra) == (target + extra if target else 0)
    if ready >= spot_wanted(target, extra, base):
        assert wanted == min(base, target)


@st.composite
def _observations(draw: st.DrawFn) -> tuple[int, list[Observation]]:
    count = draw(st.integers(2, 4))
    names = [zone.name for zone in zones_of(count)]
    spot_replica = st.tuples(st.just(SPOT), st.sampled_from(names), st.sampled_from(ReplicaState))
    replica = st.one_of(spot_replica, st.tuples(st.just(ON_DEMAND), st.none(), st.sampled_from(ReplicaState)))
    event = st.builds(ZoneEvent, st.sampled_from(ZoneEventKind), st.sampled_from(names))
    out, now_s = [], 0.0
    for _ in range(draw(st.integers(1, 6))):
        now_s += draw(st.sampled_from([0.0, 100.0, 300.0]))
        seen = tuple(SpotReplica(k, *one) for k, one in enumerate(draw(st.lists(replica, max_size=9))))
        out.append(Observation(now_s, draw(st.integers(0, 4)), seen, tuple(draw(st.lists(event, max_size=4)))))
    return count, out


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=30)
@given(_observations(), st.integers(0, 2))
def test_actions_are_within_bounds(name: str, given_: tuple[int, list[Observation]], extra: int) -> None:
    """After the actions at most N_tar + N_extra spot and N_tar on-demand replicas exist, and states survive JSON.

    `spothedge+` chooses N_extra itself, up to N_tar.
    """
    count, observations = given_
    policy = make_policy(name, PolicySettings(zones_of(count), extra))
    state = policy.start()
    for observation in observations:
        stored = state
        if name in services.spot.policies.POLICIES:
            stored = _STATE.validate_json(_STATE.dump_json(state))
        state, actions = policy.decide(state, observation)
        assert policy.decide(stored, observation) == (state, actions)
        ended = [action.number for action in actions if isinstance(action, Terminate)]
        assert len(set(ended)) == len(ended)
        assert set(ended) <= {one.number for one in observation.replicas}
        left = [one.kind for one in observation.replicas if one.number not in ended]
        left += [action.kind for action in actions if isinstance(action, Launch)]
        own = {"mark-like": 4 * observation.target, "spothedge+": 2 * observation.target}
        most = own.get(name, observation.target + extra)
        starting = sum(one.is_spot and not one.is_ready for one in observation.replicas)
        assert left.count(SPOT) <= (max(most, observation.target + starting) if name == "mark-like" else most)
        assert left.count(ON_DEMAND) <= observation.target
        launches = Counter(action.zone for action in actions if isinstance(action, Launch))
        for zone in (launches.keys() & state.waiting(observation.now_s)) if name != "mark-like" else ():
            # Only `spothedge+` launches in a zone that refused, as many as it held then.
            assert name == "spothedge+", zone
            held = sum(one.zone == zone and one.number not in ended for one in observation.replicas)
            assert held + launches[zone] <= (state.knowledge.zones[zone].room or 0)


def test_spothedge_in_an_example() -> None:
    """A refused zone is avoided; on-demand replicas start at once, and end when enough spot replicas are ready."""
    policy = SpotHedge(DynamicPlacement(zones_of(3)), extra=1)
    a, b, c = (zone.name for zone in policy.placement.zones)
    state, actions = policy.decide(policy.start(), Observation(0.0, 2, ()))
    assert actions == (Launch(SPOT, a), Launch(SPOT, b), Launch(SPOT, c), *[Launch(ON_DEMAND)] * 2)

    # Zone b refuses. Its replica goes to one of the other two zones.
    there = [SpotReplica(0, SPOT, a, STARTING), SpotReplica(1, SPOT, c, STARTING)]
    there += [SpotReplica(2, ON_DEMAND, None, STARTING), SpotReplica(3, ON_DEMAND, None, STARTING)]
    state, actions = policy.decide(state, Observation(0.0, 2, tuple(there), (ZoneEvent(ZoneEventKind.REFUSED, b),)))
    assert (state.available, state.preempting, actions) == ((a, c), (b,), (Launch(SPOT, a),))

    # Two spot replicas are ready, so one on-demand replica is enough: the newer one ends.
    ready = [
        SpotReplica(0, SPOT, a, READY),
        SpotReplica(1, SPOT, c, READY),
        *there[2:],
        SpotReplica(4, SPOT, a, STARTING),
    ]
    state, actions = policy.decide(state, Observation(120.0, 2, tuple(ready), (ZoneEvent(ZoneEventKind.READY, a),)))
    assert actions == (Terminate(3),)

    # Zone c takes its replica. One active zone is left, so all zones are active again, but b is tried only later.
    events = (ZoneEvent(ZoneEventKind.PREEMPTED, c),)
    left = tuple(one for one in ready if one.number not in (1, 3))
    later, actions = policy.decide(state, Observation(200.0, 2, left, events))
    assert (later.available, actions) == ((a, b, c), (Launch(SPOT, c), Launch(ON_DEMAND)))
    later, actions = policy.decide(state, Observation(300.0, 2, left, events))
    assert actions == (Launch(SPOT, b), Launch(ON_DEMAND))


def test_base_of_on_demand_replicas() -> None:
    """A base is kept while enough spot replicas are ready, and reduces the spot replicas."""
    policy = SpotHedge(DynamicPlacement(zones_of(2)), extra=1, base=1)
    a, b = (zone.name for zone in policy.placement.zones)
    _, actions = policy.decide(policy.start(), Observation(0.0, 2, ()))
    assert actions == (Launch(SPOT, a), Launch(SPOT, b), Launch(ON_DEMAND), Launch(ON_DEMAND))
    there = (SpotReplica(0, SPOT, a, READY), SpotReplica(1, SPOT, b, READY))
    both = (*there, SpotReplica(2, ON_DEMAND, None, READY), SpotReplica(3, ON_DEMAND, None, STARTING))
    assert policy.decide(policy.start(), Observation(0.0, 2, both))[1] == (Terminate(3),)


def test_even_spread_stays_in_its_zones() -> None:
    """A zone that refuses leaves the service with fewer replicas, until its wait ends."""
    policy = EvenSpread(zones_of(2))
    a, b = (zone.name for zone in policy.zones)
    state, actions = policy.decide(policy.start(), Observation(0.0, 3, ()))
    assert actions == (Launch(SPOT, a), Launch(SPOT, a), Launch(SPOT, b))
    there = (SpotReplica(0, SPOT, a, STARTING), SpotReplica(1, SPOT, a, STARTING))
    state, actions = policy.decide(state, Observation(0.0, 3, there, (ZoneEvent(ZoneEventKind.REFUSED, b),)))
    assert actions == ()
    assert policy.decide(state, Observation(299.0, 3, there))[1] == ()
    assert policy.decide(state, Observation(300.0, 3, there))[1] == (Launch(SPOT, b),)


def test_round_robin_takes_the_next_zone() -> None:
    """Each launch is in the zone after the last one; zones that refused are left out; the state has the cursor."""
    policy = RoundRobin(zones_of(3))
    a, b, c = (zone.name for zone in policy.zones)
    state, actions = policy.decide(policy.start(), Observation(0.0, 2, ()))
    assert (state.cursor, actions) == (2, (Launch(SPOT, a), Launch(SPOT, b)))
    there = (SpotReplica(0, SPOT, b, STARTING),)
    state, actions = policy.decide(state, Observation(0.0, 2, there, (ZoneEvent(ZoneEventKind.REFUSED, a),)))
    assert actions == (Launch(SPOT, c),)
    state, actions = policy.decide(state, Observation(0.0, 2, there, (ZoneEvent(ZoneEventKind.REFUSED, c),)))
    assert actions == (Launch(SPOT, b),)
    assert policy.decide(state, Observation(0.0, 2, there, (ZoneEvent(ZoneEventKind.REFUSED, b),)))[1] == ()


def test_mark_like_launches_too_many() -> None:
    """While replicas start for longer than a round, each round launches the missing ones again, up to a limit."""
    policy = MarkLike(zones_of(2))
    state, there = policy.start(), ()
    for k in range(5):
        state, actions = policy.decide(state, Observation(300.0 * k, 2, there))
        launched = [one for one in actions if isinstance(one, Launch)]
        assert len(launched) == (2 if k < 3 else 0)
        there += tuple(SpotReplica(len(there) + n, SPOT, one.zone, STARTING) for n, one in enumerate(launched))
        assert policy.decide(state, Observation(300.0 * k + 1, 2, there))[1] == ()
    ready = tuple(SpotReplica(one.number, SPOT, one.zone, READY) for one in there)
    assert [one.number for one in policy.decide(state, Observation(1500.0, 2, ready))[1]] == [2, 3, 4, 5]
