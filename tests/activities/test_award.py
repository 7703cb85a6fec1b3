"""The award: which slots a workload gets, what victims hand over, and the refusal of plans whose facts have changed."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from sqlalchemy import select, text

from activities.scheduling import awards
from activities.scheduling.bids import newest_evictors
from domain.phases import Phase
from domain.spec import JobSpec
from domain.task_reports import TaskProgress
from infra.db.models import Eviction, Machine, Workload
from infra.db.tenants import Tenant
from tests.activities.invariants import check, check_history
from tests.activities.world import GIB, Offer, StalePlan, World, job

M1, M2, M3 = "r/c/m1", "r/c/m2", "r/c/m3"


@pytest.fixture
def fleet(world: World) -> World:
    """One region with two machines of four slots, and a tenant `high` that may evict `t`'s workloads."""
    world.region("r")
    world.machine(M1)
    world.machine(M2)
    world.tenant("high", level=1)
    return world


def test_free_slots_come_first(fleet: World) -> None:
    """Free slots are held immediately and the rest is promised; victims get `evict`, and the evictor waits."""
    low = fleet.running(job(gpus=3), regions_allowed=("r",))
    high = fleet.submit(job(tasks=2, gpus=4), tenant="high")
    assert fleet.tick().awarded == 1
    where = next(iter(fleet.holdings(low)))
    other = M2 if where == M1 else M1
    assert fleet.holdings(high) == {where: (0b1000, 0b0111), other: (0b1111, 0)}
    assert fleet.masks(where) == (0b1111, 0b0111)
    assert fleet.mail(high) == [{"kind": "awarded", "attempt": 1, "detail": {"ready": False, "region": "r", "rank": 1}}]
    assert fleet.mail(low, "evict") == [
        {"kind": "evict", "attempt": 1, "detail": {"evictor": high, "evictor_rank": 1, "rank": 3}}
    ]
    assert fleet.attempt(high).ready_at is None and fleet.attempt(low).evictor == high
    assert fleet.workload(high).reason["code"] == "waiting_for_victims"  # type: ignore[index]
    check(fleet)


def test_what_a_victim_gives_up_goes_to_its_evictor(fleet: World) -> None:
    """A victim's slots go directly to its evictor, which gets one `slots_ready`; only the surplus becomes free."""
    low = fleet.running(job(gpus=4, cpus_milli=8000, memory_bytes=40 * GIB))
    fleet.running(job(gpus=4))
    high = fleet.submit(job(gpus=2, cpus_milli=12_000, memory_bytes=30 * GIB), tenant="high")
    assert fleet.tick().awarded == 1
    assert [e[2] for e in fleet.evictions()] == [low]
    where = next(iter(fleet.holdings(low)))
    assert fleet.holdings(high) == {where: (0, 0b0011)}
    rival = fleet.submit(job(gpus=2), tenant="high")
    fleet.release(low, Phase.PREEMPTED)
    assert fleet.holdings(high) == {where: (0b0011, 0)}
    assert fleet.masks(where) == (0b0011, 0)
    assert [m["kind"] for m in fleet.mail(high)] == ["awarded", "slots_ready"]
    check(fleet)
    assert fleet.tick().awarded == 1
    assert fleet.holdings(rival) == {where: (0b1100, 0)}
    fleet.release(low, Phase.PREEMPTED, attempt=1)
    assert len(fleet.mail(high, "slots_ready")) == 1
    check(fleet)
    check_history(fleet)


def test_a_victim_that_ends_by_itself_hands_over_as_well(fleet: World) -> None:
    """A victim that succeeds before it is stopped gives its slots to its evictor too."""
    low = fleet.running(job(tasks=2, gpus=4))
    high = fleet.submit(job(gpus=4), tenant="high")
    fleet.tick()
    fleet.release(low, Phase.SUCCEEDED)
    ((where, held),) = fleet.holdings(high).items()
    assert held == (0b1111, 0) and fleet.masks(where) == (0b1111, 0)
    assert fleet.masks(M2 if where == M1 else M1) == (0, 0)
    assert len(fleet.mail(high, "slots_ready")) == 1
    check(fleet)


def test_several_victims_and_the_last_of_them_completes_it(fleet: World) -> None:
    """The evictor gets `slots_ready` only when the last of its victims has left."""
    lows = [fleet.running(job(gpus=2)) for _ in range(4)]
    high = fleet.submit(job(tasks=2, gpus=4), tenant="high")
    fleet.tick()
    assert {e[2] for e in fleet.evictions()} == set(lows)
    for n, low in enumerate(lows, 1):
        fleet.release(low, Phase.PREEMPTED)
        assert len(fleet.mail(high, "slots_ready")) == (n == 4)
        assert (fleet.attempt(high).ready_at is not None) == (n == 4)
        check(fleet)


