"""GPUs and machines that their owners take back: what is placed there meanwhile, and what leaves."""

import time

import pytest

from activities.scheduling.scheduler_state import SchedulerState
from domain.phases import Phase
from domain.protocol.machines import MachineNotice
from domain.task_reports import OWNER, NoticeReport
from infra.db.models import Cluster, Machine
from tests.activities.invariants import check
from tests.activities.world import StalePlan, World, job, key

M = "r/c/m"


@pytest.fixture
def fleet(world: World) -> World:
    """One region with one machine of four slots, and a tenant `high` that may evict `t`'s workloads."""
    world.region("r")
    world.machine(M)
    world.tenant("high", level=1)
    return world


def _row(world: World) -> Machine:
    with world.session() as session:
        return session.get_one(Machine, M)


def test_withheld_slots_are_not_awarded(fleet: World) -> None:
    """Workloads get the other slots only, at once and after further changes, until the owner lends them again."""
    fleet.machine(M, withheld=0b0101)
    small, large = fleet.submit(job(gpus=2)), fleet.submit(job(gpus=1))
    assert fleet.tick().awarded == 1
    assert fleet.holdings(small) == {M: (0b1010, 0)}
    assert fleet.waiting(large) != []
    fleet.machine(M)
    assert fleet.tick().awarded == 1
    assert fleet.holdings(large) == {M: (0b0001, 0)}
    check(fleet)


def test_a_withheld_slot_is_not_promised(fleet: World) -> None:
    """A plan that evicts the holder of a withheld slot does not get this slot, so it is not awarded."""
    low = fleet.running(job(gpus=4))
    high = fleet.submit(job(gpus=4), tenant="high")
    offer = fleet.offer(high)
    fleet.machine(M, withheld=0b0001, runs=[f"{low}.1"])
    with pytest.raises(StalePlan):
        fleet.accept(offer)
    fleet.release(low, Phase.PREEMPTED)
    fleet.tick()
    assert fleet.holdings(high) == {}
    check(fleet)


def test_what_the_owner_has_taken_is_not_evicted_for(fleet: World) -> None:
    """No plan counts on a slot of a victim that the owner has taken; the victim's other slots can still be won."""
    low = fleet.running(job(gpus=4))
    fleet.tick()
    fleet.machine(M, withheld=0b0001, runs=[f"{low}.1"])
    large = fleet.submit(job(gpus=4), tenant="high")
    tick = fleet.tick()
    assert (tick.awarded, fleet.holdings(large)) == (0, {})
    assert fleet.waiting(large) == ["insufficient_capacity r"]
    fresh = SchedulerState(fleet.engine, fleet.settings.scheduler)
    with fresh.current() as state, fleet.scheduler_state.current() as known:
        assert [w.holdings for w in state.regions["r"].running_on(M)] == [
            w.holdings for w in known.regions["r"].running_on(M)
        ]
    fleet.change(large, Phase.CANCELLED)
    small = fleet.submit(job(gpus=3), tenant="high")
    assert fleet.tick().awarded == 1
    assert fleet.holdings(small) == {M: (0, 0b1110)}
    check(fleet)


def test_what_the_owner_lends_again_is_evicted_for(fleet: World) -> None:
    """After the owner has lent a slot again, its holder can be evicted for it."""
    low = fleet.running(job(gpus=4))
    fleet.machine(M, withheld=0b0001, runs=[f"{low}.1"])
    high = fleet.submit(job(gpus=4), tenant="high")
    assert fleet.tick().awarded == 0
    fleet.machine(M, runs=[f"{low}.1"])
    assert fleet.tick().awarded == 1
    assert fleet.holdings(high) == {M: (0, 0b1111)}
    check(fleet)


def _takes(world: World, ends_at_s: float, run: str | None = None) -> None:
    """Reports that the owner takes the machine, or what one run uses, from a time on."""
    report = NoticeReport(OWNER, "preempt", True, time.time(), ends_at_s, "the owner takes the machine back")
    world.machines.noticed(MachineNotice(M, "boot-1", report, run))


@pytest.mark.parametrize("is_of_run", [False, True])
def test_a_more_urgent_word_of_the_owner(fleet: World, is_of_run: bool) -> None:
    """An earlier end reaches the machine and its workloads; repeated and later ones change nothing."""
    workload = fleet.running(job(gpus=1))
    run = f"{workload}.1" if is_of_run else None
    for ends_at_s, told in ((500.0, [500.0]), (500.0, [500.0]), (200.0, [500.0, 200.0]), (900.0, [500.0, 200.0])):
        _takes(fleet, ends_at_s, run)
        assert [mail["detail"]["ends_at_s"] for mail in fleet.mail(workload, "preempt")] == told
        row = _row(fleet)
        if is_of_run:
            assert (row.notice, row.cordon) == (None, None)
        else:
            assert row.notice is not None and row.notice["detail"]["ends_at_s"] == told[-1]
            assert row.cordon == row.notice
    assert len(fleet.events(kind="machine.notice")) == (0 if is_of_run else 1), "a machine departs once"
    for ends_at_s in range(150, 0, -1):
        _takes(fleet, float(ends_at_s), run)
    assert len(fleet.mail(workload, "preempt")) == 8


def test_a_more_urgent_word_leaves_what_operators_did(fleet: World) -> None:
    """An earlier end does not restore a cordon that an operator removed, and leaves an operator's own cordon."""
    _takes(fleet, 500.0)
    fleet.alter(Machine, M, cordon=None)
    _takes(fleet, 400.0)
    assert _row(fleet).cordon is None
    theirs = {"code": "cordoned_by_operator", "detail": {"by": "op"}, "sentence": ""}
    fleet.alter(Machine, M, cordon=theirs)
    _takes(fleet, 300.0)
    assert _row(fleet).cordon == theirs


