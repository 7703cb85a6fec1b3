"""The scheduler's state in memory gives the same decisions as a full read, after any operations in any order."""

import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, delete, select, text

import gms.scan
from activities.scheduling.bids import BidSubject, placement_request, region_bid
from activities.scheduling.scan_result import ScannedWorkload
from activities.scheduling.scheduler_state import SchedulerState
from domain.capacity import CapacityKind
from domain.demand import WorkloadDemand, demand_of
from domain.phases import Phase
from domain.protocol.scheduling import DryRunRequest
from domain.scheduling import Bid, JobRequest, RegionSnapshot, ScanResult
from domain.spec import WorkloadSpec
from domain.spread import SpreadLevel
from domain.topology import TopologyRule
from infra.db import changes
from infra.db.logs import Change
from infra.db.migrate import upgrade
from infra.db.models import Attempt, Cluster, Eviction, Machine, Region, Workload
from infra.db.session import open_engine, transaction
from infra.db.tenants import Tenant
from infra.stack.ports import free_port
from infra.stack.postgres import EmbeddedPostgres
from rms.bid import bid_in
from rms.gang import Planner
from rms.region import RegionColumns as Columns
from tests.activities import oracle
from tests.activities.random_walk import FLEET, Walk
from tests.activities.world import World, job
from tests.depth import examples

PROBES = [
    (job(gpus=1),), (job(gpus=4),), (job(tasks=3, gpus=2),), (job(tasks=2, gpus=4), job("b", gpus=0, cpus_milli=9000)),
    (job(gpus=0, cpus_milli=15_000),), (job(gpus=2, types=("h100", "a100")),),
]  # fmt: skip
"""Gangs whose bids are compared, at several ranks."""
ANYWHERE = ("spot", "voluntary", "reserved", "on_demand")
"""Capacity kinds of every second gang."""


def agree(world: World, state: SchedulerState) -> None:
    """Checks that scan and bids from memory equal those of a full read at the same time."""
    with state.current(), transaction(world.engine, isolation="REPEATABLE READ") as session:
        settings = world.settings.scheduler
        _same_scan(state, gms.scan.scan(oracle.queue_snapshot(session, settings, state.now_s)))
        assert set(state.regions) == set(session.scalars(select(Region.name)))
        for region in sorted(state.regions):
            snapshot = oracle.region_snapshot(session, region, settings, state.now_s)
            assert _bids(state, region) == _plain_bids(snapshot), region


def _same_scan(state: SchedulerState, plain: ScanResult) -> None:
    found = state.queue.scan(state.now_s).result()
    assert [replace(r, credit=0.0) for r in found.queue] == [replace(r, credit=0.0) for r in plain.queue]
    # Shares of use are exact in memory; the full read sums them in floating point.
    assert [r.credit for r in found.queue] == pytest.approx([r.credit for r in plain.queue], rel=1e-9, abs=1e-9)
    assert found.placed_ranks == plain.placed_ranks


def _requests() -> Iterator[BidSubject]:
    for number, jobs in enumerate(PROBES):
        for rank in (1, 4, 8):
            demand = WorkloadDemand(tuple(j.request(ANYWHERE) if number % 2 else j.request() for j in jobs))
            queued = ScannedWorkload("~probe", rank, None, None)
            yield BidSubject(queued, demand, placement_request(queued, demand, "t"), {}, 0.0, rank)


def _bids(state: SchedulerState, region: str) -> list[Bid]:
    return [region_bid(state.planner(region), a) for a in _requests()]


def _plain_bids(snapshot: RegionSnapshot) -> list[Bid]:
    # Like `rms.bid.bid`, but builds the columns once: they took most of the time of these tests.
    planner = Planner(Columns.of(snapshot))
    return [bid_in(planner, a.request) for a in _requests()]


@pytest.mark.parametrize("seed", range(examples(6)))
def test_what_is_held_decides_like_everything_read_anew(database: Engine, tmp_path: Path, seed: int) -> None:
    """After many random operations the state in memory gives the same ranks, plans and reasons as a full read."""
    chance = random.Random(seed)
    world = World(database, tmp_path)
    walk = Walk(world, seed, FLEET)
    state = SchedulerState(world.engine, world.settings.scheduler)
    others: list[Callable[[], None]] = [
        lambda: _touch(world, chance), lambda: _abort(world, chance), lambda: _quota(world, chance),
        lambda: _forget(world), lambda: _end(world, chance), lambda: _move(world, chance),
        lambda: _terms(world, chance),
    ]  # fmt: skip
    for _ in range(70):
        for _ in range(chance.randrange(1, 4)):
            chance.choice([walk.step, walk.step, walk.step, *others])()
        agree(world, state)
    assert state.full_reads < 25 and world.scheduler_state.full_reads < 25


