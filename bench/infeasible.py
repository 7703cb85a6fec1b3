"""Random small instances of Tetris whose start violates a limit, for the suite `tetris-infeasible`."""

from dataclasses import replace

import numpy as np

from domain.instance import InstanceRegion, JobKind, PlacedTable, RecurringJob, TetrisInstance, Weights
from tetris.columns import Columns
from tetris.problem import PlacementProblem

_KINDS: tuple[JobKind, ...] = ("ml", "spark", "presto")
_GPU_TYPES = ("a100", "h100")


def infeasible(seed: int) -> Columns:
    """Returns an instance of 8 to 12 tables on 3 to 5 regions. Its start stores more in a region than fits there.

    Three quarters of the instances also have quotas of CPU hours, a half have a quota of moved bytes.
    """
    draw = np.random.default_rng(seed)
    while True:
        columns = Columns.of(_drawn(draw))
        if PlacementProblem(columns).excess[0] > 1e-3:
            return columns


def _drawn(draw: np.random.Generator) -> TetrisInstance:
    regions = [f"r{index}" for index in range(int(draw.integers(3, 6)))]
    tables = []
    for index in range(int(draw.integers(8, 13))):
        home, *others = draw.permutation(regions).tolist()
        copies = others[: int(draw.choice(3, p=(0.5, 0.3, 0.2)))]
        tables.append(PlacedTable(f"t{index}", float(round(draw.lognormal(27.6, 0.6))), home, tuple(copies)))
    jobs = tuple(_job(draw, index, tables) for index in range(int(draw.integers(15, 31))))
    held = {r: sum(t.size_bytes for t in tables if r in (t.home, *t.replicas)) for r in regions}
    mean = sum(held.values()) / len(regions)
    room, has_quotas, most = draw.uniform(1.0, 1.4), draw.random() < 0.75, sum(t.size_bytes for t in tables)
    hours = {g: sum(j.gpu_hours for j in jobs if j.gpu_type == g) / len(regions) for g in _GPU_TYPES}
    cpu_h = sum(j.cpu_hours for j in jobs) / len(regions)
    made = tuple(
        InstanceRegion(
            name,
            float(round(mean * room * draw.uniform(0.85, 1.15))),
            {g: float(round(hours[g] * draw.choice((0.0, 0.7, 1.2, 2.0)))) for g in _GPU_TYPES},
            {"spark": float(round(cpu_h * draw.uniform(0.5, 2.0)))} if has_quotas else {},
        )
        for name in regions
    )
    quota = None if draw.random() < 0.5 else float(round(most * draw.uniform(0.3, 0.9)))
    weights = replace(Weights(), by_priority={1: 4.0, 2: 2.0})
    return TetrisInstance(made, tuple(tables), jobs, weights, float(draw.choice((0.0, 0.5, 0.9))), quota)


def _job(draw: np.random.Generator, index: int, tables: list[PlacedTable]) -> RecurringJob:
    kind = _KINDS[int(draw.choice(3, p=(0.5, 0.25, 0.25)))]
    read = draw.permutation([table.name for table in tables])[: int(draw.integers(1, 4))]
    return RecurringJob(
        name=f"j{index}",
        kind=kind,
        tables=tuple(read.tolist()),
        priority=int(draw.integers(1, 5)),
        app="spark" if kind == "spark" else None,
        gpu_type=str(draw.choice(_GPU_TYPES)) if kind == "ml" else None,
        gpu_hours=float(draw.choice((50, 120))) if kind == "ml" else 0.0,
        cpu_hours=float(draw.choice((40, 90))) if kind != "ml" else 0.0,
    )
