"""The auction: a batch gives the same result as its workloads one by one, and waiting workloads get their reasons."""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select, text

import gms.scan
import rms.bid
from activities.scheduling import auction, awards, start_forecasts
from activities.scheduling.auction import AuctionActivities
from activities.scheduling.bids import asked
from domain.phases import Phase
from domain.protocol.scheduling import AwardRequest, BidRequest
from domain.scheduling import Bid
from infra.db import published_queue
from infra.db.logs import Publication, RegionBid, Waiting
from infra.db.models import Machine, Workload
from infra.db.tenants import Tenant
from reference import bids as reference
from tests.activities import oracle
from tests.activities.invariants import check
from tests.activities.world import World, job
from tests.depth import few


def _fill(world: World, seed: int) -> None:
    """Adds two regions with a few machines, running workloads of low priority, and a queue."""
    chance = random.Random(seed)
    world.tenant("t", level=5)
    world.tenant("high", level=1)
    world.tenant("poor", level=3, gpus=3)
    for region in ("east", "west"):
        world.region(region)
        for n in range(3):
            gpu_type = chance.choice(["a100", "a100", "h100"])
            world.machine(f"{region}/c/m{n}", chance.choice([2, 4, 8]), gpu_type=gpu_type, rack=f"k{n % 2}")
    for n in range(8):
        gang = job(tasks=chance.randrange(1, 4), gpus=chance.choice([1, 2, 4]), types=("a100", "h100"))
        world.submit(gang, id_=f"old-{n}", regions_excluded=("west",) if chance.random() < 0.3 else ())
    world.tick()
    for n in range(8):
        if world.workload(f"old-{n}").region is not None:
            world.run(f"old-{n}", ago_s=chance.randrange(3600, 90_000))
            world.saved(f"old-{n}", ago_s=chance.randrange(60, 3600))
    for n in range(12):
        jobs = [
            job(f"j{i}", tasks=chance.randrange(1, 4), gpus=chance.choice([0, 1, 2, 4]), types=("h100", "a100"))
            for i in range(chance.choice([1, 1, 2]))
        ]
        tenant = chance.choice(["t", "high", "high", "poor"])
        excluded = chance.choice([(), (), ("east",), ("west",)])
        world.submit(*jobs, tenant=tenant, id_=f"new-{n:02d}", regions_excluded=excluded)
        world.alter(Workload, f"new-{n:02d}", submitted_at=text(f"now() - interval '{100 - n} hours'"))


def _one_at_a_time(world: World) -> None:
    """Runs the plain auction: in queue order, each region bids on the current state, and the best plan is awarded."""
    ticket = world.scan()
    assert world.auction._scanned is not None
    for queued in world.auction._scanned.batch(0, ticket.queued):
        bids: list[Bid] = []
        for region in ticket.regions:
            with world.session() as session:
                (own,) = asked(session, [queued])
                state = oracle.region_snapshot(session, region, world.settings.scheduler)
            if own.demand.allows_region(region):
                bids.append(rms.bid.bid(state, own.request))
        best = reference.best([b.plan for b in bids if b.plan is not None])
        if best is not None:
            victims = {v: world.workload(v).attempt for v in best.victims}
            candidate = awards.PlannedAward(best, queued.rank, own.demand.jobs, victims)
            assert world.award_all([candidate]) == awards.Awarded(1)


def _placements(world: World) -> Any:
    with world.session() as session:
        names = session.scalars(select(Workload.id).order_by(Workload.id)).all()
    return {name: (world.workload(name).phase, world.holdings(name)) for name in names}, world.evictions()


@pytest.mark.parametrize("seed", few(range(4), 1))
def test_a_batch_is_as_good_as_one_workload_at_a_time(new_world: Callable[..., World], seed: int) -> None:
    """A batch gives the same machines, slots and victims as placing its workloads one after the other."""
    batch = new_world()
    _fill(batch, seed)
    plain = new_world(copy_of=batch)
    before = _placements(batch)
    assert _placements(plain) == before
    result = batch.tick()
    _one_at_a_time(plain)
    assert _placements(batch) == _placements(plain) != before
    assert result.awarded >= 4 and result.rebids >= 4 and batch.evictions()
    check(batch)
    check(plain)


def test_the_queue_is_served_in_order(world: World) -> None:
    """If two workloads want the same slots, the first in the queue gets them; later, smaller ones are tried too."""
    world.region("r")
    world.machine("r/c/m", gpus=4)
    world.tenant("high", level=1)
    small = world.submit(job(gpus=1))
    second, first = world.submit(job(gpus=3)), world.submit(job(gpus=3), tenant="high")
    result = world.tick()
    assert (result.awarded, result.waiting) == (2, 1)
    placed = [w for w in (small, second, first) if world.workload(w).region]
    assert placed == [small, first]
    assert world.waiting(second) == ["insufficient_capacity r"]
    assert result.rebids == 2