def _terms(world: World, chance: random.Random) -> None:
    """Changes a cluster's capacity kind and prices."""
    with world.session() as session:
        clusters = session.scalars(select(Cluster).order_by(Cluster.region, Cluster.name)).all()
        if clusters:
            cluster = chance.choice(clusters)
            cluster.capacity = chance.choice(["reserved", "on_demand", "spot", "voluntary"])
            cluster.prices = {"a100": chance.choice([0.0, 1.0, 2.5]), "cpu": chance.choice([0.0, 0.05])}


def _touch(world: World, chance: random.Random) -> None:
    """Changes the start, checkpoint, award or resumed step of a placed workload."""
    with world.session() as session:
        live = session.scalars(select(Attempt).where(Attempt.released_at.is_(None)).order_by(Attempt.workload)).all()
        if live:
            attempt = chance.choice(live)
            column = chance.choice(["started_at", "checkpoint_at", "awarded_at", "resumed_step"])
            ago = text(f"now() - interval '{chance.randrange(9000)} seconds'")
            setattr(attempt, column, chance.choice([None, 0, 7]) if column == "resumed_step" else ago)


def _abort(world: World, chance: random.Random) -> None:
    """Makes many changes and rolls them back."""
    with pytest.raises(RuntimeError), world.session() as session:
        session.execute(text("update workload set level = 7, held_by = 'x'"))
        session.execute(text("update machine set draining = true"))
        raise RuntimeError


def _quota(world: World, chance: random.Random) -> None:
    world.alter(Tenant, "poor", quota_gpus={"a100": chance.randrange(6)}, level=chance.randrange(1, 7))


def _forget(world: World) -> None:
    """Deletes old changes, so that states that have not read them need a full read."""
    with world.session() as session:
        changes.forget(session, timedelta(0))


def _end(world: World, chance: random.Random) -> None:
    """Deletes the evictions of an ended workload, or changes the award time of a released attempt."""
    with world.session() as session:
        over = session.scalars(select(Workload.id).where(Workload.finished_at.is_not(None)).order_by(Workload.id)).all()
        released = session.scalars(
            select(Attempt).where(Attempt.released_at.is_not(None)).order_by(Attempt.workload, Attempt.attempt)
        ).all()
        if released and chance.random() < 0.5:
            chance.choice(released).awarded_at = text("awarded_at - interval '1 hour'")
        elif over:
            gone = chance.choice(over)
            session.execute(delete(Eviction).where((Eviction.victim == gone) | (Eviction.evictor == gone)))
            session.execute(text("update attempt set outcome = null where workload = :w"), {"w": gone})


def _move(world: World, chance: random.Random) -> None:
    """Changes the age, the time on hold or the requested level of a queued workload."""
    with world.session() as session:
        queued = session.scalars(
            select(Workload).where(Workload.phase.in_(["pending", "preempted"])).order_by(Workload.id)
        ).all()
        if queued:
            row = chance.choice(queued)
            row.submitted_at = text(f"now() - interval '{chance.randrange(9000)} seconds'")
            row.level = chance.choice([None, 5, 7])
            row.paused_s = chance.choice([0.0, 0.0, 100.25, 5000.0])


