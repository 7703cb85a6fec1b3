"""An owner takes GPUs back that a workload holds or awaits whose tasks have not started."""

import pytest

from domain.phases import Phase
from infra.db.models import Attempt, Machine
from tests.activities.invariants import check
from tests.activities.world import World, job

M, OTHER = "r/c/m", "r/c/other"


@pytest.fixture
def fleet(world: World) -> World:
    """A region with one machine, and a tenant that may evict others."""
    world.region("r")
    world.tenant("high", level=1)
    world.machine(M)
    return world


def _take(world: World, slots: int) -> None:
    world.machines.register(world.hello(M, withheld=slots))


def _is_ready(world: World, workload: str) -> bool:
    with world.session() as session:
        return session.get_one(Attempt, (workload, 1)).ready_at is not None


def _blamed(world: World) -> int:
    with world.session() as session:
        return session.get_one(Machine, M).failed_gangs


def test_a_promised_slot_that_the_owner_takes_is_not_handed_over(fleet: World) -> None:
    """The successor is told at once, and does not become ready. It starts elsewhere, and the machine is not blamed."""
    low = fleet.running(job(gpus=4))
    high = fleet.submit(job(gpus=4), tenant="high")
    fleet.tick()
    assert fleet.masks(M) == (0b1111, 0b1111)
    for _ in range(2):  # A registration may be repeated.
        _take(fleet, 0b100)
        (mail,) = fleet.mail(high, "preempt")
        assert (mail["attempt"], mail["detail"]["code"], mail["detail"]["platform"]) == (1, "platform_notice", "owner")
    assert fleet.mail(low, "preempt") == []  # Its tasks run, and get the owner's notice from the agent.
    fleet.release(low, Phase.PREEMPTED)
    assert fleet.mail(high, "slots_ready") == [] and not _is_ready(fleet, high)
    check(fleet)
    fleet.release(high, Phase.PREEMPTED, unstarted=True)
    assert (fleet.masks(M), _blamed(fleet)) == ((0, 0), 0)
    fleet.machine(OTHER)
    fleet.tick()
    assert fleet.holdings(high) == {OTHER: (0b1111, 0)}
    check(fleet)


def test_other_slots_are_handed_over(fleet: World) -> None:
    """The owner takes a GPU that the successor does not await: it starts."""
    low = fleet.running(job(gpus=2))
    fleet.running(job(gpus=2))
    high = fleet.submit(job(gpus=2), tenant="high")
    fleet.tick()
    ((victim, _),) = {(v, n) for _, _, v, n in fleet.evictions()}
    _, awaited = fleet.masks(M)
    _take(fleet, 0b1111 & ~awaited)
    fleet.release(victim, Phase.PREEMPTED)
    assert fleet.mail(high, "preempt") == [] and len(fleet.mail(high, "slots_ready")) == 1
    assert low and _is_ready(fleet, high)
    check(fleet)


def test_a_slot_of_an_award_that_is_on_its_way(fleet: World) -> None:
    """The workload holds the slot, and its tasks have not started: it is told. One on other slots is not."""
    first, second = fleet.submit(job(gpus=2)), fleet.submit(job(gpus=2))
    fleet.tick()
    taken = fleet.holdings(first)[M][0]
    _take(fleet, taken)
    assert [len(fleet.mail(one, "preempt")) for one in (first, second)] == [1, 0]
    fleet.release(first, Phase.PREEMPTED)
    fleet.tick()
    assert fleet.workload(first).attempt == 1  # The slots are the owner's.
    check(fleet)
