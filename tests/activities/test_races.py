"""Concurrent releases, awards and ends of workloads on several connections."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import text

from activities.lifecycle import handover
from domain.phases import Phase
from domain.protocol.workloads import ReleaseRequest
from domain.task_reports import TaskProgress
from infra.db.models import Attempt
from infra.db.session import transaction
from tests.activities.invariants import check
from tests.activities.world import StalePlan, World, job
from tests.depth import few

M1, M2 = "r/c/m1", "r/c/m2"


@pytest.fixture
def contest(world: World) -> tuple[World, str, list[str]]:
    """An evictor that waits for two victims, each on its own machine."""
    world.region("r")
    world.tenant("high", level=1)
    world.machine(M1)
    world.machine(M2)
    victims = [world.running(job(gpus=4)) for _ in range(2)]
    evictor = world.submit(job(tasks=2, gpus=4), tenant="high")
    assert world.tick().awarded == 1
    return world, evictor, victims


def waits_for_a_lock(world: World, done: Callable[[], bool]) -> bool:
    """Returns True once a connection waits for a lock, or False once `done`."""
    give_up_s = time.monotonic() + 20
    while time.monotonic() < give_up_s:
        with transaction(world.engine) as session:
            waiting = text(
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            )
            if session.scalar(waiting):
                return True
        if done():
            return False
        time.sleep(0.005)
    raise AssertionError("no connection waits for a lock, and the call does not end")


@pytest.mark.parametrize("first", [0, 1])
def test_two_victims_that_give_up_at_the_same_instant(contest: tuple[World, str, list[str]], first: int) -> None:
    """If the releases of two victims overlap, the evictor gets exactly one `slots_ready`, after both have released."""
    world, evictor, victims = contest
    early, late = victims[first], victims[1 - first]
    with ThreadPoolExecutor(1) as pool:
        with transaction(world.engine) as session:
            # The whole release except its commit.
            handover.release(session, [ReleaseRequest(early, 1, Phase.PREEMPTED.value, {})])
            session.execute(
                text("update attempt set released_at = clock_timestamp() where workload = :w"), {"w": early}
            )
            session.execute(text("update workload set phase = 'pending', region = null where id = :w"), {"w": early})
            other = pool.submit(world.release, late, Phase.PREEMPTED)
            waits_for_a_lock(world, other.done)
            assert world.mail(evictor, "slots_ready") == []
        other.result(20)
    assert len(world.mail(evictor, "slots_ready")) == 1
    assert world.attempt(evictor).ready_at is not None
    assert world.holdings(evictor) == {M1: (0b1111, 0), M2: (0b1111, 0)}


def test_a_victim_and_its_evictor_end_at_the_same_instant(
    contest: tuple[World, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hand-over and the concurrent end of its evictor never deadlock."""
    world, evictor, victims = contest
    handed_over, go_on = threading.Event(), threading.Event()
    notify = handover._notify_if_ready

    def slowly(*args: Any) -> None:
        handed_over.set()
        assert go_on.wait(20)
        notify(*args)

    monkeypatch.setattr(handover, "_notify_if_ready", slowly)
    with ThreadPoolExecutor(2) as pool:
        victim = pool.submit(world.release, victims[0], Phase.PREEMPTED)
        assert handed_over.wait(20)
        ending = pool.submit(world.release, evictor, Phase.CANCELLED)
        assert waits_for_a_lock(world, ending.done)
        go_on.set()
        victim.result(20)
        ending.result(20)
    check(world)
    world.release(victims[1], Phase.PREEMPTED)
    check(world)
    assert world.masks(M1) == world.masks(M2) == (0, 0)


def test_progress_and_release_at_the_same_instant(contest: tuple[World, str, list[str]]) -> None:
    """If a release comes while progress is written, the newer progress is kept."""
    world, _, (victim, _) = contest
    with ThreadPoolExecutor(1) as pool:
        with transaction(world.engine) as session:
            row = session.get_one(Attempt, (victim, 1), with_for_update=True)
            row.last_step, row.checkpoint_step, row.checkpoint_bytes = 9, 8, 700
            session.flush()
            older = TaskProgress("main", 0, step=7, checkpoint_step=6, checkpoint_at_s=1.0, checkpoint_bytes=600)
            ending = pool.submit(world.release, victim, Phase.PREEMPTED, progress=[older])
            assert waits_for_a_lock(world, ending.done)
        ending.result(20)
    attempt = world.attempt(victim)
    assert (attempt.last_step, attempt.checkpoint_step, attempt.checkpoint_bytes) == (9, 8, 700)


@pytest.mark.rotating
@pytest.mark.parametrize("seed", few(range(2), 1))
def test_many_awards_at_once(world: World, seed: int) -> None:
    """Of concurrent awards of one workload, or of the same slots, exactly one succeeds."""
    world.region("r")
    world.tenant("high", level=1)
    world.machine(M1)
    world.machine(M2)
    chance = random.Random(seed)
    with ThreadPoolExecutor(6) as pool:
        for _ in range(8):
            lows = [world.running(job(gpus=chance.choice([2, 4]))) for _ in range(chance.randrange(3))]
            rivals = [
                world.submit(job(tasks=chance.choice([1, 2]), gpus=chance.choice([2, 3, 4])), tenant="high")
                for _ in range(2)
            ]
            offers = [world.offer(chance.choice(rivals)) for _ in range(3)] + [world.offer(name) for name in rivals]
            chance.shuffle(offers)
            start = threading.Barrier(len(offers))
            results = [pool.submit(_accept, world, offer, start) for offer in offers]
            won = [offer.bid.workload for offer, result in zip(offers, results, strict=True) if _answer(result)]
            assert won and len(won) == len(set(won))
            assert {w for w in rivals if world.workload(w).phase == Phase.PLACING} == set(won)
            check(world)
            _all_end(world, pool, lows + rivals, chance)
            check(world)
            assert world.masks(M1) == world.masks(M2) == (0, 0)


def _accept(world: World, offer: Any, start: threading.Barrier) -> bool:
    start.wait(20)
    return world.accept(offer)


def _answer(result: "Future[bool]") -> bool:
    try:
        return result.result(30)
    except StalePlan:
        return False


def _all_end(world: World, pool: ThreadPoolExecutor, names: list[str], chance: random.Random) -> None:
    """Ends all workloads concurrently in random order."""
    chance.shuffle(names)
    placed = [name for name in names if world.workload(name).region is not None]
    for result in [pool.submit(world.release, name, Phase.CANCELLED) for name in placed]:
        result.result(30)
    for name in set(names) - set(placed):
        world.change(name, Phase.CANCELLED)
