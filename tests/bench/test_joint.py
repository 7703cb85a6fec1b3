"""Joint placement of homes and replicas: its objective by a simple count, and its optimum by enumeration."""

from itertools import product

import numpy as np
import pytest

from bench.joint_model import MOST_PAIRS, Decided, together, two_step
from bench.replica_objective import ReplicaCost, ReplicaWeights, worth
from domain.instance import InstanceRegion, PlacedTable, RecurringJob, TetrisInstance
from reference.tetris_score import score
from research.tetris.generate import generate
from tests.tetris.small import small_instance
from tetris.columns import Columns, Ints
from tetris.replicas import Parts

WEIGHTS = ReplicaWeights(nowhere=3.0, recovery=2.0, reach=0.5)


def plainly(instance: TetrisInstance, homes: dict[str, str], copies: dict[str, set[str]]) -> float:
    """Returns the total by its definition; `copies` maps each table to its regions, including the home."""
    found = score(instance, homes)
    regions, tables = instance.regions, instance.tables
    stored = {r.name: sum(t.size_bytes for t in tables if r.name in copies[t.name]) for r in regions}
    storage = sum(
        (part(stored[r.name], sum(stored.values())) - part(r.storage_bytes, sum(s.storage_bytes for s in regions))) ** 2
        for r in regions
    )
    nowhere = reach = all_ml = all_gpu = 0.0
    for job in (job for job in instance.jobs if job.kind == "ml"):
        able = [
            r
            for r in regions
            if all(r.name in copies[t] for t in job.tables)
            and (job.gpu_type is None or r.gpu_hours.get(job.gpu_type, 0.0) > 0)
        ]
        all_ml += job.weight
        nowhere += job.weight * (not able)
        if job.gpu_type is not None:
            supply = {r.name: r.gpu_hours.get(job.gpu_type, 0.0) for r in regions}
            all_gpu += job.weight
            reach += job.weight * (1 - part(sum(supply[r.name] for r in able), sum(supply.values())))
    read = [t for t in tables if any(t.name in job.tables for job in instance.jobs)]
    alone = sum(t.size_bytes for t in read if not copies[t.name] - {homes[t.name]})
    w = instance.weights
    total = found.read * w.read + found.gpu * w.gpu + storage * w.storage
    total += WEIGHTS.nowhere * part(nowhere, all_ml) + WEIGHTS.reach * part(reach, all_gpu)
    return total + WEIGHTS.recovery * part(alone, sum(t.size_bytes for t in read))


def part(of: float, whole: float) -> float:
    """Returns a fraction; 0 if the whole is 0."""
    return of / whole if whole else 0.0


def named(columns: Columns, home: Ints, held: Parts) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Returns homes and copies by name."""
    names = columns.table_names
    homes = {name: columns.regions[home[t]] for t, name in enumerate(names)}
    return homes, {name: {columns.regions[r] for r in np.flatnonzero(held[t])} for t, name in enumerate(names)}


@pytest.mark.parametrize("seed", range(15))
def test_worth_is_that_of_a_plain_count(seed: int) -> None:
    """The objective equals the simple count for random homes and copies, even if they exceed storage."""
    instance = small_instance(seed, 7, 4, 12)
    columns = Columns.of(instance)
    draw = np.random.default_rng(seed)
    home = draw.integers(4, size=7).astype(np.int32)
    held = (draw.random((7, 4)) < 0.4).astype(np.float32)
    held[np.arange(7), home] = 1.0
    found = worth(columns, home, held, WEIGHTS)
    assert found.total == pytest.approx(plainly(instance, *named(columns, home, held)))
    stored = (held * columns.size_bytes[:, None]).sum(axis=0)
    assert found.over_bytes == pytest.approx(np.maximum(stored - columns.capacity_bytes, 0.0).sum())


def test_two_tables_in_one_region_need_no_third_copy() -> None:
    """A job whose two tables have different homes needs a copy that does not fit; joint placement avoids it."""
    given = TetrisInstance(
        (InstanceRegion("r", 20.0, {"a": 10.0}), InstanceRegion("s", 20.0, {"a": 10.0})),
        (PlacedTable("x", 10.0, "r"), PlacedTable("y", 20.0, "s")),
        (RecurringJob("j", "ml", ("x", "y"), 1, gpu_type="a", gpu_hours=1.0),),
    )
    columns = Columns.of(given)
    columns.capacity_bytes[0] = 30.0
    home, held = columns.home, np.eye(2, dtype=np.float32)
    begin = Decided(home, held, worth(columns, home, held))
    assert begin.worth.nowhere == 1.0
    found = together(columns, begin, effort_s=1.0)
    assert found.worth.nowhere == 0.0 and found.held[:, 0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all(seed: int) -> None:
    """On three tables and two regions, no allowed choice costs less, and the start's constraints are kept."""
    instance = small_instance(seed, 3, 2, 5)
    columns = Columns.of(instance)
    begin = two_step(columns, time_s=0.02, seed=seed, weights=WEIGHTS)
    found = together(columns, begin, effort_s=1.0, seed=seed, weights=WEIGHTS)
    room = np.maximum(columns.capacity_bytes, begin.held.T @ columns.size_bytes)
    before = {(v.constraint, v.where): v.by for v in score(instance, {}).violations}
    totals = []
    for homes in product(range(2), repeat=3):
        home = np.array(homes, np.int32)
        for copies in product((0.0, 1.0), repeat=3):
            held = np.repeat(np.array(copies, np.float32)[:, None], 2, axis=1)
            held[np.arange(3), home] = 1.0
            named_homes, named_copies = named(columns, home, held)
            broken = [v for v in score(instance, named_homes).violations if v.constraint != "storage"]
            fits = (held.T @ columns.size_bytes <= room * (1 + 1e-9)).all()
            if fits and all(v.by <= before.get((v.constraint, v.where), 0.0) + 1e-9 for v in broken):
                totals.append(plainly(instance, named_homes, named_copies))
    assert found.worth.total == pytest.approx(plainly(instance, *named(columns, found.home, found.held)))
    assert found.worth.total <= begin.worth.total

    assert found.worth.total == pytest.approx(min(totals))


def test_replicas_alone_leave_homes() -> None:
    """Without moves, the homes stay and the copies are at least as good; with moves, the total gets better."""
    columns = generate(14, 4, seed=3)
    begin = two_step(columns, time_s=0.2, seed=1)
    alone = together(columns, begin, effort_s=1.0, moves=False)
    assert alone.home.tolist() == begin.home.tolist()
    assert alone.worth.total <= begin.worth.total
    assert alone.worth.read == begin.worth.read and alone.worth.gpu == begin.worth.gpu
    both = together(columns, begin, effort_s=3.0)
    assert both.worth.total < alone.worth.total and both.home.tolist() != begin.home.tolist()
    again = together(columns, begin, effort_s=1.0, moves=False)
    assert again.held.tolist() == alone.held.tolist()
    assert isinstance(again.worth, ReplicaCost) and again.worth.over_bytes == 0.0


def test_large_instances_are_refused() -> None:
    """An instance that is too large is rejected with its size and the limit."""
    columns = generate(MOST_PAIRS, 4, seed=0)
    begin = Decided(columns.home, np.zeros((MOST_PAIRS, 4), np.float32), ReplicaCost(*([0.0] * 8)))
    with pytest.raises(ValueError, match=f"tables times regions: {4 * MOST_PAIRS}: .* at most {MOST_PAIRS}"):
        together(columns, begin, effort_s=1.0)
