"""Work within quota that is placed because less important work of its own tenant gives way."""

import pytest
from sqlalchemy import select

from domain.protocol.scheduling import DryRunRequest
from domain.spec import WorkloadSpec
from infra.db import published_queue
from infra.db.logs import Outbox, RegionBid
from tests.activities.invariants import check
from tests.activities.world import World, job


@pytest.mark.usefixtures("publishes_every_scan")
def test_urgent_work_evicts_its_own_tenants_sweep(world: World) -> None:
    """Quota goes to the most important level first, in a dry run, in the award and in published reasons and ranks."""
    world.region("r")
    world.machine("r/c/m", gpus=4)
    world.tenant("own", level=1, gpus=4)
    sweep = world.running(job(gpus=4), tenant="own", level=7, ago_s=3600)
    spec = WorkloadSpec(name="x", tenant="own", jobs=(job(gpus=4),))
    told = world.auction.dry_run(DryRunRequest(spec.model_dump(mode="json")))
    assert (told.admitted, told.rank, told.over_quota, told.victims, told.reasons) == (True, 1, False, [sweep], [])
    urgent, more = world.submit(job(gpus=4), tenant="own"), world.submit(job(gpus=4), tenant="own", level=7)
    assert world.attempt(sweep).rank == 7
    world.tick()
    assert world.evictions() == {(urgent, 1, sweep, 1)}
    with world.session() as session:
        found = published_queue.load(session)
    assert found.find(urgent) is not None and not found.find(urgent).over_quota  # type: ignore[union-attr]
    assert world.reasons(more)[0]["code"] == "quota_exceeded"
    world.scan()
    assert world.attempt(sweep).rank == 14
    check(world)


def test_an_award_evicts_its_own_tenants_work_before_others(world: World) -> None:
    """Of two victims of equal rank, a plan evicts the one whose tenant has no quota left; region bids do the same."""
    world.region("r")
    world.machine("r/c/m1", gpus=4)
    world.machine("r/c/m2", gpus=4)
    world.tenant("own", level=1, gpus=4)
    world.tenant("other", level=1, gpus=4)
    world.running(job(gpus=4), tenant="other", level=7, ago_s=9000)
    sweep = world.running(job(gpus=4), tenant="own", level=7, ago_s=3600)
    urgent = world.submit(job(gpus=4), tenant="own")
    ticket = world.bid()
    with world.session() as session:
        (bids,) = session.scalars(select(RegionBid.bids))
    assert b'"victims":["' + sweep.encode() + b'"]' in bids
    world.award(ticket)
    assert world.evictions() == {(urgent, 1, sweep, 1)}


def test_an_urgent_gang_that_cannot_be_placed_changes_no_rank(world: World) -> None:
    """A tenant's sweep becomes over-quota when an urgent gang of the tenant is awarded, not while the gang waits."""
    world.region("r")
    world.machine("r/c/m1", gpus=4)
    world.tenant("own", level=1, gpus=8)
    sweep = world.running(job(gpus=4), tenant="own", level=7, ago_s=3600)
    urgent = world.submit(job(tasks=2, gpus=4), tenant="own")
    world.tick()
    world.scan()
    assert world.attempt(sweep).rank == 7
    assert world.waiting(urgent) == ["no_hardware r"]
    world.machine("r/c/m2", gpus=4)
    world.machine("r/c/m3", gpus=4)
    world.delivered()
    assert world.tick().awarded == 1
    assert world.evictions() == set()
    with world.session() as session:
        assert session.scalars(select(Outbox.kind).where(Outbox.delivered_at.is_(None), Outbox.kind == "wake")).all()
    world.scan()
    assert world.attempt(sweep).rank == 14


def test_a_small_workload_does_not_evict_a_large_one_of_its_tenant_and_level(world: World) -> None:
    """Over-quota work keeps its slots against equals of its own tenant, in a dry run and in the award."""
    world.region("r")
    world.machine("r/c/m", gpus=8)
    world.tenant("own", level=3, gpus=4)
    world.tenant("other", level=5, gpus=4)
    large = world.running(job(gpus=8), tenant="own")
    spec = WorkloadSpec(name="x", tenant="own", jobs=(job(gpus=4),))
    told = world.auction.dry_run(DryRunRequest(spec.model_dump(mode="json")))
    assert (told.admitted, told.rank) == (False, 3)
    small = world.submit(job(gpus=4), tenant="own")
    assert world.tick().awarded == 0
    assert world.attempt(large).rank == 10
    assert [reason["detail"]["own"] for reason in world.reasons(small)] == [1]
    other = world.submit(job(gpus=4), tenant="other")
    world.tick()
    assert world.evictions() == {(other, 1, large, 1)}
    check(world)