def test_who_waits_is_told_every_regions_reason(world: World) -> None:
    """A waiting workload gets a reason of each region: excluded, no response, other hardware, no data, no capacity."""
    for region in ("away", "bare", "busy", "no-data", "other"):
        world.region(region)
    for region in ("away", "busy", "no-data", "other"):
        world.machine(f"{region}/c/m", gpus=1)
    world.machine("bare/c/m", gpus=0, gpu_type=None)
    world.table("words", 10, "away", "bare", "busy", "other")
    busy = world.submit(job(), regions_allowed=("busy",))
    assert world.tick().awarded == 1 and world.workload(busy).region == "busy"
    workload = world.submit(job(), tables=("words",), regions_excluded=("other",))
    assert world.tick("away").waiting == 1
    assert world.waiting(workload) == [
        "region_silent away",
        "no_hardware bare",
        "insufficient_capacity busy",
        "data_not_here no-data",
        "region_excluded other",
    ]
    since = datetime.fromisoformat(world.reasons(workload)[0]["detail"]["since"])
    assert since <= datetime.now(UTC)


def test_reasons_are_written_only_when_they_change(world: World) -> None:
    """Unchanged reasons are not written again. The quota reason comes first. An award deletes the row."""
    world.region("r")
    world.machine("r/c/m", gpus=2)
    world.tenant("poor", gpus=1)
    first = world.submit(job(gpus=2))
    world.tick()
    workload = world.submit(job(gpus=2), tenant="poor")
    world.tick()
    assert world.waiting(workload) == ["quota_exceeded", "insufficient_capacity r"]
    with world.session() as session:
        before = session.scalar(text("select xmin::text from waiting"))
    world.tick()
    with world.session() as session:
        assert session.scalar(text("select xmin::text from waiting")) == before
    world.alter(Tenant, "poor", quota_gpus={"a100": 2})
    world.tick()
    assert world.waiting(workload) == ["insufficient_capacity r"]
    world.release(first, Phase.CANCELLED)
    world.tick()
    assert world.reasons(workload) == [] and world.workload(workload).region == "r"


def test_reasons_name_nobody_elses_workload(world: World) -> None:
    """If a workload is refused because a smaller one was, its reason names the resources, not the other workload.

    The other workload may belong to another tenant, and at its end the reasons of all others would be rewritten.
    """
    world.region("r")
    world.machine("r/c/m", gpus=2)
    world.submit(job(gpus=2))
    world.tick()
    ahead, behind = world.submit(job(gpus=1)), world.submit(job(gpus=2))
    world.tick()
    told = world.reasons(behind)
    assert world.waiting(behind) == ["refused_like r"] and ahead not in str(told)
    assert "1 GPU of type a100" in told[0]["sentence"]
    world.change(ahead, Phase.CANCELLED)
    following = world.submit(job(gpus=1))
    world.alter(Workload, following, submitted_at=text("now() - interval '1 hours'"))
    with world.session() as session:
        before = session.scalar(text("select xmin::text from waiting where workload = :id"), {"id": behind})
    world.tick()
    with world.session() as session:
        after = session.scalar(text("select xmin::text from waiting where workload = :id"), {"id": behind})
    assert after == before and world.waiting(following) == ["insufficient_capacity r"]


def test_a_workload_that_ended_meanwhile_gets_no_reasons(world: World) -> None:
    """A workload that was cancelled or deleted between bid and award gets no reasons; the other awards go on."""
    world.region("r")
    world.machine("r/c/m", gpus=1)
    cancelled, gone, last = (world.submit(job(gpus=n)) for n in (2, 2, 1))
    ticket = world.bid()
    world.change(cancelled, Phase.CANCELLED)
    with world.session() as session:
        session.delete(session.get_one(Workload, gone))
    assert world.award(ticket).awarded == 1
    assert world.workload(last).region == "r"
    with world.session() as session:
        assert session.scalars(select(Waiting)).all() == []


def test_a_stale_bid_is_made_again(world: World) -> None:
    """If a plan has become impossible since its bid, the same award makes a new plan, possibly in another region."""
    for region in ("east", "west"):
        world.region(region)
        world.machine(f"{region}/c/m", gpus=1)
    workload = world.submit(job())
    ticket = world.bid()
    world.machines.lost(world.attend("east/c/m"))
    result = world.award(ticket)
    assert (result.awarded, result.rebids) == (1, 1)
    assert world.workload(workload).region == "west"
    check(world)


