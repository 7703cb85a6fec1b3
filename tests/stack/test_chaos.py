"""Anything may die at any time: parts of a running stack are killed at random, and what was acknowledged stays.

The choice of what dies when comes from a seed, so a failure can be repeated: MIZZEN_CHAOS_SEED=n.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from itertools import combinations

import pytest
from sqlalchemy import select

from domain.slots import bits
from infra.db.logs import Event
from infra.db.models import Allocation, Attempt, Machine, Workload
from infra.db.session import open_engine, transaction
from infra.stack.postgres import EmbeddedPostgres
from tests.stack.harness import Up, processes_of, wait_until

SEED = int(os.environ.get("MIZZEN_CHAOS_SEED", "7"))
ROUNDS = int(os.environ.get("MIZZEN_CHAOS_ROUNDS", "1"))
WHOLE = "MIZZEN_CHAOS_ROUNDS" in os.environ
"""`make chaos`; else a third of it."""
WORKLOADS = 40 if WHOLE else 14
KILL_FOR_S, KILL_EVERY_S, KILLS = 60.0 if WHOLE else 20.0, (2.0, 4.5), 10 if WHOLE else 5

PARTS: dict[str, Callable[[str], bool]] = {
    "agent": lambda c: "server agents" in c,  # each machine's is a fork of the host, with the same command line
    "worker": lambda c: "server worker" in c,
    "api": lambda c: "server api" in c,
    "temporal": lambda c: "start-dev" in c,
    "postgres": lambda c: "/postgres -D" in c,
}


def _kill_at_random(up: Up, chance: random.Random, stop: threading.Event, killed: list[str]) -> None:
    began = time.monotonic()
    while not stop.wait(chance.uniform(*KILL_EVERY_S)):
        if time.monotonic() > began + KILL_FOR_S and len(killed) >= KILLS:
            return
        part = chance.choice(sorted(PARTS))
        draw = chance.random()  # drawn whether or not something is there: the sequence depends on the seed alone
        found = sorted(pid for pid, command in processes_of(up.data).items() if PARTS[part](command))
        if found:
            pid = found[int(draw * len(found))]
            killed.append(f"{part} ({pid})")
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(SEED, SEED + ROUNDS))
def test_random_kills_lose_nothing(up: Up, seed: int) -> None:
    """Workloads, and a SIGKILL every few seconds: each ends once, no slot was shared, nothing is left."""
    chance = random.Random(seed)
    up.start()
    up.client().set_tenant("t", 3, {"a100": 16}, None)
    stop, killed = threading.Event(), list[str]()
    killer = threading.Thread(target=_kill_at_random, args=(up, random.Random(seed), stop, killed))
    killer.start()
    workloads = []
    try:
        for number in range(WORKLOADS):
            steps, tasks = chance.randrange(10, 60), chance.choice((1, 1, 2, 4))
            key = f"{seed}-{number}"
            submit = lambda: up.submit(f"w-{number}", steps, 0.1, tasks, key)  # noqa: B023,E731 - called in this turn
            workloads.append(wait_until(submit, f"workload {number} is accepted"))
            time.sleep(chance.uniform(0.0, 1.5))
        killer.join()
    finally:
        stop.set()
        killer.join()
    assert len(killed) >= KILLS, killed
    for workload in workloads:
        wait_until(lambda workload=workload: up.ended(workload), f"{workload} ends after {killed}", 180.0)
    assert len(set(workloads)) == WORKLOADS
    _assert_sound(up, workloads)
    assert up.interrupt() == 0
    assert processes_of(up.data) == {}


def _assert_sound(up: Up, workloads: list[str]) -> None:
    """Each ended once, allocations are disjoint, and every slot is free again."""
    engine = open_engine(EmbeddedPostgres(up.data / "postgres", up.ports["database-port"]).url)
    try:
        with transaction(engine) as session:
            ends = session.scalars(select(Event.workload).where(Event.kind == "workload.succeeded")).all()
            assert sorted(str(e) for e in ends) == sorted(workloads)
            assert session.scalars(select(Workload.id).where(Workload.finished_at.is_(None))).all() == []
            started = {(a.workload, a.attempt): a.started_at for a in session.scalars(select(Attempt))}
            held: dict[tuple[str, int], list[Allocation]] = {}
            for row in session.scalars(select(Allocation).order_by(Allocation.held_at, Allocation.workload)):
                assert row.released_at is not None, f"{row.workload} still holds {row.machine}"
                if row.held_at is not None:
                    for slot in bits(row.slots):
                        held.setdefault((row.machine, slot), []).append(row)
            for slot_id, holds in held.items():
                for one, other in combinations(holds, 2):
                    clash = f"{slot_id}: {one.workload}.{one.attempt} and {other.workload}.{other.attempt}"
                    assert one.released_at is not None and other.held_at is not None
                    assert other.held_at >= one.released_at, clash
                    # Nor did tasks of the later one start before those of the earlier one were known to have ended.
                    start_at = started[other.workload, other.attempt]
                    assert start_at is None or (one.stopped_at is not None and start_at >= one.stopped_at), clash
            for machine in session.scalars(select(Machine)):
                assert (machine.held, machine.promised) == (0, 0)
                assert machine.free_cpus_milli == machine.cpus_milli
    finally:
        engine.dispose()
