"""Extra replicas once homes are decided (MAST 3.5): jobs that no region can run, disaster recovery, hot tables.

In this order, each within the storage that is left, data of high priority first. The paper has disaster recovery first.
Where storage is short that leaves jobs without a region, for copies that serve on a bad day only; and a copy that a job
needs is one for recovery too. What a table has already is kept where it serves: it costs nothing to move.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from domain.instance import DOCUMENT_VERSION
from tetris.columns import ML, NONE, Columns, Floats, Ints, Longs
from tetris.problem import Problem

Reason = Literal["disaster_recovery", "no_region", "hot"]
Parts: TypeAlias = npt.NDArray[np.float32]
_UNREAD = 99
"""The level of a table that no job reads."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What replicas are for."""

    correlated: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Probability that two regions (names, sorted) fail together; pairs that are not here: 0."""
    disaster_recovery_level: int = 7
    """Tables that a job of this priority or a higher one reads get a replica outside their home; 0: none do."""
    hot_part: float = 0.5
    """The part of the storage that is left which hot tables may take."""
    hot_jobs: int = 10
    """A table that at least so many jobs of a GPU type read is hot for that type."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that is wanted."""

    table: int
    region: int
    reason: Reason
    part: float
    """Of the table's bytes: 1 for the whole, less for the partitions that jobs need."""
    job: int = NONE
    """The job that it is for."""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A job that no region can run, and why."""

    job: int
    reason: Literal["no_hardware", "no_storage"]
    short_bytes: float
    """What is missing in the region that is nearest to having room."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """The replicas that should be, those that are there among them."""

    replicas: tuple[Replica, ...]
    unplaced: tuple[Unplaced, ...]
    held: Parts
    """[T, R] part of each table that is in a region, its home among them."""
    stored_bytes: Floats
    """[R]"""


def replicate(columns: Columns, home: Ints, policy: Policy, needed: Floats | None = None) -> Replicated:
    """The replicas for the homes [T]. `needed` ([E], beside `job_table`): the part of each table that a job reads."""
    step = _Step(columns, home, policy, np.ones(len(columns.job_table)) if needed is None else needed)
    step.place_jobs()
    step.recover()
    step.spread_hot()
    return Replicated(tuple(step.replicas), tuple(step.unplaced), step.held, step.stored)


def candidate_regions(columns: Columns, held: Parts, needed: Floats | None = None) -> npt.NDArray[np.bool_]:
    """[J, R] where a job finds its tables, or what it needs of them, and its hardware.

    `held`: [T, R] as in `Replicated`. A job without tables finds them everywhere.
    """
    wanted = np.ones(len(columns.job_table), np.float32) if needed is None else needed.astype(np.float32)
    out = np.ones((len(columns.kind), len(columns.regions)), np.bool_)
    lengths = np.diff(columns.job_start)
    some = lengths > 0
    if some.any():
        there = held[columns.job_table] >= wanted[:, None]
        out[some] = np.logical_and.reduceat(there, columns.job_start[:-1][some], axis=0)
    on_gpus = columns.gpu_type != NONE
    out[on_gpus] &= columns.supply_h[columns.gpu_type[on_gpus]] > 0
    return out


def jobs_without_region(columns: Columns, held: Parts, needed: Floats | None = None) -> Longs:
    """Jobs that no region can run, in order.

    Spark and Presto jobs without GPUs are none of them: they run at the home of most of their tables, and read the
    others from afar.
    """
    afar = (columns.kind != ML) & (columns.gpu_type == NONE)
    return np.flatnonzero(~candidate_regions(columns, held, needed).any(axis=1) & ~afar)


def replicas_document(columns: Columns, found: Replicated) -> dict[str, Any]:
    """The replicas by name, and the jobs that no region can run, as a document."""
    return {
        "version": DOCUMENT_VERSION,
        "replicas": [
            {
                "table": columns.table_names[r.table],
                "region": columns.regions[r.region],
                "reason": r.reason,
                "part": r.part,
                "job": None if r.job == NONE else columns.job_names[r.job],
            }
            for r in found.replicas
        ],
        "unplaced": [
            {"job": columns.job_names[u.job], "reason": u.reason, "short_bytes": u.short_bytes} for u in found.unplaced
        ],
    }


class _Step:
    """The replicas so far, and the storage that is left."""

    def __init__(self, columns: Columns, home: Ints, policy: Policy, needed: Floats) -> None:
        self.c, self.home, self.policy, self.needed = columns, home, policy, needed
        tables, regions = len(home), len(columns.regions)
        self.held = np.zeros((tables, regions), np.float32)
        self.held[np.arange(tables), home] = 1.0
        self.there = np.zeros((tables, regions), np.bool_)
        """Replicas of today, which cost no copy."""
        owner = np.repeat(np.arange(tables), np.diff(columns.replica_start))
        self.there[owner, columns.replica] = True
        self.stored = np.bincount(home, weights=columns.size_bytes, minlength=regions).astype(np.float64)
        self.replicas: list[Replica] = []
        self.unplaced: list[Unplaced] = []
        order = np.argsort(columns.job_table, kind="stable")
        self.table_job = np.repeat(np.arange(len(columns.kind)), np.diff(columns.job_start))[order]
        self.table_start = np.searchsorted(columns.job_table[order], np.arange(tables + 1))
        self.level = np.full(tables, _UNREAD)
        np.minimum.at(self.level, columns.job_table, np.repeat(columns.priority, np.diff(columns.job_start)))

    def place_jobs(self) -> None:
        """Jobs that no region can run: what they lack goes to the region with the highest supply that has room."""
        c = self.c
        lacking = jobs_without_region(c, self.held, self.needed)
        for job in lacking[np.lexsort((lacking, -c.gpu_h[lacking], c.priority[lacking]))]:
            self._place(int(job))

    def _place(self, job: int) -> None:
        c = self.c
        edges = slice(c.job_start[job], c.job_start[job + 1])
        tables, parts = c.job_table[edges], self.needed[edges].astype(np.float32)
        kind = int(c.gpu_type[job])
        supply = c.supply_h[kind] if kind != NONE else np.ones(len(c.regions))
        # What an earlier job got may have made room for this one as well.
        missing = np.maximum(parts[:, None] - self.held[tables], 0.0)
        size = (missing * c.size_bytes[tables][:, None]).sum(axis=0)
        able = np.flatnonzero(supply > 0)
        if not len(able):
            self.unplaced.append(Unplaced(job, "no_hardware", 0.0))
            return
        if not missing[:, able].any(axis=0).all():
            return
        short = self.stored[able] + size[able] - c.capacity_bytes[able]
        for region in able[np.lexsort((able, size[able], -supply[able]))]:
            if self.stored[region] + size[region] <= c.capacity_bytes[region]:
                for table, part in zip(tables, parts, strict=True):
                    if self.held[table, region] < part:
                        self._add(int(table), int(region), "no_region", float(part), job)
                return
        self.unplaced.append(Unplaced(job, "no_storage", float(short.min())))

    def recover(self) -> None:
        """A replica outside the home: least likely to fail with it, able to take the load, emptiest.

        A whole copy that a job has got there is one, where nothing is less likely to fail with the home.
        """
        c = self.c
        wanted = np.flatnonzero(self.level <= self.policy.disaster_recovery_level)
        risk = self._risk()
        spare = np.maximum(c.supply_h - self._demand(), 0.0)
        for table in wanted[np.lexsort((wanted, -c.size_bytes[wanted], self.level[wanted]))]:
            home = int(self.home[table])
            others = np.arange(len(c.regions)) != home
            copied = risk[home, others & (self.held[table] == 1.0)].min(initial=np.inf)
            jobs = self.table_job[self.table_start[table] : self.table_start[table + 1]]
            hours = np.bincount(
                c.gpu_type[jobs][c.gpu_type[jobs] != NONE],
                weights=c.gpu_h[jobs][c.gpu_type[jobs] != NONE],
                minlength=len(c.gpu_types),
            )
            takes = np.minimum(spare, hours[:, None]).sum(axis=0)
            size = (1.0 - self.held[table]) * c.size_bytes[table]
            fits = others & (self.held[table] < 1.0) & (self.stored + size <= c.capacity_bytes)
            if not fits.any():
                continue
            # The last key counts first; a name decides where all else is equal.
            full = self.stored / np.maximum(c.capacity_bytes, 1.0)
            order = np.lexsort((full, ~self.there[table], -takes, risk[home]))
            region = int(order[fits[order]][0])
            if risk[home, region] >= copied:
                continue
            self._add(int(table), region, "disaster_recovery", 1.0)
            spare[:, region] = np.maximum(spare[:, region] - hours, 0.0)

    def spread_hot(self) -> None:
        """Per GPU type and region a budget of bytes by supply, for the tables that most jobs of the type read.

        Data of high priority first, then what most jobs read.
        """
        c = self.c
        left = np.maximum(c.capacity_bytes - self.stored, 0.0) * self.policy.hot_part
        all_supply = c.supply_h.sum(axis=0)
        job = np.repeat(np.arange(len(c.kind)), np.diff(c.job_start))
        for kind in range(len(c.gpu_types)):
            mine = c.gpu_type[job] == kind
            count = np.bincount(c.job_table[mine], minlength=len(self.home))
            hours = np.bincount(c.job_table[mine], weights=c.gpu_h[job[mine]], minlength=len(self.home))
            hot = np.flatnonzero(count >= self.policy.hot_jobs)
            hot = hot[np.lexsort((hot, -hours[hot], -count[hot], self.level[hot]))]
            for region in np.flatnonzero(c.supply_h[kind] > 0):
                budget = left[region] * c.supply_h[kind, region] / all_supply[region]
                for table in hot:
                    missing = float(1.0 - self.held[table, region])
                    size = c.size_bytes[table] * missing
                    if missing > 0.0 and size <= budget:
                        self._add(int(table), int(region), "hot", 1.0)
                        budget -= size

    def _add(self, table: int, region: int, reason: Reason, part: float, job: int = NONE) -> None:
        more = np.float32(part) - self.held[table, region]
        self.held[table, region] = part
        self.stored[region] += float(more) * self.c.size_bytes[table]
        self.replicas.append(Replica(table, region, reason, part, job))

    def _risk(self) -> Floats:
        """[R, R] probability that both fail together."""
        number = {name: index for index, name in enumerate(self.c.regions)}
        risk = np.zeros((len(number), len(number)))
        for (one, two), probability in self.policy.correlated.items():
            risk[number[one], number[two]] = risk[number[two], number[one]] = probability
        return risk

    def _demand(self) -> Floats:
        """[G, R] GPU hours of the jobs that have a region, by type."""
        region = Problem(self.c, self.home).state.region
        flows = (region != NONE) & (self.c.gpu_type != NONE)
        demand = np.zeros_like(self.c.supply_h)
        np.add.at(demand, (self.c.gpu_type[flows], region[flows]), self.c.gpu_h[flows])
        return demand
