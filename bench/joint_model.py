"""Homes and replicas decided together by one formulation (MAST 6), for instances small enough for CP-SAT.

Variables: x[t, r], a table's home (exactly one); y[t, r], a copy there, x among them; c[j, r], an ML job finds all its
tables and its hardware in r. Storage, CPU quotas, the home threshold and the move quota are constraints. The objective
is that of `bench.replica_objective`, with GPU demand and storage on a grid: of all solutions on the way the one is kept
that costs least by `bench.replica_objective` itself.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from bench.replica_objective import ReplicaWeights, Worth, is_read, supply_share, worth
from tetris.climb import climb
from tetris.columns import ML, NONE, Columns, Floats, Ints
from tetris.homes_model import HomesModel, least_unit, one_worker
from tetris.kernels import layout
from tetris.problem import Problem
from tetris.replicas import Parts, Policy, replicate

MOST_PAIRS = 400
"""Tables times regions that are modelled at most."""
_GRID = 200
_LEAST = 1e-9
"""What is better by less is not."""
USUAL = ReplicaWeights()


@dataclass(frozen=True, slots=True)
class Decided:
    """Homes and replicas, and what they cost."""

    home: Ints
    """[T]"""
    held: Parts
    """[T, R] copies, the home among them."""
    worth: Worth


def two_step(columns: Columns, *, time_s: float, seed: int = 0, weights: ReplicaWeights = USUAL) -> Decided:
    """Homes first, then the replicas that they call for: the way of MAST 3.4 and 3.5."""
    home = climb(columns, time_s=time_s, seed=seed).home
    held = replicate(columns, home, Policy(hot_part=1.0, hot_jobs=1)).held
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
    """Homes and replicas that cost at most what those of `begin` do; `effort_s`: CP-SAT's deterministic seconds.

    `moves` is off: only the replicas are decided anew.

    Raises:
        ValueError: the instance has more than MOST_PAIRS tables times regions.
    """
    pairs = len(columns.home) * len(columns.regions)
    if pairs > MOST_PAIRS:
        raise ValueError(f"tables times regions: {pairs}: homes and replicas together are for at most {MOST_PAIRS}")
    seen = _Seen(columns, begin, weights)
    for free in (False, True, True) if moves else (False,):
        before = seen.best
        _Joint(Problem(columns, before.home), before.held, seen.allowed, weights, free).search(seen, seed, effort_s / 3)
        if free and seen.best is before:
            break
    return seen.best


class _Seen:
    """The best that may be chosen, by what it is worth."""

    def __init__(self, columns: Columns, begin: Decided, weights: ReplicaWeights) -> None:
        self.columns, self.best, self.weights = columns, begin, weights
        self.allowed = np.maximum(columns.capacity_bytes, _stored(columns, begin.held))
        self._broken = {(v.constraint, v.where): v.by for v in Problem(columns).score().violations}

    def offer(self, home: Ints, held: Parts) -> None:
        """Take it, if it costs less and breaks nothing that the start keeps, nor that by more."""
        found = worth(self.columns, home, held, self.weights)
        if found.total >= self.best.worth.total - _LEAST:
            return
        after = [v for v in Problem(self.columns, home).score().violations if v.constraint != "storage"]
        if any(v.by > self._broken.get((v.constraint, v.where), 0.0) * (1 + layout.ROUNDING) for v in after):
            return
        if (_stored(self.columns, held) <= self.allowed * (1 + layout.ROUNDING)).all():
            self.best = Decided(home, held, found)


class _Scored(cp_model.CpSolverSolutionCallback):
    """Offers each solution on the way: the model's order of them is not that of what they are worth."""

    def __init__(self, model: "_Joint", seen: _Seen) -> None:
        super().__init__()
        self.joint, self.seen = model, seen

    def on_solution_callback(self) -> None:
        """A better solution of the model."""
        home = self.joint.homes_of(self)
        held = [[self.boolean_value(y) for y in row] for row in self.joint.copy]
        self.seen.offer(np.array(home, np.int32), np.array(held, np.float32))


def _stored(columns: Columns, held: Parts) -> Floats:
    return np.asarray(held.astype(np.float64).T @ columns.size_bytes, np.float64)


class _Joint(HomesModel):
    """The model of homes with copies beside them."""

    def __init__(self, problem: Problem, held: Parts, allowed: Floats, weights: ReplicaWeights, free: bool) -> None:
        """Near the homes of the problem and the copies `held`; homes may change if they are `free`."""
        self.columns, self.weights, self.allowed, self.held = problem.columns, weights, allowed, held
        tables = np.arange(len(problem.home), dtype=np.int32)
        more = weights.nowhere + weights.recovery + weights.reach
        super().__init__(problem, tables, most_jobs=len(self.columns.kind), grid=_GRID, more=more)
        for table, home in enumerate(() if free else problem.home):
            self.model.add(self.at[table][home] == 1)

    def search(self, seen: _Seen, seed: int, effort_s: float) -> None:
        """Offer all that is found in CP-SAT's deterministic seconds."""
        self.model.minimize(sum(self.cost))
        one_worker(seed, effort_s).solve(self.model, _Scored(self, seen))

    def add_storage(self) -> None:
        """Copies, room for them, what they cost, and what they are for."""
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
        """Jobs with the same tables and hardware are one."""
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
