"""Growth of pools for waiting workloads, and shrinking."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capacity.offers import Offer, Shape
from capacity.pools import Pool
from capacity.scaling import Idle, grow, shrink
from domain.capacity import CapacityKind
from domain.scheduling import JobRequest
from tests.capacity.scaling import CHEAP, DEAR, GIB, KEY, POOL, SHAPE, job, shortage


@pytest.mark.parametrize(
    ("wanted", "machines"),
    [
        (job(1, 4), 1),
        (job(3, 4), 3),
        (job(3, 2), 2),
        (job(5, 1), 2),
        (job(1, 5), None),
        (job(1, 1, gpu_types=("h100",)), None),
        (job(3, 0, cpus_milli_per_task=8_000), 2),
        (job(3, 1, memory_bytes_per_task=40 * GIB), 3),
        (job(1, 1, memory_bytes_per_task=65 * GIB), None),
        (job(100, 0, cpus_milli_per_task=0, memory_bytes_per_task=0), 1),
    ],
)
def test_how_many_machines_a_job_needs(wanted: JobRequest, machines: int | None) -> None:
    """The number of machines follows from GPUs, cores and memory, whichever is exhausted first."""
    grown = grow({KEY: replace(POOL, max_size=200)}, {}, [shortage("w", wanted)], [], [CHEAP])
    assert len(grown.launch.get(KEY, [])) == (machines or 0)


def test_one_shortage_is_one_launch() -> None:
    """Instances on their way serve shortages in queue order; only the rest is launched, each for a named workload."""
    waiting = [shortage("first", job(2)), shortage("second")]
    grown = grow({KEY: POOL}, {}, waiting, [], [DEAR, CHEAP])
    assert grown.launch == {KEY: [(CHEAP, {"first": (1,)}), (CHEAP, {"first": (1,)}), (CHEAP, {"second": (1,)})]}
    idle = [Idle(f"in-{n}", KEY, CHEAP) for n in range(3)]
    again = grow({KEY: POOL}, {KEY: 3}, waiting, idle, [DEAR, CHEAP])
    assert again.launch == {}
    assert again.claims == {"in-0": {"first": (1,)}, "in-1": {"first": (1,)}, "in-2": {"second": (1,)}}
    part = grow({KEY: POOL}, {KEY: 1}, waiting, idle[:1], [CHEAP])
    assert part.launch == {KEY: [(CHEAP, {"first": (1,)}), (CHEAP, {"second": (1,)})]}


def test_small_workloads_share_machines() -> None:
    """Small workloads share machines as they will when placed; each claim names its workload."""
    waiting = [shortage(f"w{n}", job(1, 1)) for n in range(5)]
    grown = grow({KEY: POOL}, {}, waiting, [], [CHEAP])
    assert grown.launch == {KEY: [(CHEAP, {f"w{n}": (1,) for n in range(4)}), (CHEAP, {"w4": (1,)})]}
    mixed = [shortage("a", job(1, 3)), shortage("b", job(1, 2)), shortage("c", job(2, 1)), shortage("d", job(1, 1))]
    grown = grow({KEY: POOL}, {}, mixed, [], [CHEAP])
    assert grown.launch == {KEY: [(CHEAP, {"a": (1,), "c": (1,)}), (CHEAP, {"b": (1,), "c": (1,), "d": (1,)})]}
    memory = [shortage(f"w{n}", job(1, 1, memory_bytes_per_task=40 * GIB)) for n in range(2)]
    assert len(grow({KEY: POOL}, {}, memory, [], [CHEAP]).launch[KEY]) == 2


def test_who_waited_for_a_machine_keeps_it() -> None:
    """A workload keeps the machine that it claimed.

    Otherwise a second machine might be launched for one shortage: `a` may run on both offers, `b` on only one of them.
    """
    cheap_is_later = replace(CHEAP, zone="zz")
    offers = [cheap_is_later, DEAR]
    waiting = [shortage("a"), shortage("b", job(capacity=("on_demand",)))]
    first = grow({KEY: POOL}, {}, waiting, [], offers)
    assert first.launch == {KEY: [(cheap_is_later, {"a": (1,)}), (DEAR, {"b": (1,)})]}
    coming = [Idle(f"in-{n}", KEY, offer, claims) for n, (offer, claims) in enumerate(first.launch[KEY])]
    assert grow({KEY: POOL}, {KEY: 2}, waiting, coming, offers).launch == {}
    silent = grow({KEY: POOL}, {KEY: 2}, waiting, coming, [replace(DEAR, provider="other")])
    assert silent.launch == {}  # The provider does not respond now, but the machines that it launched are on their way.
    assert silent.claims == {one.instance: one.claims for one in coming}


def test_a_gang_gets_all_or_nothing_within_the_maximum() -> None:
    """A gang that exceeds the maximum gets no machine; a smaller gang behind it may get some."""
    waiting = [shortage("large", job(5)), shortage("small", job(4))]
    assert grow({KEY: POOL}, {}, waiting, [], [CHEAP]).launch == {KEY: [(CHEAP, {"small": (1,)})] * 4}
    assert grow({KEY: POOL}, {KEY: 1}, waiting, [], [CHEAP]).launch == {}
    assert grow({KEY: replace(POOL, max_size=None)}, {}, waiting, [], [CHEAP]).launch == {}


@pytest.mark.parametrize(
    ("wanted", "pool", "refused", "launched"),
    [
        (job(), POOL, [], CHEAP),
        (job(), POOL, [CHEAP.key], DEAR),
        (job(), POOL, [CHEAP.key, DEAR.key], None),
        (job(capacity=("on_demand",)), POOL, [], DEAR),
        (job(capacity=("voluntary",)), POOL, [], None),
        (job(), replace(POOL, kinds=(CapacityKind.ON_DEMAND,)), [], DEAR),
        (job(capacity=("spot",)), replace(POOL, kinds=(CapacityKind.ON_DEMAND,)), [], None),
        (job(), replace(POOL, max_usd_per_h=3.0), [], None),
        (job(gpu_types=("h100",)), POOL, [], None),
    ],
)
def test_the_cheapest_offer_that_all_allow(
    wanted: JobRequest, pool: Pool, refused: list[tuple[str, str, str, str]], launched: Offer | None
) -> None:
    """The cheapest offer is used that the pool's rules and the workload allow and that was not refused recently."""
    grown = grow({KEY: pool}, {}, [shortage("w", wanted)], [], [DEAR, CHEAP], refused)
    assert grown.launch == ({} if launched is None else {KEY: [(launched, {"w": (1,)})]})