@pytest.mark.parametrize("first", ["evictor", "victim"])
def test_an_evictor_that_is_cancelled_while_it_waits(fleet: World, first: str) -> None:
    """Slots promised to an evictor that is cancelled become free once its victims have left."""
    low, other = fleet.running(job(gpus=4)), fleet.running(job(gpus=4))
    high = fleet.submit(job(tasks=2, gpus=4), tenant="high")
    fleet.tick()
    if first == "victim":
        fleet.release(low, Phase.PREEMPTED)
    fleet.release(high, Phase.CANCELLED)
    check(fleet)
    for victim in (low, other):
        fleet.release(victim, Phase.PREEMPTED, attempt=1)
        check(fleet)
    assert fleet.masks(M1) == fleet.masks(M2) == (0, 0)
    assert fleet.mail(high, "slots_ready") == []
    assert fleet.tick().awarded == 2


def test_immunity_ends_with_the_next_change(fleet: World) -> None:
    """A victim does not evict its evictor, whatever its rank, until a workload is submitted, ends or changes its level.

    This holds in bids, and in the award of a plan that was made before the eviction.
    """
    low = fleet.running(job(tasks=2, gpus=4))
    high = fleet.submit(job(tasks=2, gpus=4), tenant="high")
    fleet.tick()
    fleet.release(low, Phase.PREEMPTED)
    fleet.run(high, ago_s=600)
    fleet.alter(Workload, high, level=7)
    offer = fleet.offer(low)
    assert offer.candidate.plan.victims == (high,)
    with fleet.session() as session:
        # As if nothing had changed since the eviction.
        session.execute(text("update eviction set change = newest_outside_change()"))
    with pytest.raises(StalePlan):
        fleet.accept(offer)
    assert fleet.tick().awarded == 0
    assert fleet.waiting(low) == ["insufficient_capacity r"]
    fleet.submit(job(tasks=5, gpus=4))
    assert fleet.tick().awarded == 1
    assert fleet.evictions() == {(high, 1, low, 1), (low, 2, high, 1)}


@pytest.mark.parametrize("change", ["submission", "end", "level", "tenant's level", "tenant's quota", "nothing"])
def test_what_ends_an_immunity(fleet: World, change: str) -> None:
    """A submission, an end, a new level of a workload or tenant, or a new quota ends immunity; awards do not."""
    other, low = fleet.submit(job(), tenant="high"), fleet.running(job(gpus=4))
    fleet.running(job(gpus=3), tenant="high")
    high = fleet.submit(job(gpus=4), tenant="high")
    fleet.tick()
    fleet.release(low, Phase.PREEMPTED)
    fleet.run(high, ago_s=600)
    with fleet.session() as session:
        assert newest_evictors(session) == {low: {high}}
    match change:
        case "submission":
            fleet.submit(job())
        case "end":
            fleet.release(other, Phase.CANCELLED)
        case "level":
            fleet.alter(Workload, other, level=6)
        case "tenant's level":
            fleet.alter(Tenant, "high", level=2)
        case "tenant's quota":
            fleet.alter(Tenant, "high", quota_gpus={"a100": 5})
        case "nothing":
            fleet.tick()
    with fleet.session() as session:
        assert newest_evictors(session) == ({low: {high}} if change == "nothing" else {})


# ------------------------------------------------------------------------------------------------------- stale plans


def _lost(world: World) -> None:
    world.machines.lost(world.attend(M1))


def _cordoned(world: World) -> None:
    world.alter(Machine, M1, cordon={"code": "cordoned_by_operator", "detail": {}})


def _draining(world: World) -> None:
    world.alter(Machine, M1, draining=True)


def _rebooted(world: World) -> None:
    world.machines.register(world.hello(M1, incarnation="boot-2"))


@pytest.mark.parametrize("change", [_lost, _cordoned, _draining, _rebooted])
@pytest.mark.parametrize("evicting", [False, True])
def test_a_machine_that_takes_no_work_refuses_a_plan(
    world: World, change: Callable[[World], None], evicting: bool
) -> None:
    """A plan is refused without changes if its machine was lost, cordoned, drained or rebooted since the bid."""
    world.region("r")
    world.machine(M1)
    world.tenant("high", level=1)
    if evicting:
        world.running(job(gpus=4))
    offer = world.offer(world.submit(job(gpus=4), tenant="high"))
    change(world)
    _refuses(world, offer)


def test_a_victim_that_is_not_the_same_any_more_refuses_a_plan(world: World) -> None:
    """A plan is refused if its victim has ended, has started another attempt, or is being evicted by another one."""
    world.region("r")
    world.machine(M1)
    world.tenant("high", level=1)
    low = world.running(job(gpus=4))
    first, second = (world.submit(job(gpus=4), tenant="high") for _ in range(2))

    offers = {name: world.offer(name) for name in (first, second)}
    assert offers[first].bid.victim_attempts == offers[second].bid.victim_attempts == {low: 1}
    assert world.accept(offers[first])
    _refuses(world, offers[second])

    world.release(low, Phase.PREEMPTED)
    _refuses(world, offers[second])

    world.run(first)
    world.release(first, Phase.SUCCEEDED)
    world.alter(Workload, second, held_by="somebody")
    world.tick()
    world.run(low, ago_s=600)
    assert world.attempt(low).attempt == 2
    world.alter(Workload, second, held_by=None)
    _refuses(world, offers[second])
    assert world.accept(world.offer(second))
    check(world)


