"""Generates random instances of any size that resemble MAST's (Figures 2 and 3, sections 3.2 and 5.6).

Projects own tables and the jobs that read them. A table is read by 3, 17 and 45 jobs at P50, P90 and P99. GPU types are
distributed unevenly over regions. The start resembles manual placement (V0): high-priority demand is 0.85 of the total
supply, and 2.63 times the supply in the worst region of a type. 90.8 % of its hours are in a region with the jobs' data
and hardware.
"""

from dataclasses import dataclass

import numpy as np

from domain.instance import HIGH_PRIORITY, Weights
from tetris.columns import KINDS, ML, NONE, Columns, Floats, Ints, Longs

SHARED_BY = ((0.0, 1.0), (0.5, 3.0), (0.9, 17.0), (0.99, 45.0), (1.0, 120.0))
"""(Quantile of tables, number of jobs that read the table) pairs."""
HIGH_DEMAND = 0.85
"""High-priority demand divided by supply, for all regions together."""
WORST = 2.63
"""High-priority demand divided by supply in the worst region of each GPU type."""
AT_HOME = 0.908
"""Fraction of high-priority GPU hours that are at home at the start."""
GPU_TYPES = ("a100", "h100", "v100")
_LEVELS = (1, 2, 3, 4, 5)
_LEVEL_ODDS = (0.15, 0.3, 0.25, 0.2, 0.1)
_ANALYTICS = 0.25
"""Fraction of jobs that are Spark or Presto jobs."""
_JOBS_OF_PROJECT = 60
_STORED = 0.4
"""Stored bytes at the start divided by the capacity."""


@dataclass(frozen=True, slots=True)
class _Projects:
    region: Ints
    """[P] region of each project's tables."""
    gpu_type: Ints
    """[P] GPU type of each project's jobs."""
    job: Ints
    """[J] project of each job."""


def generate(tables: int, regions: int = 10, seed: int = 0, jobs_of_table: float = 1.0) -> Columns:
    """Generates an instance with the given numbers of tables and regions.

    `jobs_of_table` multiplies the number of jobs that read a table.

    Raises:
        ValueError: fewer than one table, or fewer than three regions.
    """
    if tables < 1:
        raise ValueError(f"tables: {tables}: must be at least 1")
    if regions < 3:
        raise ValueError(f"regions: {regions}: must be at least 3, because each GPU type is missing in some regions")
    draw = np.random.default_rng(seed)
    share = _shares(draw, regions)
    # A job reads between two and three tables on average.
    quantile, shared = np.array(SHARED_BY).T
    wanted = np.exp(np.interp(draw.random(tables), quantile, np.log(shared))) * jobs_of_table
    jobs = max(12, round(float(wanted.sum()) / 2.6))
    projects = _projects(draw, jobs, share)
    table_project = draw.integers(len(projects.region), size=tables)
    job_start, job_table = _edges(draw, wanted, table_project, projects)
    size = np.round(np.exp(draw.normal(np.log(2e12), 1.4, tables))).astype(np.float64)
    home = projects.region[table_project]
    columns = _columns(draw, share, projects, job_start, job_table, size, home)
    return _scatter(draw, columns)


def _shares(draw: np.random.Generator, regions: int) -> Floats:
    """Returns [G, R] the regions' shares of each type's supply. Newer types are in fewer regions."""
    out = np.zeros((len(GPU_TYPES), regions))
    for row, missing in enumerate((0.2, 0.4, 0.1)):
        has = draw.permutation(regions)[: max(2, round(regions * (1 - missing)))]
        out[row, has] = draw.gamma(2.0, 1.0, len(has)) + 0.6
    return np.asarray(out / out.sum(axis=1, keepdims=True), np.float64)


