"""A Tetris instance as columns: names are replaced by numbers, and jobs refer to tables by edges.

It is the compact input of the searches. `Columns.of` builds it from an instance, `tetris.folders` from Parquet files.
"""

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from domain.instance import Homes, JobKind, TetrisInstance, Weights

Ints: TypeAlias = npt.NDArray[np.int32]
Longs: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
KINDS: tuple[JobKind, ...] = ("ml", "spark", "presto")
ML = 0
"""Index of `ml` in `KINDS`."""
NONE = -1
"""Number that stands for no value."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of T tables, R regions, J jobs, E edges between jobs and tables, G GPU types and A apps.

    Regions are numbered in sorted order. Tables and jobs keep their order in the input. The *start* of a search is the
    current placement, which the columns describe.
    """

    regions: tuple[str, ...]
    """Region names, sorted."""
    table_names: tuple[str, ...]
    job_names: tuple[str, ...]
    gpu_types: tuple[str, ...]
    """GPU types, sorted."""
    apps: tuple[str, ...]
    """Apps with a quota in at least one region, sorted."""
    capacity_bytes: Floats
    """[R] storage capacity."""
    supply_h: Floats
    """[G, R] supply in GPU hours."""
    quota_h: Floats
    """[A, R] quota in CPU hours; inf for no limit."""
    size_bytes: Floats
    """[T] table sizes."""
    home: Ints
    """[T] home region at the start."""
    replica_start: Longs
    """[T + 1] offset of each table's replicas in `replica`."""
    replica: Ints
    """Regions of the replicas of all tables."""
    kind: npt.NDArray[np.int8]
    """[J] index in `KINDS`."""
    app: Ints
    """[J] index in `apps`, or NONE."""
    gpu_type: Ints
    """[J] index in `gpu_types`, or NONE."""
    priority: npt.NDArray[np.int8]
    """[J] priority level, 1 to 7."""
    gpu_h: Floats
    """[J] GPU hours."""
    cpu_h: Floats
    """[J] CPU hours."""
    weight: Floats
    """[J] weight in the read term."""
    job_start: Longs
    """[J + 1] offset of each job's tables in `job_table`."""
    job_table: Ints
    """[E] table of each edge, grouped by job."""
    weights: Weights
    home_threshold: float
    move_quota_bytes: float
    """Maximum number of bytes that a plan may copy; inf for no limit."""

    @classmethod
    def of(cls, instance: TetrisInstance) -> "Columns":
        """Builds the columns of an instance, which must be valid (see `tetris.documents`)."""
        regions = tuple(sorted(r.name for r in instance.regions))
        by_name = {r.name: r for r in instance.regions}
        region = {name: index for index, name in enumerate(regions)}
        table = {t.name: index for index, t in enumerate(instance.tables)}
        types = {g for r in instance.regions for g in r.gpu_hours}
        types |= {j.gpu_type for j in instance.jobs if j.gpu_type is not None}
        gpu_types = tuple(sorted(types))
        apps = tuple(sorted({a for r in instance.regions for a in r.cpu_hours}))
        quota = [[by_name[r].cpu_hours.get(a, np.inf) for r in regions] for a in apps]
        supply = [[by_name[r].gpu_hours.get(g, 0.0) for r in regions] for g in gpu_types]
        type_number, app_number = _numbers(gpu_types), _numbers(apps)
        tables, jobs = instance.tables, instance.jobs
        return cls(
            regions=regions,
            table_names=tuple(t.name for t in tables),
            job_names=tuple(j.name for j in jobs),
            gpu_types=gpu_types,
            apps=apps,
            capacity_bytes=np.array([by_name[r].storage_bytes for r in regions], dtype=np.float64),
            supply_h=np.array(supply, dtype=np.float64).reshape(len(gpu_types), len(regions)),
            quota_h=np.array(quota, dtype=np.float64).reshape(len(apps), len(regions)),
            size_bytes=np.array([t.size_bytes for t in tables], dtype=np.float64),
            home=np.array([region[t.home] for t in tables], dtype=np.int32),
            replica_start=_starts([len(t.replicas) for t in tables]),
            replica=np.array([region[r] for t in tables for r in t.replicas], dtype=np.int32),
            kind=np.array([KINDS.index(j.kind) for j in jobs], dtype=np.int8),
            app=np.array([app_number.get(j.app, NONE) for j in jobs], dtype=np.int32),
            gpu_type=np.array([type_number.get(j.gpu_type, NONE) for j in jobs], dtype=np.int32),
            priority=np.array([j.priority for j in jobs], dtype=np.int8),
            gpu_h=np.array([j.gpu_hours for j in jobs], dtype=np.float64),
            cpu_h=np.array([j.cpu_hours for j in jobs], dtype=np.float64),
            weight=np.array([j.weight for j in jobs], dtype=np.float64),
            job_start=_starts([len(j.tables) for j in jobs]),
            job_table=np.array([table[t] for j in jobs for t in j.tables], dtype=np.int32),
            weights=instance.weights,
            home_threshold=instance.home_threshold,
            move_quota_bytes=np.inf if instance.move_quota_bytes is None else instance.move_quota_bytes,
        )

    def keeping(self, stay: npt.NDArray[np.bool_]) -> "Columns":
        """Returns a copy that has only the entries of `replica` for which `stay` is true."""
        before = np.concatenate(([0], np.cumsum(stay)))
        return replace(self, replica=self.replica[stay], replica_start=before[self.replica_start].astype(np.int64))

    def homes_of(self, homes: Homes) -> Ints:
        """Returns the home region number of each table [T] under a plan. The plan must use names of the instance."""
        region, number = _numbers(self.regions), _numbers(self.table_names)
        out = self.home.copy()
        for name, where in homes.items():
            out[number[name]] = region[where]
        return out

    def plan_of(self, home: Ints) -> dict[str, str]:
        """Returns the plan for the homes [T]: maps the names of moved tables to region names."""
        return {self.table_names[t]: self.regions[home[t]] for t in np.flatnonzero(home != self.home)}


def _numbers(names: tuple[str, ...]) -> dict[str | None, int]:
    return {name: index for index, name in enumerate(names)}


def _starts(lengths: list[int]) -> Longs:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int64)
