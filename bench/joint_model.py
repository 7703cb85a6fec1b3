"""Decides homes and replicas together in one formulation (MAST 6), for instances small enough for CP-SAT.

Variables: x[t, r], region r is the home of table t (exactly one per table); y[t, r], r has a copy of t (x implies y);
c[j, r], r has all tables and the hardware of ML job j. Storage, CPU quotas, the home threshold and the move quota are
constraints. The objective is that of `bench.replica_objective`, with GPU demand and storage rounded to a grid. So each
intermediate solution is scored by `bench.replica_objective` itself, and the one with the lowest cost is kept.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from bench.replica_objective import ReplicaCost, ReplicaWeights, is_read, supply_share, worth
from tetris.climb import climb
from tetris.columns import ML, NONE, Columns, Floats, Ints
from tetris.homes_model import HomesModel, least_unit, one_worker
from tetris.kernels import layout
from tetris.problem import PlacementProblem
from tetris.replicas import Parts, ReplicaPolicy, replicate

MOST_PAIRS = 400
"""Largest number of tables times regions that is modelled."""
_GRID = 200
_LEAST = 1e-9
"""Smallest improvement of the cost that counts."""
USUAL = ReplicaWeights()


@dataclass(frozen=True, slots=True)
class Decided:
    """Homes and replicas with their cost."""

    home: Ints
    """[T] Home of each table."""
    held: Parts
    """[T, R] Copies, including the homes."""
    worth: ReplicaCost


def two_step(columns: Columns, *, time_s: float, seed: int = 0, weights: ReplicaWeights = USUAL) -> Decided:
    """Decides homes first, then the replicas for them, as in MAST 3.4 and 3.5."""
    home = climb(columns, time_s=time_s, seed=seed).home
    held = replicate(columns, home, ReplicaPolicy(hot_part=1.0, hot_jobs=1)).held
    return Decided(home, held, worth(columns, home, held, weights))


def together(
    columns: Columns,
    begin: Decided,
    *,
    effort_s: float,
    seed: int = 0,
    weights: ReplicaWeights = USUAL,
    moves: bool = True,
) -> Decided:
    """Decides homes and replicas together, starting from `begin`, at no higher cost.

    `effort_s` is the limit in CP-SAT's deterministic seconds. If `moves` is False, homes are kept and only the replicas
    change.

    Raises:
        ValueError: the instance has more than MOST_PAIRS tables times regions.
    """
    pairs = len(columns.home) * len(columns.regions)
    if pairs > MOST_PAIRS:
        raise ValueError(f"tables times regions: {pairs}: must be at most {MOST_PAIRS}")
    seen = _Seen(columns, begin, weights)
    for free in (False, True, True) if moves else (False,):
        before = seen.best
        _Joint(PlacementProblem(columns, before.home), before.held, seen.allowed, weights, free).search(
            seen, seed, effort_s / 3
        )
        if free and seen.best is before:
            break
    return seen.best


class _Seen:
    """The best allowed solution so far, by its cost."""

    def __init__(self, columns: Columns, begin: Decided, weights: ReplicaWeights) -> None:
        self.columns, self.best, self.weights = columns, begin, weights
        self.allowed = np.maximum(columns.capacity_bytes, _stored(columns, begin.held))
        self._broken = {(v.constraint, v.where): v.by for v in PlacementProblem(columns).score().violations}

    def offer(self, home: Ints, held: Parts) -> None:
        """Accepts a solution if it costs less, and does not exceed a limit by more than the start does."""
        found = worth(self.columns, home, held, self.weights)
        if found.total >= self.best.worth.total - _LEAST:
            return
        after = [v for v in PlacementProblem(self.columns, home).score().violations if v.constraint != "storage"]
        if any(v.by > self._broken.get((v.constraint, v.where), 0.0) * (1 + layout.ROUNDING) for v in after):
            return
        if (_stored(self.columns, held) <= self.allowed * (1 + layout.ROUNDING)).all():
            self.best = Decided(home, held, found)


class _Scored(cp_model.CpSolverSolutionCallback):
    """Offers each intermediate solution: the order of costs in the model may differ from that of the true costs."""

    def __init__(self, model: "_Joint", seen: _Seen) -> None:
        super().__init__()
        self.joint, self.seen = model, seen

    def on_solution_callback(self) -> None:
        """Offers a solution that improves the model's objective."""
        home = self.joint.homes_of(self)
        held = [[self.boolean_value(y) for y in row] for row in self.joint.copy]
        self.seen.offer(np.array(home, np.int32), np.array(held, np.float32))


