"""Inputs of the decision packages: use over the window, ranks, and evictable workloads."""

import random
from typing import Any

import pytest
from sqlalchemy import text

from activities.scheduling.bids import placement_request
from activities.scheduling.scan_result import ScannedWorkload
from domain.demand import WorkloadDemand
from domain.phases import Phase
from domain.scheduling import RegionSnapshot
from infra.db.models import Attempt, Machine, Workload
from tests.activities import oracle
from tests.activities.world import World, job

HOUR_S = 3600.0


@pytest.mark.parametrize("seed", range(3))
def test_use_over_the_window(world: World, seed: int) -> None:
    """Each tenant's share is the larger of its GPU and CPU seconds in the window, divided by those of its quota."""
    chance = random.Random(seed)
    world.region("r")
    world.machine("r/c/m1", 8, cpus_milli=16_000)
    world.machine("r/c/m2", 4, cpus_milli=8_000)
    world.machine("r/c/lost", 50, cpus_milli=90_000)
    world.machines.lost(world.attend("r/c/lost"))
    world.alter(Machine, "r/c/m2", cordon={"code": "x", "detail": {}})
    world.tenant("idle")
    now_s = 1_700_000_000.0
    window_s = 24 * HOUR_S
    expected: dict[str, list[float]] = {}
    for n in range(30):
        tenant = chance.choice(["t", "other", "third"])
        if tenant not in expected:
            expected[tenant] = [0.0, 0.0]
            if tenant != "t":
                world.tenant(tenant)
        start_s = now_s - chance.uniform(-1, 60) * HOUR_S
        end_s = start_s + chance.uniform(0, 40) * HOUR_S if chance.random() < 0.7 else None
        gpus, cpus_milli = {"a100": chance.randrange(5), "h100": chance.randrange(3)}, chance.randrange(9000)
        with world.session() as session:
            session.add(Workload(id=f"w{n}", tenant=tenant, name="w", spec={}))
            session.flush()
            session.add(
                Attempt(
                    workload=f"w{n}", attempt=1, region="r", plan={}, gpu_types=gpus, cpus_milli=cpus_milli,
                    awarded_at=_at(start_s), released_at=None if end_s is None else _at(end_s),
                )
            )  # fmt: skip
        held_s = min(end_s or now_s, now_s) - max(start_s, now_s - window_s)
        if held_s > 0:
            expected[tenant][0] += sum(gpus.values()) * held_s
            expected[tenant][1] += cpus_milli * held_s
    with world.session() as session:
        shares = oracle.window_shares(session, now_s, window_s)
    for tenant, (gpu_s, cpu_milli_s) in expected.items():
        share = max(gpu_s / window_s / 1000, cpu_milli_s / window_s / 24_000)
        assert shares.get(tenant, 0.0) == pytest.approx(share)
    assert "idle" not in shares


def _at(seconds: float) -> Any:
    return text(f"to_timestamp({seconds!r})")


def test_use_without_a_fleet_is_none(world: World) -> None:
    """If no machine is ready, every tenant's share is 0."""
    world.submit()
    with world.session() as session:
        snapshot = oracle.queue_snapshot(session, world.settings.scheduler)
    assert [t.window_share for t in snapshot.tenants] == [0.0]


def test_the_queue_as_gms_takes_it(world: World) -> None:
    """The snapshot has queued workloads with level and hold, and placed workloads with their holdings."""
    world.region("r")
    world.machine("r/c/m", 4)
    placed = world.running(job(gpus=2, cpus_milli=500), job("b", gpus=0, cpus_milli=700))
    over = world.running(job(gpus=1))
    world.release(over, Phase.SUCCEEDED)
    lower, held = world.submit(job(), level=6), world.submit(job())
    world.alter(Workload, held, held_by="x")
    with world.session() as session:
        snapshot = oracle.queue_snapshot(session, world.settings.scheduler)
    assert {(w.id, w.requested_level, w.held) for w in snapshot.pending} == {(lower, 6, False), (held, None, True)}
    (own,) = snapshot.placed
    assert (own.id, own.gpus, own.cpus_milli) == (placed, {"a100": 2}, 1200)
    assert snapshot.pending[0].submitted_at_s <= snapshot.now_s


