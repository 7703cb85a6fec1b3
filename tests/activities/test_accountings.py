"""The same awards give the same free and held amounts in columns, database, simulator ledger and the plain helper."""

import random
from collections.abc import Callable, Iterable, Mapping

import pytest

import rms.award
import rms.bid
from activities.scheduling import awards
from domain.phases import Phase
from domain.scheduling import Holding, PlacementRequest, RegionSnapshot
from domain.spec import WorkloadSpec
from rms.region import RegionColumns
from simulation.ledger import Ledger
from tests.activities import oracle
from tests.activities.world import GIB, World, job
from tests.decisions.after_award import after_award

Amounts = tuple[int, ...]
Account = tuple[dict[str, Amounts], dict[str, dict[str, Amounts]]]
"""Free amounts of each machine, and amounts that each workload holds of each machine."""


def _account(free: Mapping[str, Iterable[int]], held: Mapping[str, Iterable[Holding]]) -> Account:
    amounts = {w: {h.machine: (h.gpus, h.cpus_milli, h.memory_bytes) for h in parts} for w, parts in held.items()}
    own = {w: {m: a for m, a in parts.items() if any(a)} for w, parts in amounts.items()}
    return {m: tuple(map(int, a)) for m, a in free.items()}, {w: parts for w, parts in own.items() if parts}


def _of_snapshot(snapshot: RegionSnapshot) -> Account:
    free = {m.id: (m.free_gpus, m.free_cpus_milli, m.free_memory_bytes) for m in snapshot.machines}
    return _account(free, {w.id: w.holdings for w in snapshot.running})


def _of_columns(region: RegionColumns, machines: Iterable[str], workloads: Iterable[str]) -> Account:
    rows = {m: region.row(m) for m in machines}
    free = {m: region.machines.free[:, row].tolist() for m, row in rows.items() if row is not None}
    return _account(free, {w: region.workload(w).holdings for w in workloads if region.number(w) is not None})


def _of_ledger(ledger: Ledger) -> Account:
    return _account(ledger.free, {w: ledger.holdings(w) for w in ledger.held})


def _database(world: World) -> RegionSnapshot:
    with world.session() as session:
        return oracle.region_snapshot(session, "r", world.settings.scheduler)


def _request(world: World, workload: str, rank: int) -> PlacementRequest:
    return PlacementRequest(workload, rank, WorkloadSpec.model_validate(world.workload(workload).spec).requests())


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(4))
def test_the_same_awards_give_the_same_account(new_world: Callable[..., World], seed: int) -> None:
    """After every award, and after every victim has left, free and held amounts are equal in all four."""
    world, chance = new_world(), random.Random(seed)
    world.tenant()
    world.region("r")
    for n in range(4):
        world.machine(f"r/c/m{n}", gpus=chance.choice([2, 4, 8]))
    for _ in range(6):
        gang = job(tasks=chance.randrange(1, 4), gpus=chance.choice([1, 2]), cpus_milli=chance.randrange(100, 4000))
        workload = world.submit(gang)
        world.tick()
        if world.workload(workload).region is not None:
            world.run(workload, ago_s=chance.randrange(3600, 9000))
    start = plain = _database(world)
    columns, ledger = RegionColumns.of(start), Ledger(start.machines)
    for running in start.running:
        ledger.hold(running.id, running.holdings, taken=True)
    machines, seen, awarded, victims = [m.id for m in start.machines], {w.id for w in start.running}, 0, list[str]()
    for _ in range(8):
        jobs = [job(f"j{i}", chance.randrange(1, 3), chance.choice([0, 1, 2, 4]), memory_bytes=GIB) for i in range(2)]
        request = _request(world, world.submit(*jobs), chance.choice([0, 1]))
        plan = rms.bid.bid(_database(world), request).plan
        if plan is None:
            continue
        attempts = {victim: world.workload(victim).attempt for victim in plan.victims}
        candidate = awards.PlannedAward(plan, request.rank, request.jobs, attempts)
        assert world.award_all([candidate]) == awards.Awarded(1)
        rms.award.award(columns, plan, request)
        ledger.award(plan, request.jobs)
        plain = after_award(plain, plan, request)
        seen.add(request.workload)
        victims += plan.victims
        awarded += 1
        accounts = [_of_snapshot(_database(world)), _of_columns(columns, machines, seen), _of_ledger(ledger)]
        assert accounts == 3 * [_of_snapshot(plain)], plan
    assert awarded and victims
    for victim in victims:
        world.release(victim, Phase.PREEMPTED)
        rms.award.leave(columns, victim)
        ledger.leave(victim)
        ledger.check()
        assert _of_snapshot(_database(world)) == _of_columns(columns, machines, seen) == _of_ledger(ledger), victim