def test_a_plan_that_is_always_stale_waits_for_the_next_tick(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three stale plans the workload waits and another scan is requested."""
    world.region("r")
    world.machine("r/c/m")
    workload = world.submit()
    ticket = world.bid()
    wakes = world.put_out("wake")

    body = awards.body_of

    def too_much(candidate: awards.PlannedAward) -> dict[str, Any]:
        out = body(candidate)
        out["machines"][0]["gpus"] += 100
        return out

    with monkeypatch.context() as patched:
        patched.setattr(awards, "body_of", too_much)
        result = world.award(ticket)
    assert (result.awarded, result.waiting, result.rebids) == (0, 1, 2)
    assert world.waiting(workload) == ["award_conflict r"]
    assert world.put_out("wake") == wakes + 1
    assert world.workload(workload).attempt == 0
    assert world.tick().awarded == 1


def test_an_award_that_is_carried_out_again_changes_nothing(world: World) -> None:
    """A second award of the same batch awards nothing and changes no row."""
    world.region("r")
    world.machine("r/c/m", gpus=2)
    for gpus in (1, 4, 1):
        world.submit(job(gpus=gpus))
    ticket = world.bid()
    assert world.award(ticket).awarded == 2
    before = {**world.dump(), "publication": []}
    assert world.award(ticket).awarded == 0
    assert {**world.dump(), "publication": []} == before


def test_who_was_awarded_since_the_scan_has_the_rank_of_its_award(world: World) -> None:
    """In a later batch of the same scan, workloads that an earlier batch placed keep the rank of their award."""
    world.region("r")
    world.machine("r/c/m", gpus=4)
    world.tenant("high", level=1)
    world.tenant("middle", level=4)
    first, second = world.submit(job(gpus=4), tenant="high"), world.submit(job(gpus=4), tenant="middle")
    world.configure(batch=1)
    ticket = world.scan()
    assert world.queue() == [first, second]
    for place in range(2):
        world.regions.bid(BidRequest("r", ticket.scan, place))
        world.auction.award(AwardRequest(ticket.scan, place, [], 30.0))
    assert world.evictions() == set()
    assert world.workload(first).region == "r"
    assert world.waiting(second) == ["insufficient_capacity r"]


@pytest.mark.usefixtures("publishes_every_scan")
def test_a_scan_publishes_the_queue(world: World) -> None:
    """A tick publishes the queue in GMS's order, without held workloads, and a scan deletes older bids."""
    world.region("r")
    world.machine("r/c/m", gpus=1)
    names = [world.submit(job(gpus=2)) for _ in range(3)]
    world.alter(Workload, names[1], held_by="somebody")
    world.bid()
    ticket = world.scan()
    assert world.queue() == [names[0], names[2]] and ticket.regions == ["r"]
    with world.session() as session:
        assert session.scalars(select(RegionBid)).all() == []
    world.award(ticket)
    with world.session() as session:
        found = published_queue.load(session)
        queue = gms.scan.scan(oracle.queue_snapshot(session, world.settings.scheduler)).queue
    assert found.scan == ticket.scan and len(found) == 2
    assert [id_ for _, id_ in found.of_tenant(None)] == [r.id for r in queue]
    assert [found.entry(row).position for row in range(2)] == [1, 2]


@pytest.mark.usefixtures("publishes_every_scan")
def test_expected_starts_are_published(world: World) -> None:
    """A workload that waits for a running one has an interval; one that fits on no machine has none.

    What was learned is restored by the next process.
    """
    world.region("r")
    world.machine("r/c/m", gpus=1)
    world.running(job(gpus=1), ago_s=1800.0)
    waits, never = world.submit(job(gpus=1)), world.submit(job(gpus=2))
    world.tick()
    with world.session() as session:
        found = published_queue.load(session)
        learned = session.get_one(Publication, start_forecasts.NAME).body
    position = found.find(waits)
    assert position is not None and position.start_s is not None
    first_s, last_s = position.start_s
    assert found.scanned_at_s <= first_s < last_s
    assert found.find(never) is not None and found.find(never).start_s is None  # type: ignore[union-attr]
    again = AuctionActivities(world.engine, world.settings, world.scheduler_state)
    again._starts._restore()
    assert again._starts._forecaster.to_json() == learned


def test_a_publication_that_waited_does_not_delay_the_next_for_long(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database blocks one for ten minutes: the next is due half a minute later, not after a share of the time."""
    now_s = [1000.0]

    def blocked(*_: object) -> None:
        now_s[0] += 600.0

    world.region("r")
    world.machine("r/c/m", gpus=1)
    world.submit(job(gpus=2))
    ticket = world.bid()
    monkeypatch.setattr(auction, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(published_queue, "publish", blocked)
    world.award(ticket)
    assert world.auction._scanned is not None
    assert world.auction._publish(world.auction._scanned) == 30.0


def test_capacity_is_seen_at_once(world: World) -> None:
    """A bid does not use a cordoned machine, and uses it again as soon as it is uncordoned."""
    world.region("r")
    world.machine("r/c/m", gpus=1)
    workload = world.submit(job())
    world.alter(Machine, "r/c/m", cordon={"code": "cordoned_by_operator", "detail": {"by": "x"}})
    world.tick()
    assert world.waiting(workload) == ["no_hardware r"]
    world.alter(Machine, "r/c/m", cordon=None)
    assert world.tick().awarded == 1