def test_a_pool_grows_only_for_its_tenants() -> None:
    """Workloads of other tenants claim none of its idle machines and cause no launches."""
    pools = {KEY: replace(POOL, tenants=frozenset(("u",)))}
    waiting = [replace(shortage("other"), tenant="t"), replace(shortage("own"), tenant="u")]
    grown = grow(pools, {KEY: 1}, waiting, [Idle("in-0", KEY, CHEAP)], [CHEAP])
    assert (grown.launch, grown.claims) == ({}, {"in-0": {"own": (1,)}})
    assert grow(pools, {}, waiting, [], [CHEAP]).launch == {KEY: [(CHEAP, {"own": (1,)})]}


def test_regions_and_jobs() -> None:
    """All jobs of a workload get machines of the cheapest pool of a region in which only machines are missing."""
    east = ("east", "burst")
    pools = {KEY: POOL, east: replace(POOL, region="east", name="burst")}
    offers = [CHEAP, replace(CHEAP, provider="other", region="east", usd_per_h=3.0)]
    assert set(grow(pools, {}, [shortage("w")], [], offers).launch) == {KEY}
    both = shortage("w", regions=("east", "west"))
    assert set(grow(pools, {}, [both], [], offers).launch) == {east}
    cpus = replace(CHEAP, shape=Shape("cpus", 0, None, 64_000, 256 * GIB), usd_per_h=1.0)
    two = shortage("w", job(2, name="a"), job(3, 0, name="b", cpus_milli_per_task=30_000))
    grown = grow({KEY: POOL}, {}, [two], [], [CHEAP, cpus])
    assert grown.launch == {KEY: [(CHEAP, {"w": (1, 0)})] * 2 + [(cpus, {"w": (0, 2)}), (cpus, {"w": (0, 1)})]}


