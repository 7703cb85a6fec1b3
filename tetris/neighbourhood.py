"""Large neighbourhoods: a dozen tables that share jobs are placed anew as a whole by CP-SAT, all others staying.

The model has a table of costs for each region's demand and storage, on a grid, so it is near the objective but not it:
what it finds is taken only if the exact objective says that it is better.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from tetris.columns import ML, NONE, Ints
from tetris.kernels import layout
from tetris.problem import Problem

_TABLES = 14
_JOBS = 60
"""Jobs that are modelled; those with the most at stake first. The others count as staying where they are."""
_GRID = 40
_COSTS = 1 << 30
"""Whole numbers that the size of the objective is divided into."""
_EFFORT_S = 0.03
"""Deterministic seconds of CP-SAT for each neighbourhood."""
_LOOKS_OF_MODEL = 1e5
_LOOKS_PER_S = 1e8
"""What a neighbourhood costs, in looks: its model, and each of CP-SAT's deterministic seconds."""


class Neighbourhood:
    """Improves plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def improve(self, home: Ints, draw: np.random.Generator) -> float:
        """Take the plan ([T]) with one neighbourhood of it placed anew, if that is better; returns the looks spent."""
        tables = self._choose(draw)
        found, effort_s = HomesModel(self.problem, tables).solve(int(draw.integers(1 << 30)), _EFFORT_S)
        looks = _LOOKS_OF_MODEL + _LOOKS_PER_S * effort_s
        if found is None:
            return looks
        before = self.problem.excess[0], self.problem.total
        for table, region in zip(tables, found, strict=True):
            self.problem.move(int(table), region)
        lack, broken = self.problem.excess
        worse = lack > before[0] + 1e-9 or (lack > before[0] - 1e-9 and self.problem.total >= before[1])
        if broken > 1e-9 or worse:
            for table in tables:
                self.problem.move(int(table), int(home[table]))
        return looks

    def _choose(self, draw: np.random.Generator) -> Ints:
        """Tables that are near each other: they share jobs with one that is drawn, or with one of those."""
        fixed = self.problem.fixed
        chosen = [int(draw.integers(len(self.problem.home)))]
        known = set(chosen)
        for table in chosen:
            if len(chosen) >= _TABLES:
                break
            jobs = fixed.table_job[fixed.table_start[table] : fixed.table_start[table + 1]]
            for job in draw.permutation(jobs)[:_JOBS]:
                others = fixed.job_table[fixed.job_start[job] : fixed.job_start[job + 1]]
                for other in draw.permutation(others)[:_TABLES]:
                    if int(other) not in known and len(chosen) < _TABLES:
                        known.add(int(other))
                        chosen.append(int(other))
        while len(chosen) < min(_TABLES, len(self.problem.home)):
            other = int(draw.integers(len(self.problem.home)))
            if other not in known:
                known.add(other)
                chosen.append(other)
        return np.array(chosen, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Here:
    """A job and the regions that it may have: literal by region."""

    job: int
    literal: dict[int, Any]


class HomesModel:
    """Homes of some tables, their jobs, and what the regions' demand and storage would cost on a grid."""

    def __init__(
        self, problem: Problem, tables: Ints, most_jobs: int = _JOBS, grid: int = _GRID, more: float = 0.0
    ) -> None:
        """The first `most_jobs` of the tables' jobs are modelled, by what is at stake.

        `more`: what costs may come to that are not of the problem's objective.
        """
        self.problem, self.tables, self.grid = problem, tables, grid
        self.most_jobs = most_jobs
        self.regions = len(problem.columns.regions)
        self.model = cp_model.CpModel()
        self.unit = (problem.magnitude + more) / _COSTS
        """What a whole number of cost is worth."""
        self.cost: list[Any] = []
        self.at = {int(t): [self.model.new_bool_var("") for _ in range(self.regions)] for t in tables}
        for table, literals in self.at.items():
            self.model.add_exactly_one(literals)
            for region, literal in enumerate(literals):
                self.model.add_hint(literal, int(problem.home[table] == region))
        self.here: list[Here] = []
        self._add_jobs()
        self.add_storage()

    def solve(self, seed: int, effort_s: float) -> tuple[list[int] | None, float]:
        """The regions of the tables, if any, and CP-SAT's deterministic seconds spent; at most `effort_s`."""
        self.model.minimize(sum(self.cost))
        solver = one_worker(seed, effort_s)
        status = solver.solve(self.model)
        spent_s = float(solver.response_proto.deterministic_time)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, spent_s
        found = [next(r for r, literal in enumerate(self.at[int(t)]) if solver.value(literal)) for t in self.tables]
        return found, spent_s

    def _add_jobs(self) -> None:
        fixed, state = self.problem.fixed, self.problem.state
        jobs = {int(j) for t in self.tables for j in fixed.table_job[fixed.table_start[t] : fixed.table_start[t + 1]]}
        stake = {j: fixed.job_amount[j, layout.READ_PER_BYTE] * fixed.job_amount[j, layout.BYTES] for j in jobs}
        demand = state.demand.sum(axis=1)
        for j in jobs:
            key = fixed.job[j, layout.KEY]
            if key != NONE:
                stake[j] += (
                    fixed.importance[key] * fixed.job_amount[j, layout.GPU_H] / max(demand[key], fixed.tiny[key])
                )
        flows: dict[int, list[tuple[int, Here]]] = defaultdict(list)
        for job in sorted(jobs, key=lambda j: (-stake[j], j))[: self.most_jobs]:
            here = self._add_job(job)
            key = int(fixed.job[job, layout.KEY])
            if here is not None:
                self.here.append(here)
            if here is not None and key != NONE:
                flows[key].append((job, here))
        for key, members in sorted(flows.items()):
            self._add_key(key, members)

    def _add_job(self, job: int) -> Here | None:
        """The regions where a job may be, and what it reads from afar then."""
        fixed = self.problem.fixed
        tables = fixed.job_table[fixed.job_start[job] : fixed.job_start[job + 1]]
        free = [int(t) for t in tables if int(t) in self.at]
        others = [int(t) for t in tables if int(t) not in self.at]
        weight = fixed.number[layout.READ_WEIGHT] * fixed.job_amount[job, layout.READ_PER_BYTE]
        size = fixed.job_amount[job, layout.BYTES]
        homes = {int(self.problem.home[t]) for t in others}
        if fixed.job[job, layout.KIND] == ML:
            possible = range(self.regions) if not homes else homes if len(homes) == 1 else ()
            literal = {r: self.model.new_bool_var("") for r in possible}
            for region, here in literal.items():
                for table in free:
                    self.model.add_implication(here, self.at[table][region])
                self.model.add_bool_or([here, *(self.at[t][region].negated() for t in free)])
                self.cost.append(-self.whole(weight * size) * here)
            return Here(job, literal) if literal else None
        # The region of the most tables; which of two with as many is left to the exact objective.
        literal = {r: self.model.new_bool_var("") for r in range(self.regions)}
        self.model.add_exactly_one(literal.values())
        fixed_count = [sum(int(self.problem.home[t]) == r for t in others) for r in range(self.regions)]
        counts = [fixed_count[r] + sum(self.at[t][r] for t in free) for r in range(self.regions)]
        for region, here in literal.items():
            for other in range(self.regions):
                if other != region:
                    self.model.add(counts[region] >= counts[other]).only_enforce_if(here)
            local = sum(float(fixed.size[t]) for t in others if self.problem.home[t] == region)
            self.cost.append(-self.whole(weight * local) * here)
            for table in free:
                both = self.model.new_bool_var("")
                self.model.add_implication(both, here)
                self.model.add_implication(both, self.at[table][region])
                self.cost.append(-self.whole(weight * float(fixed.size[table])) * both)
        return Here(job, literal)

    def _add_key(self, key: int, members: list[tuple[int, Here]]) -> None:
        """What demand costs in each region: the square with the sum of demand as it is now, and the overload.

        A job with a key has hours.
        """
        fixed, state = self.problem.fixed, self.problem.state
        hours = {job: float(fixed.job_amount[job, layout.GPU_H]) for job, _ in members}
        unit = sum(hours.values()) / self.grid
        everywhere = max(float(state.demand[key].sum()), sum(hours.values()))
        weight = fixed.number[layout.GPU_WEIGHT] * fixed.importance[key]
        overload, mean = fixed.number[layout.OVERLOAD], float(fixed.mean[key])
        for region in range(self.regions):
            parts = [(hours[job], here.literal[region]) for job, here in members if region in here.literal]
            if not parts:
                continue
            now = sum(hours[job] for job, _ in members if state.region[job] == region)
            demand = max(float(state.demand[key, region]) - now, 0.0) + unit * np.arange(self.grid + len(parts) + 1)
            supply, share = float(fixed.supply[key, region]), float(fixed.share[key, region])
            over = np.maximum(demand - supply, 0.0)
            strain = 1 / (1 + np.exp(-over / mean)) - 0.5 if mean > 0 else np.where(over > 0, 0.5, 0.0)
            values = weight * ((demand / everywhere - share) ** 2 + overload * strain)
            self.add_table([(round(h / unit), literal) for h, literal in parts], values)

    def add_storage(self) -> None:
        """Room for the homes, and what they cost."""
        fixed, state = self.problem.fixed, self.problem.state
        now = state.now[layout.STORED]
        unit = float(fixed.size[self.tables].sum()) / self.grid
        if unit == 0.0:
            return
        weight = fixed.number[layout.STORAGE_WEIGHT]
        for region in range(self.regions):
            kept = {t: self._kept(t, region) for t in self.at}
            base = float(state.stored[region]) - sum(
                float(fixed.size[t]) for t in self.at if self.problem.home[t] == region and not kept[t]
            )
            parts = [(float(fixed.size[t]), self.at[t][region]) for t in self.at if not kept[t]]
            stored = base + unit * np.arange(self.grid + len(parts) + 1)
            values = weight * (stored / now - float(fixed.capacity_share[region])) ** 2
            room = max(float(fixed.capacity_allowed[region]) - base, 0.0)
            if sum(s for s, _ in parts) > room:
                # Sizes are rounded down here: the exact objective refuses what does not fit after all.
                self.model.add(sum(int(s / unit) * literal for s, literal in parts) <= int(room / unit) + 1)
            self.add_table([(round(s / unit), literal) for s, literal in parts], values)

    def _kept(self, table: int, region: int) -> bool:
        fixed = self.problem.fixed
        return region in fixed.replica[fixed.replica_start[table] : fixed.replica_start[table + 1]]

    def add_table(self, parts: list[tuple[int, Any]], values: Any) -> None:
        """A cost by the sum of whole numbers."""
        values = [self.whole(v - values[0]) for v in values]
        top = min(len(values) - 1, sum(n for n, _ in parts))
        if top <= 0:
            return
        level = self.model.new_int_var(0, top, "")
        self.model.add(level == sum(n * literal for n, literal in parts))
        cost = self.model.new_int_var(min(values), max(values), "")
        self.model.add_element(level, values[: top + 1], cost)
        self.cost.append(cost)

    def whole(self, cost: float) -> int:
        """A cost as the model's whole number."""
        return round(float(cost) / self.unit)


def one_worker(seed: int, effort_s: float) -> cp_model.CpSolver:
    """A solver that finds the same for the same seed and effort, in CP-SAT's deterministic seconds."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed & 0x7FFFFFFF
    solver.parameters.max_deterministic_time = effort_s
    # Ctrl-C is for whoever called.
    solver.parameters.catch_sigint_signal = False
    return solver
