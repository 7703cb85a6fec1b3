"""Which instances one round over all pools launches and ends: sizes, shortages and buffers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capacity.offers import Offer
from capacity.pools import Instance, Pool
from capacity.sizing_round import MachineLaunch, PoolRound, plan_round
from domain.lifecycle.instances import InstancePhase
from domain.reasons import ReasonCode
from tests.capacity.scaling import CHEAP, DEAR, KEY, POOL, job, shortage

OFFERS = [CHEAP, DEAR]


def idle(number: int, seconds: float = 0.0) -> Instance:
    """Returns an idle machine."""
    return Instance(f"in-{number}", InstancePhase.READY, False, CHEAP, idle_s=seconds)


def busy(number: int) -> Instance:
    """Returns a busy machine."""
    return Instance(f"in-{number}", InstancePhase.READY, True, CHEAP)


def joining(number: int, offer: Offer = CHEAP) -> Instance:
    """Returns a machine that is joining."""
    return Instance(f"in-{number}", InstancePhase.JOINING, False, offer)


def test_machines_of_a_gang_that_does_not_come_are_ended() -> None:
    """A machine that waits for others of its workload is kept for `hold_s`, and then ended with that reason."""
    pool, gang = replace(POOL, idle_s=10, hold_s=60), shortage("wl-1", job(tasks=2))
    there = [replace(idle(1, 59), claims={"wl-1": (1,)}), replace(joining(2), claims={"wl-1": (1,)})]
    assert plan_round({KEY: pool}, {KEY: there}, [gang], OFFERS).end == {}
    there[0] = replace(there[0], idle_s=60)
    planned = plan_round({KEY: pool}, {KEY: there}, [gang], OFFERS)
    assert {name: reason.code for name, reason in planned.end.items()} == {"in-1": ReasonCode.GANG_INCOMPLETE}
    assert planned.claims.keys() == {"in-2"}


@pytest.mark.parametrize(
    ("there", "launched"),
    [
        ([], 2),
        ([idle(1)], 1),
        ([idle(1), joining(2)], 0),
        ([busy(1), busy(2)], 2),
        ([busy(1), busy(2), busy(3)], 1),
        ([busy(1), replace(idle(2), usable=False)], 2),
    ],
)
def test_a_buffer_is_kept(there: list[Instance], launched: int) -> None:
    """A pool keeps its buffer of usable idle machines, within its maximum size."""
    pool = replace(POOL, buffer=2)
    assert plan_round({KEY: pool}, {KEY: there}, [], OFFERS) == PoolRound(
        launch={KEY: [MachineLaunch(CHEAP)] * launched} if launched else {}
    )


def test_what_waits_takes_the_buffer_and_the_buffer_comes_back() -> None:
    """A waiting workload claims the idle machine of the buffer, and another machine is launched for the buffer."""
    pool = replace(POOL, buffer=1)
    planned = plan_round({KEY: pool}, {KEY: [idle(1)]}, [shortage("w")], OFFERS)
    assert planned == PoolRound(launch={KEY: [MachineLaunch(CHEAP)]}, claims={"in-1": {"w": (1,)}})
    full = replace(pool, max_size=1)
    assert plan_round({KEY: full}, {KEY: [idle(1)]}, [shortage("w")], OFFERS) == PoolRound(claims={"in-1": {"w": (1,)}})


def test_a_buffer_stays_when_a_pool_shrinks() -> None:
    """A buffer is kept however long it is idle; idle machines beyond it end, longest idle first."""
    pool = replace(POOL, buffer=2)
    there = [idle(1, 700.0), idle(2, 900.0), idle(3, 800.0)]
    (gone,) = plan_round({KEY: pool}, {KEY: there}, [], OFFERS).end.items()
    assert (gone[0], gone[1].code, gone[1].detail["idle_s"]) == ("in-2", ReasonCode.IDLE, 900)


def test_why_a_buffer_is_missing() -> None:
    """The result says whether a missing buffer had no offer or only refused ones."""
    pools = {KEY: replace(POOL, buffer=2)}
    refused = plan_round(pools, {}, [], [CHEAP], {CHEAP.key}).lacks[KEY]
    assert (refused.missing, refused.offered) == (2, True)
    assert not plan_round(pools, {}, [], []).lacks[KEY].offered


def test_machines_for_the_size_serve_what_waits() -> None:
    """Machines that are launched for a pool's size also serve waiting workloads."""
    planned = plan_round({KEY: Pool(*KEY, 2, max_size=4)}, {}, [shortage("w")], OFFERS)
    assert planned.launch == {KEY: [MachineLaunch(CHEAP, {"w": (1,)}), MachineLaunch(CHEAP)]}


def test_a_removed_pool_ends_its_machines() -> None:
    """All instances of a removed pool end, including busy ones."""
    planned = plan_round({}, {KEY: [idle(1), busy(2)]}, [], OFFERS)
    assert {name: why.code for name, why in planned.end.items()} == dict.fromkeys(
        ("in-1", "in-2"), ReasonCode.POOL_SHRINKS
    )


@given(
    st.integers(0, 3),
    st.integers(0, 4),
    st.integers(0, 6),
    st.lists(st.sampled_from(["idle", "busy", "joining"]), max_size=5),
    st.lists(st.integers(1, 4), max_size=4),
)
def test_done_once_it_is_done(size: int, buffer: int, more: int, there: list[str], waiting: list[int]) -> None:
    """A round keeps the maximum, keeps claimed machines, and the next round changes nothing."""
    pool = Pool(*KEY, size, max_size=size + more, idle_s=600.0, buffer=min(buffer, size + more))
    make = {"idle": lambda n: idle(n, 1000.0), "busy": busy, "joining": joining}
    instances = [make[what](n) for n, what in enumerate(there)]
    shortages = [shortage(f"w{n}", job(tasks)) for n, tasks in enumerate(waiting)]
    planned = plan_round({KEY: pool}, {KEY: instances}, shortages, OFFERS)
    launched = planned.launch.get(KEY, [])
    kept = [replace(one, claims=planned.claims.get(one.id, {})) for one in instances if one.id not in planned.end]
    assert len(kept) + len(launched) <= max(pool.most, len(kept))
    assert planned.end.keys().isdisjoint(planned.claims)
    after = kept + [replace(joining(100 + n, launch.offer), claims=launch.claims) for n, launch in enumerate(launched)]
    again = plan_round({KEY: pool}, {KEY: after}, shortages, OFFERS)
    assert (again.launch, again.end) == ({}, {})
    spare = [one for one in after if not one.busy and one.id not in again.claims]
    assert len(spare) >= min(pool.buffer, pool.most - (len(after) - len(spare)))