def _projects(draw: np.random.Generator, jobs: int, share: Floats) -> _Projects:
    """Generates projects with about the same number of jobs. Their placement overloads some regions, as in V0."""
    count = max(3, jobs // _JOBS_OF_PROJECT)
    gpu_type = draw.choice(len(GPU_TYPES), count, p=(0.45, 0.3, 0.25)).astype(np.int32)
    region = np.zeros(count, np.int32)
    for kind in range(len(GPU_TYPES)):
        mine = np.flatnonzero(gpu_type == kind)
        ratio = _ratios(draw, share[kind])
        region[mine] = draw.choice(share.shape[1], len(mine), p=_normal(ratio * share[kind]))
    return _Projects(region, gpu_type, np.sort(draw.integers(count, size=jobs)).astype(np.int32))


def _ratios(draw: np.random.Generator, share: Floats) -> Floats:
    """Returns [R] demand divided by supply: about `HIGH_DEMAND` in total, and `WORST` in one region."""
    ratio = np.where(share > 0, draw.gamma(1.2, 0.6, len(share)) + 0.05, 0.0)
    worst = int(np.argmin(np.where(share > 0, np.abs(share - np.median(share[share > 0])), np.inf)))
    for _ in range(50):
        ratio[worst] = WORST
        others = np.arange(len(share)) != worst
        scale = (HIGH_DEMAND - ratio[worst] * share[worst]) / max((ratio * share)[others].sum(), 1e-9)
        ratio[others] = np.clip(ratio[others] * max(scale, 0.05), 0.0, WORST * 0.95)
    return ratio


def _edges(draw: np.random.Generator, wanted: Floats, table_project: Longs, projects: _Projects) -> tuple[Longs, Ints]:
    """Draws the jobs of each table from its project. A job without a table then reads one table of its project."""
    first = np.searchsorted(projects.job, np.arange(len(projects.region) + 1))
    here = np.diff(first)[table_project]
    count = np.where(here > 0, np.maximum(1, np.round(wanted)), 0).astype(np.int64)
    table = np.repeat(np.arange(len(wanted)), count)
    # Consecutive jobs from a random one. If a project has too few jobs, those of the next projects are used.
    spread = np.repeat(np.maximum(here, count), count)
    offset = np.repeat(draw.integers(0, 1 << 30, len(wanted)), count)
    number = np.arange(len(table)) - np.repeat(np.cumsum(count) - count, count)
    job = (first[np.repeat(table_project, count)] + (offset + number) % np.maximum(spread, 1)) % len(projects.job)
    by_project = np.argsort(table_project, kind="stable")
    begin = np.searchsorted(table_project[by_project], np.arange(len(projects.region) + 1))
    without = np.setdiff1d(np.arange(len(projects.job)), job)
    owner = projects.job[without]
    owned = np.diff(begin)[owner]
    pick = np.where(owned > 0, begin[owner] + (draw.random(len(without)) * owned).astype(np.int64), 0)
    pairs = np.concatenate((job * len(wanted) + table, without * len(wanted) + by_project[pick]))
    pairs = np.unique(pairs)
    job_start = np.searchsorted(pairs, np.arange(len(projects.job) + 1) * len(wanted)).astype(np.int64)
    return job_start, (pairs % len(wanted)).astype(np.int32)


def _columns(
    draw: np.random.Generator, share: Floats, projects: _Projects, job_start: Longs, job_table: Ints, size: Floats,
    home: Ints,
) -> Columns:  # fmt: skip
    jobs, regions = len(projects.job), share.shape[1]
    analytics = draw.random(jobs) < _ANALYTICS
    kind = np.where(analytics, draw.integers(1, len(KINDS), jobs), ML).astype(np.int8)
    gpu_type = np.where(analytics, NONE, projects.gpu_type[projects.job]).astype(np.int32)
    priority = draw.choice(_LEVELS, jobs, p=_LEVEL_ODDS).astype(np.int8)
    gpu_h = np.where(analytics, 0.0, np.round(np.exp(draw.normal(4.0, 1.0, jobs)) + 1.0))
    cpu_h = np.where(analytics, np.round(np.exp(draw.normal(3.0, 1.0, jobs)) + 1.0), 0.0)
    high = (priority <= HIGH_PRIORITY) & ~analytics
    demand = np.bincount(gpu_type[high], weights=gpu_h[high], minlength=len(GPU_TYPES))
    supply = np.round(share * demand[:, None] / HIGH_DEMAND)
    stored = np.bincount(home, weights=size, minlength=regions)
    capacity = np.round((0.5 * stored + 0.5 * stored.sum() * draw.dirichlet(np.full(regions, 8.0))) / _STORED)
    cpu = cpu_h.sum() / regions
    return Columns(
        regions=tuple(f"region{number:03d}" for number in range(regions)),
        table_names=tuple(f"table{number}" for number in range(len(size))),
        job_names=tuple(f"job{number}" for number in range(jobs)),
        gpu_types=GPU_TYPES,
        apps=("presto", "spark"),
        capacity_bytes=np.maximum(capacity, stored),
        supply_h=supply,
        quota_h=np.round(np.full((2, regions), 2.5 * cpu)),
        size_bytes=size,
        home=home.astype(np.int32),
        replica_start=np.zeros(len(size) + 1, np.int64),
        replica=np.zeros(0, np.int32),
        kind=kind,
        app=np.where(kind == KINDS.index("spark"), 1, np.where(kind == KINDS.index("presto"), 0, NONE)).astype(
            np.int32
        ),
        gpu_type=gpu_type,
        priority=priority,
        gpu_h=gpu_h,
        cpu_h=cpu_h,
        # The read term is weighted by the GPU hours that would wait for data; high priority has more weight (V2).
        weight=_weights(gpu_h, high),
        job_start=job_start,
        job_table=job_table,
        # The squared terms of small regions are small: with a weight of 1 these regions stay overloaded by 10 %.
        weights=Weights(gpu=10.0, by_priority={1: 4.0, 2: 2.0}),
        home_threshold=0.9,
        move_quota_bytes=float("inf"),
    )


def _weights(gpu_h: Floats, high: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Floats:
    return np.asarray(0.1 + gpu_h / max(float(gpu_h.mean()), 1e-9) * np.where(high, 2.0, 0.25), np.float64)


def _scatter(draw: np.random.Generator, columns: Columns) -> Columns:
    """Moves single tables to random regions until at most `AT_HOME` of the high-priority hours are at home."""
    from tetris.kernels.layout import ALL_H, HOME_H
    from tetris.problem import PlacementProblem

    problem = PlacementProblem(columns)
    wanted_h = AT_HOME * problem.fixed.number[ALL_H]
    regions = len(columns.regions)
    for table in draw.permutation(len(columns.home)):
        before = problem.state.now[HOME_H]
        if before <= wanted_h:
            break
        at = int(problem.home[table])
        problem.move(int(table), int((at + draw.integers(1, regions)) % regions))
        if before - problem.state.now[HOME_H] > 0.002 * wanted_h or problem.state.now[HOME_H] >= before:
            problem.move(int(table), at)
    columns.home[:] = problem.home
    _fit_supply(columns, problem.state.region)
    stored = np.bincount(columns.home, weights=columns.size_bytes, minlength=regions)
    # The placement at the start does not violate the limits.
    np.maximum(columns.capacity_bytes, stored, out=columns.capacity_bytes)
    np.maximum(columns.quota_h, problem.state.cpu, out=columns.quota_h)
    return columns


def _fit_supply(columns: Columns, region: Ints) -> None:
    """Scales the supply so that high-priority demand at the start has the ratios `WORST` and `HIGH_DEMAND`."""
    high = (columns.priority <= HIGH_PRIORITY) & (columns.gpu_type != NONE)
    for kind, supply in enumerate(columns.supply_h):
        mine = high & (columns.gpu_type == kind)
        there = mine & (region != NONE)
        demand = np.bincount(region[there], weights=columns.gpu_h[there], minlength=len(supply))
        has = supply > 0
        worst = int(np.argmax(np.where(has, demand / np.where(has, supply, 1.0), 0.0)))
        others = has & (np.arange(len(supply)) != worst)
        least = demand[worst] / WORST
        if not least or not supply[others].sum():
            continue
        supply[others] *= max(columns.gpu_h[mine].sum() / HIGH_DEMAND - least, 0.0) / supply[others].sum()
        supply[worst] = least
        np.round(supply, out=supply)


def _normal(values: Floats) -> Floats:
    return np.asarray(values / values.sum(), np.float64)
