"""Tetris instances as values of Python, from their columns."""

import numpy as np

from domain.instance import InstanceRegion, PlacedTable, RecurringJob, TetrisInstance
from tetris.columns import KINDS, Columns


def to_instance(columns: Columns) -> TetrisInstance:
    """Converts columns back to an instance."""
    quotas = [
        {app: float(q) for app, q in zip(columns.apps, column, strict=True) if np.isfinite(q)}
        for column in columns.quota_h.T
    ]
    supplies = [
        {g: float(s) for g, s in zip(columns.gpu_types, column, strict=True) if s > 0} for column in columns.supply_h.T
    ]
    capacities = columns.capacity_bytes.tolist()
    apps, types = (*columns.apps, None), (*columns.gpu_types, None)
    tables = [
        PlacedTable(
            name, float(size), columns.regions[home], tuple(columns.regions[r] for r in columns.replica[begin:end])
        )
        for name, size, home, begin, end in zip(
            columns.table_names,
            columns.size_bytes,
            columns.home,
            columns.replica_start,
            columns.replica_start[1:],
            strict=False,
        )
    ]
    jobs = [
        RecurringJob(
            name=name,
            kind=KINDS[columns.kind[j]],
            tables=tuple(
                columns.table_names[t] for t in columns.job_table[columns.job_start[j] : columns.job_start[j + 1]]
            ),
            priority=int(columns.priority[j]),
            app=apps[columns.app[j]],
            gpu_type=types[columns.gpu_type[j]],
            gpu_hours=float(columns.gpu_h[j]),
            cpu_hours=float(columns.cpu_h[j]),
            weight=float(columns.weight[j]),
        )
        for j, name in enumerate(columns.job_names)
    ]
    regions = [InstanceRegion(*given) for given in zip(columns.regions, capacities, supplies, quotas, strict=True)]
    quota = None if np.isinf(columns.move_quota_bytes) else columns.move_quota_bytes
    return TetrisInstance(tuple(regions), tuple(tables), tuple(jobs), columns.weights, columns.home_threshold, quota)
