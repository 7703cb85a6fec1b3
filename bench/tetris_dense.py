"""Generates instances unlike MAST's: several unrelated jobs of both kinds read each table, and CPU quotas are tight.

There are two jobs for each table. Half of them are ML jobs on one of three GPU types, half are Spark or Presto jobs.
Each job reads one to five random tables; tables are not grouped by project. Homes at the start are random, and violate
quotas. Over all regions, each app's quotas are 1.1 times its CPU hours, the GPU supply is 1.1 times the demand, and the
storage is 1.6 times the bytes; all are distributed unevenly over regions.
"""

import numpy as np

from domain.instance import Weights
from tetris.columns import ML, NONE, Columns

_JOBS_OF_TABLE = 2
_MOST_TABLES = 5
_GPU_TYPES, _APPS = ("a100", "h100", "v100"), ("presto", "spark")
_QUOTA, _SUPPLY, _CAPACITY = 1.1, 1.1, 1.6
"""Ratios of quota to CPU hours, of supply to GPU demand, and of capacity to stored bytes."""


def dense(tables: int, regions: int, seed: int) -> Columns:
    """Returns an instance; `tables` must be at least five."""
    draw = np.random.default_rng(seed)
    jobs = tables * _JOBS_OF_TABLE
    count = draw.integers(1, _MOST_TABLES + 1, jobs)
    read = [draw.choice(tables, n, replace=False) for n in count]
    size = np.round(np.exp(draw.normal(np.log(1e12), 1.0, tables))).astype(np.float64)
    kind = np.where(draw.random(jobs) < 0.5, ML, draw.integers(1, 3, jobs)).astype(np.int8)
    is_ml = kind == ML
    gpu_type = np.where(is_ml, draw.integers(0, len(_GPU_TYPES), jobs), NONE).astype(np.int32)
    app = np.where(is_ml, NONE, kind - 1).astype(np.int32)
    gpu_h = np.where(is_ml, np.round(np.exp(draw.normal(4.0, 1.0, jobs))) + 1.0, 0.0)
    cpu_h = np.where(is_ml, 0.0, np.round(np.exp(draw.normal(3.0, 1.0, jobs))) + 1.0)
    supply = np.zeros((len(_GPU_TYPES), regions))
    for kind_of_gpu, row in enumerate(supply):
        has = draw.permutation(regions)[: max(2, round(0.7 * regions))]
        row[has] = draw.gamma(2.0, 1.0, len(has)) + 0.5
        row *= _SUPPLY * gpu_h[gpu_type == kind_of_gpu].sum() / row.sum()
    used_h = np.array([cpu_h[app == number].sum() for number in range(len(_APPS))])
    even = np.full(regions, 20.0)
    return Columns(
        regions=tuple(f"region{number:02d}" for number in range(regions)),
        table_names=tuple(f"table{number}" for number in range(tables)),
        job_names=tuple(f"job{number}" for number in range(jobs)),
        gpu_types=_GPU_TYPES,
        apps=_APPS,
        capacity_bytes=np.round(_CAPACITY * size.sum() * draw.dirichlet(even)),
        supply_h=np.round(supply),
        quota_h=np.round(_QUOTA * used_h[:, None] * draw.dirichlet(even, len(_APPS))),
        size_bytes=size,
        home=draw.integers(regions, size=tables).astype(np.int32),
        replica_start=np.zeros(tables + 1, np.int64),
        replica=np.zeros(0, np.int32),
        kind=kind,
        app=app,
        gpu_type=gpu_type,
        priority=draw.integers(1, 6, jobs).astype(np.int8),
        gpu_h=gpu_h,
        cpu_h=cpu_h,
        weight=np.round(np.exp(draw.normal(0.0, 0.5, jobs)), 3).astype(np.float64),
        job_start=np.concatenate(([0], np.cumsum(count))).astype(np.int64),
        job_table=np.concatenate(read).astype(np.int32),
        weights=Weights(by_priority={1: 4.0, 2: 2.0}),
        home_threshold=0.9,
        move_quota_bytes=float("inf"),
    )
