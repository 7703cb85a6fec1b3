"""Plans additional replicas for given homes (MAST 3.5).

Replicas are added for three purposes, in this order: jobs that no region can run, disaster recovery, and hot tables.
Each step uses the remaining storage, and data of high priority comes first. MAST starts with disaster recovery. But if
storage is scarce, that leaves jobs without a region, and a replica for a job also serves disaster recovery. Existing
replicas are preferred, because they need no copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from domain.instance import DOCUMENT_VERSION
from tetris.columns import ML, NONE, Columns, Floats, Ints, Longs
from tetris.pieces import RequiredPieces
from tetris.problem import PlacementProblem

Reason = Literal["disaster_recovery", "no_region", "hot"]
Parts: TypeAlias = npt.NDArray[np.float32]
Flags: TypeAlias = npt.NDArray[np.bool_]
_UNREAD = 99
"""Priority level of a table that no job reads."""


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """Policy for additional replicas."""

    correlated: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Probability that two regions (a sorted pair of names) fail together; 0 for missing pairs."""
    disaster_recovery_level: int = 7
    """A table gets a disaster recovery replica if a job of this priority or a higher one reads it; 0 disables these."""
    hot_part: float = 0.5
    """Fraction of the remaining storage that replicas of hot tables may use."""
    hot_jobs: int = 10
    """A table is hot for a GPU type if at least this many jobs of the type read it."""