def test_an_owner_who_lends_again_ends_the_notice(fleet: World) -> None:
    """The machine takes work again although it was never lost; an operator's cordon stays."""
    report = NoticeReport(OWNER, "preempt", True, time.time(), time.time() + 60.0, "the owner takes the machine back")
    fleet.machines.noticed(MachineNotice(M, "boot-1", report))
    assert _row(fleet).cordon is not None
    fleet.machine(M, taken=True, word_at_s=time.time())
    assert _row(fleet).cordon is not None
    fleet.machine(M, word_at_s=time.time())
    assert (_row(fleet).cordon, _row(fleet).notice) == (None, None)
    fleet.alter(Machine, M, cordon={"code": "cordoned_by_operator", "detail": {"by": "op"}, "sentence": ""})
    fleet.machines.noticed(MachineNotice(M, "boot-1", report))
    fleet.machine(M, word_at_s=time.time())
    row = _row(fleet)
    assert row.notice is None and row.cordon is not None and row.cordon["code"] == "cordoned_by_operator"


@pytest.mark.parametrize("is_whole", [False, True])
def test_the_scheduler_learns_what_is_lent_again(fleet: World, is_whole: bool) -> None:
    """Queued workloads do not wait for the next scan interval, although the machine was ready all the time."""
    if is_whole:
        _takes(fleet, 500.0)
    fleet.machine(M, taken=is_whole, withheld=0 if is_whole else 0b0110)
    wakes = fleet.put_out("wake")
    fleet.machine(M, taken=is_whole, withheld=0 if is_whole else 0b0110)
    assert fleet.put_out("wake") == wakes, "the same hello changes nothing"
    fleet.machine(M, withheld=0 if is_whole else 0b0100, word_at_s=time.time())
    assert fleet.put_out("wake") == wakes + 1


def test_a_machine_that_is_set_up_again_stays_its_owners(fleet: World) -> None:
    """The owner's word outlasts the disk that has it, also after an operator trusts the new key, until a new word."""
    fleet.machine(M, taken=True, word_at_s=100.0)
    fresh = {"incarnation": "boot-2", "public_key": key("new")}
    assert fleet.machines.register(fleet.hello(M, word_at_s=0.0, **fresh)).refused
    fleet.alter(Machine, M, public_key=key("new"), offered_key=None, offered_at=None, cordon=None)
    workload = fleet.submit()
    for _ in range(2):
        fleet.machine(M, word_at_s=0.0, **fresh)
        row = _row(fleet)
        assert row.notice is not None and row.notice["detail"]["platform"] == "owner" and row.cordon == row.notice
        assert fleet.tick().awarded == 0
    fleet.machine(M, word_at_s=200.0, **fresh)
    assert (_row(fleet).notice, _row(fleet).cordon) == (None, None)
    assert fleet.tick().awarded == 1 and M in fleet.holdings(workload)


def test_gpus_stay_their_owners_if_a_machine_is_set_up_again(fleet: World) -> None:
    """What the known word and the older one have taken is withheld; a newer word replaces both."""
    fleet.machine(M, withheld=0b0011, word_at_s=100.0)
    for said, withheld, expected in ((0.0, 0, 0b0011), (50.0, 0b0100, 0b0111), (200.0, 0b1000, 0b1000)):
        fleet.machine(M, withheld=withheld, word_at_s=said)
        assert _row(fleet).withheld == expected
    fleet.machines.noticed(MachineNotice(M, "boot-1", NoticeReport("owner", "preempt", True, 300.0, 300.0)))
    fleet.machine(M, word_at_s=200.0)
    assert _row(fleet).taken, "the notice is newer than the word of this registration"
    fleet.machine(M, word_at_s=1e300)
    fleet.machine(M, taken=True, word_at_s=time.time() + 5)
    assert _row(fleet).taken, "a clock that was ahead does not make later words void"


def test_a_large_claim_is_judged_although_the_owner_has_taken_the_machine(fleet: World) -> None:
    """The cordon of a taken machine ends when its owner lends it again; that of a large claim does not."""
    fleet.alter(Cluster, ("r", "c"), capacity="voluntary")
    _takes(fleet, time.time())
    gpus = fleet.settings.lifecycle.lent_gpus + 1
    fleet.machine(M, gpus, taken=True)
    fleet.machine(M, gpus, word_at_s=time.time())
    row = _row(fleet)
    assert row.notice is None
    assert row.cordon is not None and row.cordon["code"] == "claims_too_much"


def test_unfreed_slots_are_withheld_until_they_are_free(fleet: World) -> None:
    """They get no work, as those that the owner has taken, but nobody is told that the owner takes them."""
    waiting = fleet.submit(job(gpus=4))
    fleet.machine(M)
    fleet.tick()
    fleet.machine(M, unfreed=0b0101, withheld=0b0001)
    row = _row(fleet)
    assert (row.withheld, row.unfreed) == (0b0101, 0b0100)
    told = [mail["detail"]["words"] for mail in fleet.mail(waiting, "preempt")]
    assert len(told) == 1, "because of the slot that the owner has taken"
    fleet.release(waiting, Phase.PENDING)
    small = fleet.submit(job(gpus=2), tenant="high")
    fleet.tick()
    assert fleet.holdings(small) == {M: (0b1010, 0)}
    fleet.machine(M, unfreed=0b0100, word_at_s=time.time())
    assert (_row(fleet).withheld, _row(fleet).unfreed) == (0b0100, 0b0100), "the owner lends its slot again"
    fleet.machine(M, unfreed=0, word_at_s=0.0)
    assert (_row(fleet).withheld, _row(fleet).unfreed) == (0, 0), "an older word keeps only the owner's slots"
    check(fleet)