def test_a_victim_that_has_evicted_the_workload_meanwhile_refuses_a_plan(world: World) -> None:
    """A plan is refused if its victim has evicted the workload after the plan was made."""
    world.region("r")
    world.machine(M1)
    world.tenant("high", level=1)
    low, high = world.submit(job(gpus=4)), world.submit(job(gpus=4), tenant="high")
    world.tick()
    world.run(high, ago_s=600)
    world.alter(Workload, high, level=7)
    offer = world.offer(low)
    assert set(offer.bid.victim_attempts) == {high}
    with world.session() as session:
        session.add(Eviction(evictor=high, evictor_attempt=1, victim=low, victim_attempt=0))
    _refuses(world, offer)


@pytest.mark.parametrize(
    "rival",
    [job(gpus=1, cpus_milli=1), job(gpus=0, cpus_milli=9000), job(gpus=0, cpus_milli=1, memory_bytes=40 * GIB)],
    ids=["slots", "cpus", "memory"],
)
def test_less_free_than_planned_refuses_a_plan(world: World, rival: JobSpec) -> None:
    """A plan is refused if another workload has taken slots, CPUs or memory that it needs."""
    world.region("r")
    world.machine(M1)
    offer = world.offer(world.submit(job(gpus=4, cpus_milli=8000, memory_bytes=30 * GIB), id_="wl-a"))
    other = world.submit(rival, id_="wl-b")
    assert world.accept(world.offer(other))
    _refuses(world, offer)


def _refuses(world: World, offer: Offer) -> None:
    before = world.dump()
    with pytest.raises(StalePlan):
        world.accept(offer)
    assert world.dump() == before


def test_a_long_batch_is_asked_for_as_it_is_awarded(fleet: World) -> None:
    """Candidates of a long batch are read in chunks, one ahead of the writes; a stale plan stops the reading."""
    ids = [fleet.submit(job(gpus=1)) for _ in range(100)]
    candidate = fleet.offer(ids[0]).candidate
    asked = []

    def candidates() -> Iterator[awards.PlannedAward]:
        for id_ in ids:
            asked.append(id_)
            yield replace(candidate, plan=replace(candidate.plan, workload=id_))

    assert fleet.award_all(candidates()) == awards.Awarded(4, awards.AwardFailure.STALE)
    assert len(asked) == 3 * awards._FIRST
    check(fleet)
    fleet.machine("r/c/wide", gpus=60)
    (placement,) = candidate.plan.jobs
    wide = replace(candidate, plan=replace(candidate.plan, jobs=(replace(placement, machines=(("r/c/wide", 1),)),)))
    some = (replace(wide, plan=replace(wide.plan, workload=id_)) for id_ in ids[4:59])
    assert fleet.award_all(some) == awards.Awarded(55)
    check(fleet)


def test_only_queued_workloads_that_nobody_holds_are_awarded(fleet: World) -> None:
    """A workload that was held, placed, ended or deleted since the bid gets nothing, and no row changes."""
    held, placed, cancelled, gone = (fleet.submit(job(gpus=1)) for _ in range(4))
    offers = [fleet.offer(name) for name in (held, placed, cancelled, gone)]
    fleet.alter(Workload, held, held_by="somebody")
    assert fleet.accept(offers[1])
    fleet.change(cancelled, Phase.CANCELLED, attempt=0)
    with fleet.session() as session:
        session.delete(session.get_one(Workload, gone))
    before = fleet.dump()
    assert [fleet.accept(offer) for offer in offers] == [False] * 4
    assert fleet.dump() == before


def test_a_gang_without_gpus_is_placed_by_its_cpus_and_memory(fleet: World) -> None:
    """CPUs and memory are held, awaited and handed over like slots."""
    low = fleet.running(job(tasks=2, gpus=0, cpus_milli=12_000))
    high = fleet.submit(job(tasks=2, gpus=1, cpus_milli=10_000), tenant="high")
    fleet.tick()
    assert fleet.holdings(high) == {M1: (1, 0), M2: (1, 0)}
    assert fleet.attempt(high).ready_at is None
    check(fleet)
    fleet.release(low, Phase.PREEMPTED)
    assert fleet.attempt(high).ready_at is not None and len(fleet.mail(high, "slots_ready")) == 1
    check(fleet)
    with fleet.session() as session:
        assert {m.free_cpus_milli for m in session.scalars(select(Machine))} == {6000}


def test_tasks_of_one_machine_have_slots_of_their_own(fleet: World) -> None:
    """Each task of a gang gets as many slots as it requests, and no slot is used twice."""
    workload = fleet.running(job("a", tasks=2, gpus=2), job("b", tasks=3, gpus=1), job("c", tasks=1, gpus=0))
    check(fleet)
    fleet.release(workload, Phase.SUCCEEDED, progress=[TaskProgress("a", 0, step=3)])
    assert fleet.masks(M1) == fleet.masks(M2) == (0, 0)