@dataclass(frozen=True, slots=True)
class WantedReplica:
    """A replica that should exist."""

    table: int
    region: int
    reason: Reason
    part: float
    """Fraction of the table's bytes: 1 for the whole table, less for the partitions of a job (`RequiredPieces.names`).
    """
    job: int = NONE
    """The job for which the replica was added, or NONE."""
    edge: int = NONE
    """The edge between job and table if the replica has single partitions only, else NONE."""


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A job that no region can run, with the reason."""

    job: int
    reason: Literal["no_hardware", "no_storage"]
    short_bytes: float
    """Missing storage in the region where the least is missing."""


@dataclass(frozen=True, slots=True)
class Replicated:
    """Result of planning: all wanted replicas, including existing ones."""

    replicas: tuple[WantedReplica, ...]
    unplaced: tuple[Unplaced, ...]
    held: Parts
    """[T, R] fraction of each table that is stored in a region, including its home."""
    pieces: Flags
    """[T + P, R] whether each piece (`RequiredPieces`) is stored in a region."""
    stored_bytes: Floats
    """[R] stored bytes."""


def replicate(
    columns: Columns, home: Ints, policy: ReplicaPolicy, needed: RequiredPieces | None = None, stay: Flags | None = None
) -> Replicated:
    """Plans the replicas for the homes `home` [T].

    `needed` has the partitions that jobs read if they do not read whole tables. `stay` is a mask of the entries of
    `columns.replica` that are kept in any case (None: none). They use storage and serve jobs, but are not returned.
    """
    step = _Step(columns, home, policy, RequiredPieces.of(columns) if needed is None else needed, stay)
    step.place_jobs()
    step.recover()
    step.spread_hot()
    return Replicated(tuple(step.replicas), tuple(step.unplaced), step.held, step.pieces, step.stored)


def candidate_regions(columns: Columns, held: Parts | Flags, needed: RequiredPieces | None = None) -> Flags:
    """Returns a mask [J, R] of the regions that have all the data and the hardware that a job needs.

    `held` is `Replicated.held` [T, R] or, with `needed`, `Replicated.pieces`. A job without tables needs no data.
    """
    piece = columns.job_table if needed is None else needed.piece
    start = columns.job_start if needed is None else needed.start[columns.job_start]
    out = np.ones((len(columns.kind), len(columns.regions)), np.bool_)
    some = np.diff(start) > 0
    if some.any():
        out[some] = np.logical_and.reduceat((held >= 1)[piece], start[:-1][some], axis=0)
    on_gpus = columns.gpu_type != NONE
    out[on_gpus] &= columns.supply_h[columns.gpu_type[on_gpus]] > 0
    return out


def jobs_without_region(columns: Columns, held: Parts | Flags, needed: RequiredPieces | None = None) -> Longs:
    """Returns the jobs that no region can run, in order. The arguments are those of `candidate_regions`.

    Spark and Presto jobs without GPUs are never included: they run at the home of most of their tables, and read the
    other tables remotely.
    """
    afar = (columns.kind != ML) & (columns.gpu_type == NONE)
    return np.flatnonzero(~candidate_regions(columns, held, needed).any(axis=1) & ~afar)


def replicas_document(columns: Columns, found: Replicated, needed: RequiredPieces | None = None) -> dict[str, Any]:
    """Returns a document of the replicas and of the jobs that no region can run, with names."""

    def partitions(replica: WantedReplica) -> list[str] | None:
        return None if needed is None or replica.edge == NONE else list(needed.names(replica.edge))

    return {
        "version": DOCUMENT_VERSION,
        "replicas": [
            {
                "table": columns.table_names[r.table],
                "region": columns.regions[r.region],
                "reason": r.reason,
                "part": r.part,
                "partitions": partitions(r),
                "job": None if r.job == NONE else columns.job_names[r.job],
            }
            for r in found.replicas
        ],
        "unplaced": [
            {"job": columns.job_names[u.job], "reason": u.reason, "short_bytes": u.short_bytes} for u in found.unplaced
        ],
    }


class _Step:
    """State of the planning: the replicas so far, and the stored bytes."""

    def __init__(
        self, columns: Columns, home: Ints, policy: ReplicaPolicy, needed: RequiredPieces, stay: Flags | None
    ) -> None:  # fmt: skip
        self.c, self.home, self.policy, self.needed = columns, home, policy, needed
        tables, regions = len(home), len(columns.regions)
        self.held = np.zeros((tables, regions), np.float32)
        self.held[np.arange(tables), home] = 1.0
        owner = np.repeat(np.arange(tables), np.diff(columns.replica_start))
        if stay is not None:
            self.held[owner[stay], columns.replica[stay]] = 1.0
        self.pieces = needed.expand(self.held >= 1)
        self.partitions = np.searchsorted(needed.partition_table, np.arange(tables + 1)) + tables
        """[T + 1] offset of the pieces of each table's partitions."""
        self.there = np.zeros((tables, regions), np.bool_)
        """Existing replicas, which need no copy."""
        self.there[owner, columns.replica] = True
        self.stored = (self.held * columns.size_bytes[:, None]).sum(axis=0, dtype=np.float64)
        self.replicas: list[WantedReplica] = []
        self.unplaced: list[Unplaced] = []
        order = np.argsort(columns.job_table, kind="stable")
        self.table_job = np.repeat(np.arange(len(columns.kind)), np.diff(columns.job_start))[order]
        self.table_start = np.searchsorted(columns.job_table[order], np.arange(tables + 1))
        self.level = np.full(tables, _UNREAD)
        np.minimum.at(self.level, columns.job_table, np.repeat(columns.priority, np.diff(columns.job_start)))

    def place_jobs(self) -> None:
        """Adds missing data for jobs that no region can run, in the region with the most supply that has room."""
        c = self.c
        lacking = jobs_without_region(c, self.pieces, self.needed)
        for job in lacking[np.lexsort((lacking, -c.gpu_h[lacking], c.priority[lacking]))]:
            self._place(int(job))

    def _place(self, job: int) -> None:
        c = self.c
        edges = range(c.job_start[job], c.job_start[job + 1])
        pieces = self.needed.piece[self.needed.start[edges.start] : self.needed.start[edges.stop]]
        kind = int(c.gpu_type[job])
        supply = c.supply_h[kind] if kind != NONE else np.ones(len(c.regions))
        # Replicas for an earlier job may serve this job too.
        missing = ~self.pieces[pieces]
        size = (missing * self._lacking_bytes(pieces)).sum(axis=0)
        able = np.flatnonzero(supply > 0)
        if not len(able):
            self.unplaced.append(Unplaced(job, "no_hardware", 0.0))
            return
        if not missing[:, able].any(axis=0).all():
            return
        short = self.stored[able] + size[able] - c.capacity_bytes[able]
        for region in able[np.lexsort((able, size[able], -supply[able]))]:
            if self.stored[region] + size[region] <= c.capacity_bytes[region]:
                for edge in edges:
                    self._bring(edge, int(region), job)
                return
        self.unplaced.append(Unplaced(job, "no_storage", float(short.min())))

    def recover(self) -> None:
        """Adds disaster recovery replicas outside the home region.

        The region is that with the lowest probability of failing together with the home. Ties: the most spare GPU hours
        for the table's jobs, then existing replicas, then the lowest fill level. If another step already made a whole
        copy in a region that is as unlikely to fail with the home, none is added.
        """
        c = self.c
        wanted = np.flatnonzero(self.level <= self.policy.disaster_recovery_level)
        risk = self._risk()
        spare = np.maximum(c.supply_h - self._demand(), 0.0)
        for table in wanted[np.lexsort((wanted, -c.size_bytes[wanted], self.level[wanted]))]:
            home = int(self.home[table])
            others = np.arange(len(c.regions)) != home
            copied = risk[home, others & self.pieces[table]].min(initial=np.inf)
            jobs = self.table_job[self.table_start[table] : self.table_start[table + 1]]
            hours = np.bincount(
                c.gpu_type[jobs][c.gpu_type[jobs] != NONE],
                weights=c.gpu_h[jobs][c.gpu_type[jobs] != NONE],
                minlength=len(c.gpu_types),
            )
            takes = np.minimum(spare, hours[:, None]).sum(axis=0)
            size = (1.0 - self.held[table]) * c.size_bytes[table]
            fits = others & ~self.pieces[table] & (self.stored + size <= c.capacity_bytes)
            if not fits.any():
                continue
            # `lexsort` sorts by the last key first. Remaining ties are in name order.
            full = self.stored / np.maximum(c.capacity_bytes, 1.0)
            order = np.lexsort((full, ~self.there[table], -takes, risk[home]))
            region = int(order[fits[order]][0])
            if risk[home, region] >= copied:
                continue
            self._add(int(table), region, "disaster_recovery")
            spare[:, region] = np.maximum(spare[:, region] - hours, 0.0)

    def spread_hot(self) -> None:
        """Adds replicas of hot tables. Each GPU type has a byte budget in each region, in proportion to its supply.

        Tables of high priority come first, then those that most jobs read.
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
                        self._add(int(table), int(region), "hot")
                        budget -= size

    def _lacking_bytes(self, pieces: Ints) -> Floats:
        """Returns [pieces, R] the bytes that a copy of each piece would add, without partitions stored already."""
        out = np.repeat(self.needed.size_bytes[pieces][:, None], len(self.c.regions), axis=1)
        whole = pieces < len(self.held)
        out[whole] *= 1.0 - self.held[pieces[whole]]
        return out

    def _bring(self, edge: int, region: int, job: int) -> None:
        """Adds the data of one edge that a job is missing in a region."""
        pieces, table = self.needed.pieces(edge), int(self.c.job_table[edge])
        if self.pieces[pieces, region].all():
            return
        if pieces[0] == table:
            self._add(table, region, "no_region", job)
            return
        new = pieces[~self.pieces[pieces, region]]
        more = float(self.needed.size_bytes[new].sum())
        self.pieces[new, region] = True
        if self.c.size_bytes[table] > 0:
            self.held[table, region] = min(1.0, self.held[table, region] + more / self.c.size_bytes[table])
        self.stored[region] += more
        self.replicas.append(WantedReplica(table, region, "no_region", float(self.needed.part[edge]), job, edge))

    def _add(self, table: int, region: int, reason: Reason, job: int = NONE) -> None:
        """Adds a replica of a whole table."""
        self.stored[region] += float(1.0 - self.held[table, region]) * self.c.size_bytes[table]
        self.held[table, region] = 1.0
        self.pieces[table, region] = True
        self.pieces[self.partitions[table] : self.partitions[table + 1], region] = True
        self.replicas.append(WantedReplica(table, region, reason, 1.0, job))

    def _risk(self) -> Floats:
        """Returns [R, R] the probability that two regions fail together."""
        number = {name: index for index, name in enumerate(self.c.regions)}
        risk = np.zeros((len(number), len(number)))
        for (one, two), probability in self.policy.correlated.items():
            risk[number[one], number[two]] = risk[number[two], number[one]] = probability
        return risk

    def _demand(self) -> Floats:
        """Returns [G, R] the GPU hours of the jobs that have a region, by GPU type."""
        region = PlacementProblem(self.c, self.home).state.region
        flows = (region != NONE) & (self.c.gpu_type != NONE)
        demand = np.zeros_like(self.c.supply_h)
        np.add.at(demand, (self.c.gpu_type[flows], region[flows]), self.c.gpu_h[flows])
        return demand