def test_age_is_kept_over_a_preemption(world: World) -> None:
    """A preempted workload keeps its age since submission."""
    world.region("r")
    world.machine("r/c/m", 4)
    workload = world.running()
    submitted = world.workload(workload).submitted_at
    world.release(workload, Phase.PREEMPTED)
    with world.session() as session:
        (own,) = oracle.queue_snapshot(session, world.settings.scheduler).pending
    assert own.submitted_at_s == submitted.timestamp()


def _region(world: World) -> RegionSnapshot:
    with world.session() as session:
        return oracle.region_snapshot(session, "r", world.settings.scheduler)


def test_who_may_be_evicted(world: World) -> None:
    """A workload that waits for slots, is being evicted, or has run less than the minimum is not evictable."""
    world.configure(min_runtime_s=300)
    world.tenant("high", level=1)
    world.region("r")
    world.machine("r/c/m", 8)
    long = world.running(job(gpus=2), ago_s=301)
    short = world.running(job(gpus=2), ago_s=100)
    victim = world.running(job(gpus=4), ago_s=900)
    waiting = world.submit(job(gpus=4), tenant="high")
    world.tick()
    assert {e[2] for e in world.evictions()} == {victim}
    running = {w.id: w for w in _region(world).running}
    assert {w.id for w in running.values() if w.evictable} == {long}
    assert (running[long].rank, running[short].rank, running[waiting].rank) == (3, 3, 1)
    assert {w.attempt for w in running.values()} == {1}
    assert [h.gpus for h in running[waiting].holdings] == [0]
    assert running[long].last_checkpoint_at_s is None
    world.alter(Attempt, (long, 1), resumed_step=40)
    assert {w.id: w for w in _region(world).running}[long].last_checkpoint_at_s == running[long].started_at_s
    world.saved(long, ago_s=50)
    saved_at_s = {w.id: w for w in _region(world).running}[long].last_checkpoint_at_s
    assert saved_at_s is not None and 40 < _region(world).now_s - saved_at_s < 90


def test_the_time_before_a_start_counts_from_the_award(world: World) -> None:
    """Before its tasks run, a workload's running time counts from its award."""
    world.configure(min_runtime_s=300)
    world.region("r")
    world.machine("r/c/m", 8)
    workload = world.submit()
    world.tick()
    (own,) = _region(world).running
    assert not own.evictable and own.started_at_s == world.attempt(workload).awarded_at.timestamp()


def test_only_machines_that_take_work_are_listed(world: World) -> None:
    """Lost, joining, cordoned and draining machines are excluded; the free amounts of the others are exact."""
    world.region("r")
    for name in ("free", "held", "lost", "cordoned", "draining"):
        world.machine(f"r/c/{name}", 4)
    world.machines.register(world.hello("r/c/joining"))
    world.machines.lost(world.attend("r/c/lost"))
    world.alter(Machine, "r/c/cordoned", cordon={"code": "x", "detail": {}})
    world.alter(Machine, "r/c/draining", draining=True)
    workload = world.running(job(gpus=3, cpus_milli=1000, memory_bytes=77))
    (held,) = world.holdings(workload)
    found = {m.id: m for m in _region(world).machines}
    assert set(found) == {"r/c/free", "r/c/held"}
    own = found[held]
    assert (own.free_gpus, own.gpus, own.cpus_milli - own.free_cpus_milli) == (1, 4, 1000)
    assert own.memory_bytes - own.free_memory_bytes == 77


def test_a_request_has_the_types_and_the_rank_that_the_scan_found(world: World) -> None:
    """If a workload's quota fits only one GPU type, the request has only that type, else all its types."""
    demand = WorkloadDemand((job(types=("a100", "h100")).request(), job("b", gpus=0).request()))
    asked = placement_request(ScannedWorkload("w", 3, (("h100",), ()), None), demand, "t", frozenset({"e"}))
    assert (asked.rank, [j.gpu_types for j in asked.jobs]) == (3, [("h100",), ()])
    assert asked.may_not_evict == {"e"}
    free = placement_request(ScannedWorkload("w", 8, None, None), demand, "t")
    assert (free.rank, [j.gpu_types for j in free.jobs]) == (8, [("a100", "h100"), ()])