def _stored(columns: Columns, held: Parts) -> Floats:
    return np.asarray(held.astype(np.float64).T @ columns.size_bytes, np.float64)


class _Joint(HomesModel):
    """The model of homes, extended by copies."""

    def __init__(
        self, problem: PlacementProblem, held: Parts, allowed: Floats, weights: ReplicaWeights, free: bool
    ) -> None:
        """Builds the model, with the problem's homes and the copies `held` as hints; homes may change if `free`."""
        self.columns, self.weights, self.allowed, self.held = problem.columns, weights, allowed, held
        tables = np.arange(len(problem.home), dtype=np.int32)
        more = weights.nowhere + weights.recovery + weights.reach
        super().__init__(problem, tables, most_jobs=len(self.columns.kind), grid=_GRID, more=more)
        for table, home in enumerate(() if free else problem.home):
            self.model.add(self.at[table][home] == 1)

    def search(self, seen: _Seen, seed: int, effort_s: float) -> None:
        """Runs CP-SAT for its deterministic seconds, and offers all solutions that it finds."""
        self.model.minimize(sum(self.cost))
        one_worker(seed, effort_s).solve(self.model, _Scored(self, seen))

    def add_storage(self) -> None:
        """Adds the copies with their storage constraints and cost terms."""
        model = self.model
        self.copy = [[self.new_literal(bool(part == 1.0)) for part in row] for row in self.held]
        for table, row in enumerate(self.copy):
            for region, copied in enumerate(row):
                model.add_implication(self.at[table][region], copied)
        self._add_room()
        self._add_recovery()
        self._add_reach()

    def _add_room(self) -> None:
        c, number = self.columns, self.problem.fixed.number
        fine, coarse = least_unit(c.size_bytes.tolist()), float(c.size_bytes.sum()) / self.grid
        if coarse == 0.0:
            return
        now = float(_stored(c, self.held).sum())
        for region in range(self.regions):
            copies = [(float(size), row[region]) for size, row in zip(c.size_bytes, self.copy, strict=True)]
            room = int(self.allowed[region] / fine)
            self.model.add(sum(int(size / fine) * copied for size, copied in copies) <= room)
            stored = coarse * np.arange(self.grid + len(copies) + 1)
            share = float(self.problem.fixed.capacity_share[region])
            values = number[layout.STORAGE_WEIGHT] * (stored / now - share) ** 2
            self.add_table([(round(size / coarse), copied) for size, copied in copies], values)

    def _add_recovery(self) -> None:
        sizes = self.columns.size_bytes * is_read(self.columns)
        for table in np.flatnonzero(sizes):
            recovers = self.model.new_bool_var("")
            self.model.add(sum(self.copy[table]) >= 2).only_enforce_if(recovers)
            self.cost.append(-self.whole(self.weights.recovery * sizes[table] / sizes.sum()) * recovers)

    def _add_reach(self) -> None:
        """Adds the terms `reach` and `nowhere`; jobs with the same tables and hardware are grouped."""
        c = self.columns
        share = supply_share(c)
        of_all = c.weight / (float(c.weight[c.kind == ML].sum()) or 1.0)
        of_gpus = c.weight / (float(c.weight[(c.kind == ML) & (c.gpu_type != NONE)].sum()) or 1.0)
        alike: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        for job in np.flatnonzero(c.kind == ML):
            tables = sorted(int(t) for t in c.job_table[c.job_start[job] : c.job_start[job + 1]])
            alike[int(c.gpu_type[job]), tuple(tables)].append(int(job))
        for (gpu_type, group), jobs in sorted(alike.items()):
            literals = []
            for region in range(self.regions):
                if gpu_type != NONE and not c.supply_h[gpu_type, region]:
                    continue
                literals.append(self.model.new_bool_var(""))
                for table in group:
                    self.model.add_implication(literals[-1], self.copy[table][region])
                if gpu_type != NONE:
                    worth_of = self.weights.reach * of_gpus[jobs].sum() * share[gpu_type, region]
                    self.cost.append(-self.whole(worth_of) * literals[-1])
            found = self.model.new_bool_var("")
            self.model.add_bool_or([*literals, found.negated()])
            self.cost.append(-self.whole(self.weights.nowhere * of_all[jobs].sum()) * found)
