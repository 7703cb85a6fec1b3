"""Bookings: a running workload continues in another place or size, and each slot has one owner at every step."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select

from api.workloads.workload_queries import allocations
from domain.phases import Phase
from domain.reasons import Reason, ReasonCode
from domain.spec import ArraySpec
from infra.db.drains import drain
from infra.db.models import Booking, Machine, Workload
from tests.activities.invariants import check, check_history
from tests.activities.test_races import waits_for_a_lock
from tests.activities.world import World, job

M1, M2 = "r/c/m1", "r/c/m2"


@pytest.fixture
def fleet(world: World) -> World:
    """One region with two machines of four slots. The first tenant has no quota: its workloads are over-quota."""
    world.region("r")
    world.machine(M1, 4)
    world.machine(M2, 4)
    world.tenant("poor", 5, 0)
    return world


def bookings(world: World) -> list[str]:
    with world.session() as session:
        return list(session.scalars(select(Booking.workload)))


def elsewhere(world: World, workload: str) -> str:
    """Returns the machine that the workload does not use."""
    (own,) = world.holdings(workload)
    return M2 if own == M1 else M1


def test_a_workload_continues_where_it_is_booked(fleet: World) -> None:
    """The running attempt is told to stop; its release awards the booked place at once, and the queue stays empty."""
    mover = fleet.running(job(gpus=2), tenant="poor")
    here, there = next(iter(fleet.holdings(mover))), elsewhere(fleet, mover)
    assert fleet.book((mover, there))
    check(fleet)
    (told,) = fleet.mail(mover, "preempt")
    assert (told["attempt"], told["detail"]["code"], told["detail"]["to"]) == (1, "moved", [there])
    with fleet.session() as session:  # The API lists what the attempts hold.
        listed = allocations(session, session.get_one(Workload, mover), 10, (0, ""))
    assert [(a.attempt, a.machine) for a in listed.items] == [(1, here)]
    assert fleet.masks(there)[0].bit_count() == 2 and fleet.masks(here)[0].bit_count() == 2
    big = fleet.submit(job(gpus=4), level=1)
    fleet.tick()
    assert fleet.workload(big).phase == "pending"  # It waits for the move, which it cannot evict.
    fleet.change(mover, Phase.CHECKPOINTING)
    fleet.release(mover, Phase.PREEMPTED, code=ReasonCode.MOVED)
    check(fleet)
    assert (fleet.workload(mover).phase, fleet.workload(mover).attempt) == ("placing", 2)
    assert (fleet.attempt(mover, 1).outcome or {})["code"] == "moved"
    assert list(fleet.holdings(mover)) == [there] and fleet.masks(here) == (0, 0) and bookings(fleet) == []
    assert fleet.mail(mover, "awarded")[-1] == {
        "kind": "awarded", "attempt": 2, "detail": {"ready": True, "region": "r", "rank": 12},
    }  # fmt: skip
    assert [e["kind"] for e in fleet.events(mover)][-2:] == ["workload.preempted", "workload.placing"]
    fleet.tick()
    assert list(fleet.holdings(big)) == [here]
    fleet.run(mover)
    fleet.release(mover, Phase.SUCCEEDED)
    check(fleet)
    check_history(fleet)


def test_a_workload_keeps_some_of_its_slots(fleet: World) -> None:
    """A place may use slots that the running attempt holds: they pass to its next attempt."""
    mover = fleet.running(job(gpus=3), tenant="poor")
    (here,) = fleet.holdings(mover)
    assert not fleet.book((mover, here)), "one slot is free"
    assert fleet.book((mover, here), keeps=True)
    check(fleet)
    assert fleet.holdings(mover, 2)[here][1].bit_count() == 2
    fleet.release(mover, Phase.PREEMPTED, code=ReasonCode.MOVED)
    check(fleet)
    assert fleet.attempt(mover).ready_at is not None and fleet.masks(here)[0].bit_count() == 3


@pytest.mark.parametrize("phase", [Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED, Phase.PREEMPTED, Phase.PENDING])
def test_an_attempt_that_ends_otherwise_frees_the_place(fleet: World, phase: Phase) -> None:
    """If the workload ends, is preempted by an operator or loses a machine meanwhile, nothing is awarded."""
    mover = fleet.running(job(gpus=2), tenant="poor")
    assert fleet.book((mover, elsewhere(fleet, mover)))
    fleet.release(mover, phase)
    check(fleet)
    assert fleet.workload(mover).phase == phase and fleet.workload(mover).attempt == 1
    assert bookings(fleet) == [] and fleet.masks(M1) == fleet.masks(M2) == (0, 0)


@pytest.mark.parametrize("change", ["cordon", "drain", "lost", "hold"])
def test_a_place_that_takes_no_work_any_more_is_not_awarded(fleet: World, change: str) -> None:
    """If a booked machine is cordoned, drained or lost meanwhile, or the workload is held, it waits in the queue."""
    mover = fleet.running(job(gpus=2), tenant="poor")
    there = elsewhere(fleet, mover)
    assert fleet.book((mover, there))
    if change == "cordon":
        fleet.alter(Machine, there, cordon={"code": "x", "detail": {}})
    elif change == "drain":
        with fleet.session() as session:
            drain(session, session.get_one(Machine, there), Reason(ReasonCode.CORDONED_BY_OPERATOR, {"by": "x"}), "x")
    elif change == "lost":
        fleet.machines.lost(fleet.attend(there))
    else:
        fleet.alter(Workload, mover, held_by="x")
    # The next attempt may be placed elsewhere, so nobody tells it to leave the booked machine.
    assert [m["attempt"] for m in fleet.mail(mover)] == [1, 1]
    fleet.release(mover, Phase.PREEMPTED, code=ReasonCode.MOVED)
    check(fleet)
    assert (fleet.workload(mover).phase, fleet.workload(mover).attempt) == ("preempted", 1)
    assert bookings(fleet) == [] and fleet.masks(M1) == fleet.masks(M2) == (0, 0)


def test_a_silent_machine_does_not_keep_the_place(fleet: World) -> None:
    """If tasks may still run on the machine that the workload leaves, it continues in its place all the same."""
    mover = fleet.running(job(gpus=2), tenant="poor")
    (here,) = fleet.holdings(mover)
    assert fleet.book((mover, elsewhere(fleet, mover)))
    fleet.release(mover, Phase.PREEMPTED, silent=[here], code=ReasonCode.MOVED)
    check(fleet)
    assert fleet.workload(mover).attempt == 2 and fleet.unconfirmed() == [(here, f"{mover}.1")]


def test_only_what_holds_is_booked(fleet: World) -> None:
    """A booking fails as a whole if one place has no room, an attempt is not the running one, or it stops already."""
    mover, other = (fleet.running(job(gpus=2), tenant="poor") for _ in range(2))
    there = elsewhere(fleet, mover)
    assert list(fleet.holdings(mover)) == list(fleet.holdings(other))
    assert not fleet.book((mover, there), attempt=2)
    fleet.running(job(gpus=1), tenant="poor")
    before = fleet.dump()
    assert not fleet.book((mover, there), (other, there)), "three slots are free"
    assert fleet.dump() == before
    assert fleet.book((mover, there))
    assert not fleet.book((mover, there)), "it stops already"
    fleet.alter(Machine, there, cordon={"code": "x", "detail": {}})
    fleet.submit(job(gpus=2), level=1)
    fleet.tick()  # Evicts `other`; the mover cannot be evicted.
    assert fleet.attempt(other).evicting_since is not None
    fleet.machine("r/c/m3", 4)
    assert not fleet.book((other, "r/c/m3")), "it is evicted already"
    check(fleet)


def test_the_scheduler_reads_bookings_as_neither_free_nor_held(fleet: World) -> None:
    """A full read of the state equals one that follows the changes: the place is not free, and the mover is where it
    runs; after the release the mover has no new minimum runtime.
    """
    fleet.configure(min_runtime_s=300.0)
    mover = fleet.running(job(gpus=2), tenant="poor")
    here, there = next(iter(fleet.holdings(mover))), elsewhere(fleet, mover)
    assert fleet.book((mover, there))
    states = fleet.scheduler_state, type(fleet.scheduler_state)(fleet.engine, fleet.settings.scheduler)
    for state in states:
        with state.current() as now:
            assert [h.machine for h in now.holdings(mover)] == [here]
            region = now.planner("r").region
            free = region.machines.free[0, region.row(there)]
            assert int(free) == 2
    fleet.release(mover, Phase.PREEMPTED, code=ReasonCode.MOVED)
    fleet.run(mover)
    for state in states:
        with state.current() as now:
            (running,) = now.regions["r"].running_workloads()
            assert [h.machine for h in running.holdings] == [there]
            assert running.protected_until_s == running.started_at_s


def test_the_place_of_an_element_is_awarded_without_a_deadlock(fleet: World) -> None:
    """The award of an element locks its array. The release locks the array before machines, as all transactions do."""
    array = fleet.submit(job(gpus=2), tenant="poor", array=ArraySpec(ranges=((0, 3, 1),), throttle=1))
    fleet.tick()
    mover = f"{array}-0"
    fleet.run(mover)
    there = elsewhere(fleet, mover)
    assert fleet.book((mover, there))
    with ThreadPoolExecutor(1) as pool:
        with fleet.session() as session:
            session.get_one(Workload, array, with_for_update=True)
            leaves = pool.submit(fleet.release, mover, Phase.PREEMPTED, code=ReasonCode.MOVED)
            assert waits_for_a_lock(fleet, leaves.done)
            session.scalars(select(Machine).order_by(Machine.id).with_for_update(nowait=True)).all()
        leaves.result(20)
    assert fleet.workload(mover).attempt == 2 and list(fleet.holdings(mover)) == [there]
    check(fleet)
