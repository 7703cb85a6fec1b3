"""GPUs and machines that their owners take back: what is placed there meanwhile, and what leaves."""

import time

import pytest

from domain.phases import Phase
from domain.protocol import MachineNotice
from domain.reported import OWNER, NoticeReport
from infra.db.models import Machine
from tests.activities.invariants import check
from tests.activities.world import StalePlan, World, job

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


def test_an_owner_who_lends_again_ends_the_notice(fleet: World) -> None:
    """The machine takes work again although it was never lost; an operator's cordon stays."""
    report = NoticeReport(OWNER, "preempt", True, time.time(), time.time() + 60.0, "the owner takes the machine back")
    fleet.machines.noticed(MachineNotice(M, "boot-1", report))
    assert _row(fleet).cordon is not None
    fleet.machine(M, taken=True)
    assert _row(fleet).cordon is not None
    fleet.machine(M)
    assert (_row(fleet).cordon, _row(fleet).notice) == (None, None)
    fleet.alter(Machine, M, cordon={"code": "cordoned_by_operator", "detail": {"by": "op"}, "sentence": ""})
    fleet.machines.noticed(MachineNotice(M, "boot-1", report))
    fleet.machine(M)
    row = _row(fleet)
    assert row.notice is None and row.cordon is not None and row.cordon["code"] == "cordoned_by_operator"