def test_it_shrinks_to_its_size_after_a_time() -> None:
    """Idle machines beyond the size end, longest idle first; claimed machines stay."""
    idle_s = {"in-1": 700.0, "in-2": 900.0, "in-3": 30.0, "in-4": 800.0}
    pool = replace(POOL, size=1)
    assert shrink(pool, 4, idle_s) == ["in-2", "in-4", "in-1"]
    assert shrink(pool, 4, idle_s, {"in-4"}) == ["in-2", "in-1"]
    assert shrink(pool, 2, idle_s) == ["in-2"]
    assert shrink(pool, 1, idle_s) == []


_KINDS = st.sampled_from([("spot",), ("on_demand",), ("spot", "on_demand")])
_JOBS = st.builds(
    lambda tasks, gpus, cpus, kinds: job(tasks, gpus, cpus_milli_per_task=1000 * cpus, capacity=kinds),
    st.integers(1, 6), st.integers(0, 4), st.integers(1, 9), _KINDS,
)  # fmt: skip
_OFFERS = [CHEAP, DEAR, replace(CHEAP, zone="zz", usd_per_h=3.0), replace(DEAR, zone="a", usd_per_h=12.0)]


@given(
    st.lists(st.lists(_JOBS, min_size=1, max_size=3), max_size=6),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.lists(st.sampled_from(_OFFERS), max_size=4),
    st.sets(st.sampled_from([offer.key for offer in _OFFERS])),
)
def test_looked_at_again_nothing_more_is_launched(
    jobs: list[list[JobRequest]],
    most: tuple[int, int],
    there: list[Offer],
    refused: set[tuple[str, str, str, str]],
) -> None:
    """Growth never exceeds the maximum or a machine's resources; growing again changes nothing."""
    other = (KEY[0], "other")
    pools = {KEY: replace(POOL, max_size=most[0]), other: replace(POOL, name="other", max_size=most[1])}
    waiting = [shortage(f"w{n}", *some) for n, some in enumerate(jobs)]
    idle = [Idle(f"in-{n}", KEY if n % 2 else other, offer) for n, offer in enumerate(there)]
    had = {key: sum(one.pool == key for one in idle) for key in pools}
    grown = grow(pools, had, waiting, idle, _OFFERS, refused)
    coming = [replace(one, claims=grown.claims.get(one.instance, {})) for one in idle]
    for key, launched in grown.launch.items():
        assert had[key] + len(launched) <= (pools[key].max_size or 0)
        assert all(offer.key not in refused for offer, _ in launched)
        coming += [Idle(f"jn-{key}-{n}", key, offer, claims) for n, (offer, claims) in enumerate(launched)]
    # Shuffled, because instance ids are random.
    coming = [replace(one, instance=f"{n * 7 % 11:02d}-{one.instance}") for n, one in enumerate(coming)]
    had = {key: sum(one.pool == key for one in coming) for key in pools}
    again = grow(pools, had, waiting, coming, _OFFERS, refused)
    assert again.launch == {}
    assert again.claims == {one.instance: one.claims for one in coming if one.claims}
    served: Counter[str] = Counter()
    for one in coming:
        tasks = [(jobs[int(name[1:])][k], count) for name, row in one.claims.items() for k, count in enumerate(row)]
        assert sum(j.gpus_per_task * count for j, count in tasks) <= SHAPE.gpus
        assert sum(j.cpus_milli_per_task * count for j, count in tasks) <= SHAPE.cpus_milli
        assert all(one.offer.kind.value in j.capacity for j, count in tasks if count)
        served.update({name: sum(row) for name, row in one.claims.items()})
    assert all(count == sum(j.tasks for j in jobs[int(name[1:])]) for name, count in served.items())
