"""Cost and constraint violations of a plan, in plain Python (MAST 3.3, expressions 1 to 3 with 7 to 9).

This is the reference implementation for tests of the compiled code. The two share no code.
"""

import math
from collections import defaultdict
from collections.abc import Iterable

from domain.instance import HIGH_PRIORITY, Homes, PlacedTable, PlanScore, TetrisInstance, Violation, job_region

ROUNDING = 1e-9
"""Relative tolerance for rounding: an excess over a limit below this fraction of the limit is not a violation."""


def score(instance: TetrisInstance, homes: Homes) -> PlanScore:
    """Returns the terms, the total and the violations of a plan.

    Raises:
        ValueError: the plan names a table or a region that is not in the instance.
    """
    _check(instance, homes)
    tables = {t.name: t for t in instance.tables}
    home = {t.name: homes.get(t.name, t.home) for t in instance.tables}
    start = {t.name: t.home for t in instance.tables}
    region_of = {job.name: job_region(job, tables, home) for job in instance.jobs}
    weights = instance.weights
    read = _read(instance, tables, home, region_of)
    gpu = _gpu(instance, region_of)
    stored = _stored(instance.tables, home)
    capacity = {r.name: r.storage_bytes for r in instance.regions}
    storage = sum(
        (_ratio(stored[r], sum(stored.values())) - _ratio(c, sum(capacity.values()))) ** 2 for r, c in capacity.items()
    )
    total = read * weights.read + gpu * weights.gpu + storage * weights.storage
    violations = [
        *_over("storage", ((r, stored[r], c) for r, c in capacity.items())),
        *_over("cpu_hours", _cpu(instance, region_of)),
        *_below_home(instance, region_of, {j.name: job_region(j, tables, start) for j in instance.jobs}),
    ]
    if instance.move_quota_bytes is not None:
        violations += _over("move_quota", [("all", moved_bytes(instance, homes), instance.move_quota_bytes)])
    return PlanScore(float(read), float(gpu), float(storage), float(total), tuple(violations))


def moved_bytes(instance: TetrisInstance, homes: Homes) -> float:
    """Returns the bytes that the plan copies. A table whose new home holds a replica is not copied."""
    new = ((t, homes.get(t.name, t.home)) for t in instance.tables)
    return sum(t.size_bytes for t, region in new if region != t.home and region not in t.replicas)


def high_priority_home_hours(instance: TetrisInstance, region_of: dict[str, str | None]) -> tuple[float, float]:
    """Returns the GPU hours of high-priority jobs whose region has their GPU type, and of all high-priority jobs."""
    supply = {r.name: r.gpu_hours for r in instance.regions}
    at_home = total = 0.0
    for job in instance.jobs:
        if job.priority <= HIGH_PRIORITY and job.gpu_type is not None:
            total += job.gpu_hours
            region = region_of[job.name]
            if region is not None and supply[region].get(job.gpu_type, 0) > 0:
                at_home += job.gpu_hours
    return at_home, total


def _read(
    instance: TetrisInstance, tables: dict[str, PlacedTable], home: dict[str, str], region_of: dict[str, str | None]
) -> float:
    all_bytes = sum(t.size_bytes for t in instance.tables)
    return sum(
        job.weight * _ratio(tables[t].size_bytes, all_bytes)
        for job in instance.jobs
        for t in job.tables
        if region_of[job.name] is None or region_of[job.name] != home[t]
    )


def _gpu(instance: TetrisInstance, region_of: dict[str, str | None]) -> float:
    weights = instance.weights
    types = {g for r in instance.regions for g in r.gpu_hours}
    types |= {j.gpu_type for j in instance.jobs if j.gpu_type is not None}
    levels = sorted({j.priority for j in instance.jobs})
    demand: dict[tuple[str, str, int], float] = defaultdict(float)
    for job in instance.jobs:
        region = region_of[job.name]
        if job.gpu_type is not None and region is not None:
            demand[region, job.gpu_type, job.priority] += job.gpu_hours
    total = 0.0
    for g in sorted(types):
        supply = {r.name: r.gpu_hours.get(g, 0.0) for r in instance.regions}
        positive = [s for s in supply.values() if s > 0]
        mean = sum(positive) / len(positive) if positive else 0.0
        for p in levels:
            everywhere = sum(demand[r, g, p] for r in supply)
            for r, s in supply.items():
                apart = _ratio(demand[r, g, p], everywhere) - _ratio(s, sum(supply.values()))
                overload = _sigmoid(max(0.0, demand[r, g, p] - s), mean) - 0.5
                total += weights.by_priority.get(p, 1.0) * (apart**2 + weights.overload * overload)
    return total


def _sigmoid(over: float, mean: float) -> float:
    if mean > 0:
        return 1 / (1 + math.exp(-over / mean))
    return 1.0 if over > 0 else 0.5


def _stored(tables: Iterable[PlacedTable], home: dict[str, str]) -> dict[str, float]:
    stored: dict[str, float] = defaultdict(float)
    for table in tables:
        for region in {home[table.name], *table.replicas}:
            stored[region] += table.size_bytes
    return stored


def _cpu(instance: TetrisInstance, region_of: dict[str, str | None]) -> list[tuple[str, float, float]]:
    used: dict[tuple[str | None, str | None], float] = defaultdict(float)
    for job in instance.jobs:
        used[region_of[job.name], job.app] += job.cpu_hours
    return [
        (f"{r.name}/{app}", used[r.name, app], quota) for r in instance.regions for app, quota in r.cpu_hours.items()
    ]


def _below_home(
    instance: TetrisInstance, now: dict[str, str | None], at_start: dict[str, str | None]
) -> tuple[Violation, ...]:
    hours, total = high_priority_home_hours(instance, now)
    before, _ = high_priority_home_hours(instance, at_start)
    wanted = min(instance.home_threshold * total, before)
    if hours >= wanted - ROUNDING * total:
        return ()
    return (Violation("home_threshold", "all", (wanted - hours) / total),)


def _over(constraint: str, amounts: Iterable[tuple[str, float, float]]) -> list[Violation]:
    return [
        Violation(constraint, where, amount - limit)  # type: ignore[arg-type]
        for where, amount, limit in amounts
        if amount - limit > ROUNDING * max(amount, limit)
    ]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _check(instance: TetrisInstance, homes: Homes) -> None:
    tables, regions = {t.name for t in instance.tables}, {r.name for r in instance.regions}
    for name, region in homes.items():
        if name not in tables:
            raise ValueError(f"homes: the instance has no table {name!r}")
        if region not in regions:
            raise ValueError(f"homes.{name}: the instance has no region {region!r}")
