"""Small random instances with all special cases: ties, replicas, tight limits, infeasible starts, zeros."""

import random
from itertools import product

import numpy as np

from domain.instance import InstanceRegion, PlacedTable, PlanScore, RecurringJob, TetrisInstance, Weights
from reference.tetris_score import score
from tetris.columns import Columns
from tetris.kernels import layout
from tetris.problem import PlacementProblem

TYPES = ("a100", "h100", "v100")
APPS = ("training", "spark", "etl")


def small_instance(seed: int, tables: int = 6, regions: int = 3, jobs: int = 8) -> TetrisInstance:
    """Returns the instance of a seed; sizes and hours are whole numbers, so that sums are exact."""
    draw = random.Random(seed)
    names = [f"r{index}" for index in range(regions)]
    draw.shuffle(names)
    types = TYPES[: draw.randint(1, 3)]
    table_list = []
    for index in range(tables):
        home = draw.choice(names)
        others = [name for name in names if name != home]
        replicas = draw.sample(others, draw.choice((0, 0, 0, min(1, len(others)), min(2, len(others)))))
        size = draw.choice((0, 1, 1, 2, 3, draw.randint(1, 100)))
        table_list.append(PlacedTable(f"t{index}", float(size), home, tuple(replicas)))
    job_list = [_job(draw, index, table_list, types) for index in range(jobs)]
    stored = {name: sum(t.size_bytes for t in table_list if name == t.home or name in t.replicas) for name in names}
    room = draw.choice((0.7, 1.0, 1.3, 3.0))
    region_list = [
        InstanceRegion(
            name,
            float(round(draw.choice((stored[name], sum(stored.values()) / regions)) * room)),
            {g: float(draw.choice((0, 10, 30, 60))) for g in types if draw.random() < 0.8},
            {app: float(draw.choice((0, 20, 60, 200))) for app in APPS if draw.random() < 0.4},
        )
        for name in names
    ]
    weights = Weights(
        read=draw.choice((0.0, 1.0, 2.5)),
        gpu=draw.choice((0.5, 1.0, 1.0)),
        storage=draw.choice((0.0, 1.0, 3.0)),
        overload=draw.choice((0.0, 4.0, 4.0)),
        by_priority=draw.choice(({}, {1: 4.0, 2: 2.0})),
    )
    all_bytes = sum(t.size_bytes for t in table_list)
    quota = draw.choice((None, None, 0.0, round(all_bytes * 0.3), round(all_bytes * 0.7)))
    return TetrisInstance(
        tuple(region_list), tuple(table_list), tuple(job_list), weights, draw.choice((0.0, 0.5, 0.9, 1.0)), quota
    )


def _job(draw: random.Random, index: int, tables: list[PlacedTable], types: tuple[str, ...]) -> RecurringJob:
    kind = draw.choice(("ml", "ml", "spark", "presto"))
    read = draw.sample([t.name for t in tables], min(len(tables), draw.choice((0, 1, 1, 2, 2, 3, 4))))
    on_gpus = draw.random() < (0.9 if kind == "ml" else 0.2)
    return RecurringJob(
        name=f"j{index}",
        kind=kind,  # type: ignore[arg-type]
        tables=tuple(read),
        priority=draw.choice((1, 1, 2, 3, 7)),
        app=draw.choice((None, *APPS)),
        gpu_type=draw.choice(types) if on_gpus else None,
        gpu_hours=float(draw.choice((0, 1, 8, 8, 40))) if on_gpus else 0.0,
        cpu_hours=float(draw.choice((0, 5, 20, 50))),
        weight=draw.choice((0.0, 1.0, 1.0, 3.0)),
    )


def every_plan(instance: TetrisInstance) -> list[dict[str, str]]:
    """Returns all plans of an instance."""
    names = [r.name for r in instance.regions]
    return [
        dict(zip((t.name for t in instance.tables), homes, strict=True))
        for homes in product(names, repeat=len(instance.tables))
    ]


def allowed(instance: TetrisInstance, found: PlanScore) -> bool:
    """Returns whether a plan violates only constraints that the start violates, each by no more than the start."""
    before = {(v.constraint, v.where): v.by for v in score(instance, {}).violations}
    return all(v.by <= before.get((v.constraint, v.where), 0.0) + 1e-9 * max(1.0, abs(v.by)) for v in found.violations)


def excess_of(instance: TetrisInstance, found: PlanScore) -> float:
    """Returns the relative excess of a plan from its plain score: each violation divided by the constraint's scale."""
    columns = Columns.of(instance)
    fixed = PlacementProblem(columns).fixed
    by = {
        "storage": fixed.number[layout.STORED_SCALE],
        "home_threshold": 1.0,
        "move_quota": fixed.number[layout.ALL_BYTES],
    }
    total = 0.0
    for violation in found.violations:
        if violation.constraint == "cpu_hours":
            app = columns.apps.index(violation.where.split("/")[1])
            total += violation.by / float(np.asarray(fixed.quota_scale)[app])
        else:
            total += violation.by / by[violation.constraint]
    return float(total)
