"""Silent regions: other regions continue, the silence is published with its reason, and a response ends it."""

from typing import Any

from domain.protocol.scheduling import BidRequest
from infra.db.silent_regions import SilentRegion, silent_regions
from tests.activities.world import World, job


def _two_regions(world: World) -> None:
    world.tenant("low", level=3)
    world.tenant("high", level=1)
    for region in ("east", "west"):
        world.region(region)
        world.machine(f"{region}/c/m", gpus=4)


def _published(world: World) -> dict[str, SilentRegion]:
    with world.session() as session:
        return silent_regions(session)


def test_a_silent_region_is_left_out_and_named(world: World) -> None:
    """Workloads are placed in other regions in queue order; a workload that only the silent region could hold waits."""
    _two_regions(world)
    low = world.submit(job(gpus=4), tenant="low")
    only = world.submit(job(gpus=1), tenant="high", regions_allowed=("west",))
    high = world.submit(job(gpus=4), tenant="high")
    world.tick("west")
    assert world.workload(high).region == "east", "level 1 comes before level 3, even if a region is silent"
    assert (world.workload(low).region, world.workload(only).region) == (None, None)
    assert world.waiting(only) == ["region_excluded east", "region_silent west"]
    assert "region_silent west" in world.waiting(low)
    assert _published(world).keys() == {"west"} and not _published(world)["west"].slow
    ticket = world.scan()
    assert (ticket.regions, ticket.silent) == (["east"], ["west"]), "the next pass does not wait for west"
    assert ticket.rest_s is not None and ticket.rest_s <= world.settings.scheduler.silent_backoff_s


def _answers(world: World, *, late: bool) -> Any:
    """Runs a pass in which west answers its probe, in time or late; returns the ticket of the next pass."""
    world.configure(silent_backoff_s=1e-6, **({"bid_deadline_s": 1e-6} if late else {}))
    world.tick("west")
    ticket = world.scan()
    assert ticket.probed == ["west"] and ticket.silent == ["west"]
    world.regions.bid(BidRequest("west", ticket.scan, 0))
    return world.scan()


def test_a_region_that_answers_in_time_is_waited_for_again(world: World) -> None:
    """A timely answer to the probe ends the silence, and the next pass places work there."""
    _two_regions(world)
    workload = world.submit(job(gpus=1), tenant="low", regions_allowed=("west",))
    ticket = _answers(world, late=False)
    assert (ticket.regions, ticket.silent) == (["east", "west"], [])
    assert _published(world) == {}
    world.tick()
    assert world.workload(workload).region == "west"


def test_a_region_that_answers_late_is_slow_and_gets_work(world: World) -> None:
    """The auction does not wait for a slow region; the awarding process bids for it."""
    _two_regions(world)
    workload = world.submit(job(gpus=1), tenant="low", regions_allowed=("west",))
    ticket = _answers(world, late=True)
    assert "west" not in ticket.regions and ticket.silent == []
    assert _published(world)["west"].slow
    world.award(ticket)
    assert world.workload(workload).region == "west"
