"""How a pool grows for what waits, and shrinks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capacity.offers import Offer, Shape
from capacity.pools import Pool
from capacity.scaling import Idle, Shortage, grow, machines_for, shrink
from domain.capacity import CapacityKind
from domain.scheduling import JobRequest

GIB = 1 << 30
SHAPE = Shape("small", 4, "a100", 16_000, 64 * GIB)
CHEAP = Offer("sim", "west", "za", CapacityKind.SPOT, SHAPE, 4.0, 30.0)
DEAR = replace(CHEAP, zone="zb", kind=CapacityKind.ON_DEMAND, usd_per_h=12.0)
KEY = ("west", "burst")
POOL = Pool(*KEY, 0, max_size=4)


def job(tasks: int = 1, gpus: int = 4, **more: object) -> JobRequest:
    """A job of tasks with so many GPUs each."""
    types = ("a100",) if gpus else ()
    return replace(JobRequest("main", tasks, gpus, types, 1000, GIB), **more)  # type: ignore[arg-type]


def shortage(workload: str, *jobs: JobRequest, regions: tuple[str, ...] = ("west",)) -> Shortage:
    """A workload that waits."""
    return Shortage(workload, jobs or (job(),), frozenset(regions))


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
    """By whichever of GPUs, cores and memory runs out first."""
    assert machines_for(wanted, SHAPE) == machines


def test_one_shortage_is_one_launch() -> None:
    """What is on its way counts, in the order of the queue; only the rest is launched, each for a workload."""
    waiting = [shortage("first", job(2)), shortage("second")]
    grown = grow({KEY: POOL}, {}, waiting, [], [DEAR, CHEAP])
    assert grown.launch == {KEY: [(CHEAP, "first"), (CHEAP, "first"), (CHEAP, "second")]}
    idle = [Idle(f"in-{n}", KEY, CHEAP.key) for n in range(3)]
    again = grow({KEY: POOL}, {KEY: 3}, waiting, idle, [DEAR, CHEAP])
    assert again.launch == {}
    assert again.wanted_by == {"in-0": "first", "in-1": "first", "in-2": "second"}
    part = grow({KEY: POOL}, {KEY: 1}, waiting, idle[:1], [CHEAP])
    assert part.launch == {KEY: [(CHEAP, "first"), (CHEAP, "second")]}


def test_a_gang_gets_all_or_nothing_within_the_maximum() -> None:
    """A smaller one behind it may still fit; a pool that does not grow gives nothing."""
    waiting = [shortage("large", job(5)), shortage("small", job(4))]
    assert grow({KEY: POOL}, {}, waiting, [], [CHEAP]).launch == {KEY: [(CHEAP, "small")] * 4}
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
    """The pool's rules, the document's, and what was refused lately."""
    grown = grow({KEY: pool}, {}, [shortage("w", wanted)], [], [DEAR, CHEAP], refused)
    assert grown.launch == ({} if launched is None else {KEY: [(launched, "w")]})


def test_regions_and_jobs() -> None:
    """All jobs come from one pool, of a region in which nothing else is missing; the cheaper pool wins."""
    east = ("east", "burst")
    pools = {KEY: POOL, east: replace(POOL, region="east", name="burst")}
    offers = [CHEAP, replace(CHEAP, provider="other", region="east", usd_per_h=3.0)]
    assert set(grow(pools, {}, [shortage("w")], [], offers).launch) == {KEY}
    both = shortage("w", regions=("east", "west"))
    assert set(grow(pools, {}, [both], [], offers).launch) == {east}
    cpus = replace(CHEAP, shape=Shape("cpus", 0, None, 64_000, 256 * GIB), usd_per_h=1.0)
    two = shortage("w", job(2, name="a"), job(3, 0, name="b", cpus_milli_per_task=30_000))
    grown = grow({KEY: POOL}, {}, [two], [], [CHEAP, cpus])
    assert grown.launch == {KEY: [(CHEAP, "w"), (CHEAP, "w"), (cpus, "w"), (cpus, "w")]}


def test_it_shrinks_to_its_size_after_a_time() -> None:
    """Those that were idle longest go first; what something waits for stays."""
    idle_s = {"in-1": 700.0, "in-2": 900.0, "in-3": 30.0, "in-4": 800.0}
    pool = replace(POOL, size=1)
    assert shrink(pool, 4, idle_s) == ["in-2", "in-4", "in-1"]
    assert shrink(pool, 4, idle_s, {"in-4"}) == ["in-2", "in-1"]
    assert shrink(pool, 2, idle_s) == ["in-2"]
    assert shrink(pool, 1, idle_s) == []


_JOBS = st.builds(job, st.integers(1, 6), st.integers(0, 4))


@given(
    st.lists(st.lists(_JOBS, min_size=1, max_size=3), max_size=6),
    st.integers(0, 6),
    st.integers(0, 6),
    st.sets(st.sampled_from([CHEAP.key, DEAR.key])),
)
def test_looked_at_again_nothing_more_is_launched(
    jobs: list[list[JobRequest]], most: int, there: int, refused: set[tuple[str, str, str, str]]
) -> None:
    """Never above the maximum; and once what was launched is on its way, the same queue launches nothing more."""
    pools = {KEY: replace(POOL, max_size=most)}
    waiting = [shortage(f"w{n}", *some) for n, some in enumerate(jobs)]
    idle = [Idle(f"in-{n}", KEY, CHEAP.key) for n in range(there)]
    launched = grow(pools, {KEY: there}, waiting, idle, [CHEAP, DEAR], refused).launch.get(KEY, [])
    assert there + len(launched) <= max(most, there)
    assert all(offer.key not in refused for offer, _ in launched)
    idle += [Idle(f"jn-{n}", KEY, offer.key) for n, (offer, _) in enumerate(launched)]
    assert grow(pools, {KEY: len(idle)}, waiting, idle, [CHEAP, DEAR], refused).launch == {}