def test_what_others_do_at_the_same_time_is_seen_once_it_is_committed(world: World) -> None:
    """With several concurrent writers, each committed change is applied exactly once."""
    for region in ("east", "west"):
        world.region(region)
        for n in range(3):
            world.machine(f"{region}/c/m{n}", 8)
    state = SchedulerState(world.engine, world.settings.scheduler)
    looks = threading.Event()

    def write(number: int) -> None:
        chance = random.Random(number)
        own = World(world.engine, world.folder, prefix=f"w{number}")
        for _ in range(12):
            name = own.submit(job(gpus=chance.choice([1, 2])))
            if chance.random() < 0.5:
                own.alter(Workload, name, held_by="x")
            with transaction(world.engine) as session:
                session.execute(text("update machine set draining = not draining where id = 'east/c/m0'"))
                session.execute(text("select pg_sleep(:s)"), {"s": chance.random() / 50})

    writers = [threading.Thread(target=write, args=[n]) for n in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        with state.current():
            looks.set()
    for writer in writers:
        writer.join()
    assert looks.is_set() and state.full_reads == 1
    agree(world, state)
    with state.current():
        assert len(state.queue.queue.pending) == 36


def test_a_change_that_commits_late_is_seen(world: World) -> None:
    """A transaction that began before others but commits after a refresh is applied at the next refresh."""
    state = SchedulerState(world.engine, world.settings.scheduler)
    with state.current():
        pass
    with transaction(world.engine) as early:
        early.execute(text("insert into workload (id, tenant, name, spec) values ('early', 't', 'early', '{}')"))
        with transaction(world.engine) as later:
            later.execute(text("insert into workload (id, tenant, name, spec) values ('later', 't', 'later', '{}')"))
        with state.current():
            assert [state.queue.queue.pending.name(0)] == ["later"] and len(state.queue.queue.pending) == 1
    with state.current():
        assert len(state.queue.queue.pending) == 2
    assert state.full_reads == 1


def test_who_fell_behind_reads_everything(world: World) -> None:
    """A state that has missed deleted changes needs a full read; a state that has applied them does not."""
    behind, there = (SchedulerState(world.engine, world.settings.scheduler) for _ in range(2))
    for state in (behind, there):
        with state.current():
            pass
    world.submit()
    with there.current():
        pass
    _forget(world)
    with world.session() as session:
        assert session.scalars(select(Change)).all() == []
    for state in (behind, there):
        agree(world, state)
    assert (behind.full_reads, there.full_reads) == (2, 1)


def test_a_table_that_is_emptied_is_seen(world: World) -> None:
    """A truncated table is noticed, although no row records it."""
    world.submit()
    state = SchedulerState(world.engine, world.settings.scheduler)
    agree(world, state)
    with world.session() as session:
        session.execute(text("truncate workload cascade"))
    with state.current():
        assert len(state.queue.queue.pending) == 0


def test_a_look_that_fails_is_made_up_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed refresh the next one does a full read and is correct."""
    world.region("r")
    world.machine("r/c/m")
    state = SchedulerState(world.engine, world.settings.scheduler)
    agree(world, state)
    world.submit()
    world.machine("r/c/n")

    def fail(*_: object) -> None:
        raise OSError("no more memory")

    with monkeypatch.context() as patched:
        patched.setattr(SchedulerState, "_put_machine", fail)
        with pytest.raises(OSError, match="no more memory"), state.current():
            pass
    agree(world, state)


def test_counts_go_on_when_everything_is_read_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Auction counters never decrease, even after a full read."""
    world.region("r")
    world.machine("r/c/m")
    world.submit()
    world.tick()
    state = world.scheduler_state
    before, reads = state.newest_auction().stats.bids, state.full_reads
    world.machine("r/c/n")
    with monkeypatch.context() as patched:
        patched.setattr(SchedulerState, "_put_machine", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), state.current():
            pass
    world.submit()
    world.tick()
    assert state.full_reads == reads + 1
    assert state.newest_auction().stats.bids == before + 1


def test_a_dry_run_disturbs_nothing(world: World) -> None:
    """A dry run leaves the state in memory unchanged, even if ranks are not written yet."""
    world.region("r")
    world.machine("r/c/m", gpus=4)
    world.tenant("high", level=1)
    low = world.running(job(gpus=4))
    world.submit(job(gpus=2))
    world.alter(Workload, low, level=6)
    spec = WorkloadSpec(name="x", tenant="high", jobs=(job(gpus=4),))
    with world.scheduler_state.current() as state:
        before = state.queue.scan(state.now_s).result(), _bids(state, "r")
        told = world.auction.dry_run(DryRunRequest(spec.model_dump(mode="json")))
        after = state.queue.scan(state.now_s).result()
        assert [r.id for r in after.queue] == [r.id for r in before[0].queue]
        assert after.placed_ranks == before[0].placed_ranks == {low: 6}
    assert told.victims == [low]
    agree(world, world.scheduler_state)


def test_a_region_of_its_own_follows_what_concerns_it(world: World) -> None:
    """A process that holds one region and no queue gives the same bids as one that holds everything."""
    for region in ("east", "west"):
        world.region(region)
        world.machine(f"{region}/c/m")
    own = SchedulerState(world.engine, world.settings.scheduler, ["east"])
    for gpus in (1, 2, 4, 1):
        world.running(job(gpus=gpus))
        world.alter(Machine, "west/c/m", failed_gangs=gpus)
        with own.current(), world.scheduler_state.current():
            own.now_s = world.scheduler_state.now_s
            own.regions["east"].refresh(own.now_s)
            assert list(own.regions) == ["east"] and len(own.queue.queue.pending) == 0
            assert _bids(own, "east") == _bids(world.scheduler_state, "east")
    assert own.full_reads == 1


def test_machines_move_and_regions_come_and_go(world: World) -> None:
    """Moved machines and new or deleted regions are applied at the next refresh."""
    world.region("east")
    world.machine("east/c/m")
    state = SchedulerState(world.engine, world.settings.scheduler)
    agree(world, state)
    world.region("west")
    agree(world, state)
    world.machine("east/c/m", region="west", incarnation="boot-2")
    agree(world, state)
    with world.session() as session:
        session.execute(text("delete from cluster where region = 'east'"))
        session.execute(text("delete from region where name = 'east'"))
    agree(world, state)
    assert set(state.regions) == {"west"}
    with world.session() as session:
        session.execute(text("delete from machine"))
    agree(world, state)


def test_a_clusters_prices_and_kind_are_held_with_its_machines(world: World) -> None:
    """A new capacity kind or price of a cluster is applied even if its machines do not change."""
    world.region("east")
    for name in ("a", "b"):
        world.machine(f"east/{name}/m")
    state = SchedulerState(world.engine, world.settings.scheduler)

    def chosen() -> tuple[str, float]:
        agree(world, state)
        plan = _bids(state, "east")[0].plan
        assert plan is not None
        return plan.jobs[0].cluster, plan.quality.usd_per_h

    assert chosen() == ("a", 0.0)
    world.alter(Cluster, ("east", "a"), prices={"a100": 2.0, "cpu": 1.0})
    assert chosen() == ("b", 0.0)
    world.alter(Cluster, ("east", "b"), prices={"a100": 3.0})
    assert chosen() == ("a", 2.1)
    world.alter(Cluster, ("east", "a"), capacity="spot")
    assert chosen() == ("b", 3.0)
    world.alter(Cluster, ("east", "b"), capacity="voluntary")
    assert chosen() == ("a", 2.1)


def test_what_is_asked_is_what_the_specification_says(world: World) -> None:
    """The demand that Postgres derives from a specification equals the demand that Python derives."""
    topology = TopologyRule(preferred=SpreadLevel.ZONE, slice_tasks=2, slice_level=SpreadLevel.RACK)
    full = job("a", tasks=2, most_tasks=5, gpus=2, types=("h100", "a100"), span_clusters=True, topology=topology)
    kinds = (CapacityKind.SPOT, CapacityKind.RESERVED)
    request = full.request(tuple(kind.value for kind in kinds))
    said = [one for one in fields(JobRequest) if one.name != "moves"]  # Moves are no part of a specification.
    assert all(getattr(request, one.name) != one.default for one in said), "every field must differ from its default"
    spec = WorkloadSpec(
        name="w", tenant="t", jobs=(full, job("b", gpus=0)),
        tables=("words", "a \"quoted\" name"), regions_allowed=("east", "west"), regions_excluded=("west",),
        capacity=kinds,
    )  # fmt: skip
    plain = WorkloadSpec(name="w", tenant="t", jobs=(job(),))
    with world.session() as session:
        for given in (spec, plain):
            derived = session.scalar(text("select workload_ask(cast(:s as jsonb))"), {"s": given.model_dump_json()})
            demand = demand_of(str(derived))
            assert (demand.jobs, demand.tables) == (given.requests(), given.tables)
            for region in ("east", "west", "north"):
                assert demand.allows_region(region) == given.allows_region(region)


@pytest.fixture
def fragile(tmp_path: Path) -> Iterator[tuple[EmbeddedPostgres, Engine, Callable[[], None]]]:
    """A separate Postgres, an engine on it, and a function that crashes and restarts the server."""
    server = EmbeddedPostgres(tmp_path / "postgres", free_port())
    server.initialise()
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        running.append(subprocess.Popen(server.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        server.wait_ready(running[-1])

    def crash() -> None:
        running[-1].send_signal(signal.SIGQUIT)  # Immediate shutdown: Postgres writes nothing.
        running[-1].wait(20)
        start()

    start()
    engine = open_engine(server.url)
    upgrade(engine)
    try:
        yield server, engine, crash
    finally:
        engine.dispose()
        running[-1].send_signal(signal.SIGINT)
        running[-1].wait(20)


def test_a_crash_of_postgres_is_noticed(
    fragile: tuple[EmbeddedPostgres, Engine, Callable[[], None]], tmp_path: Path
) -> None:
    """A crash of Postgres empties the change log; the state then does one full read and follows the log again."""
    _, engine, crash = fragile
    world = World(engine, tmp_path)
    world.tenant()
    world.region("r")
    world.machine("r/c/m")
    running = world.running(job(gpus=2))
    agree(world, world.scheduler_state)
    reads = world.scheduler_state.full_reads
    crash()
    agree(world, world.scheduler_state)
    assert world.scheduler_state.full_reads == reads + 1
    world.release(running, Phase.PREEMPTED)
    agree(world, world.scheduler_state)
    assert world.scheduler_state.full_reads == reads + 1
