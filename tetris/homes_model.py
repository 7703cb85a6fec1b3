"""A CP-SAT model for the homes of some tables, while all other tables stay.

The objective is approximated on a grid: the cost of a region's demand for each key and the cost of its stored bytes are
lookup tables. A *key* is a GPU type and a priority level. The total demand of a key is treated as constant, although it
changes when a job gains or loses a region. Constraints are exact except for rounding, which never excludes an allowed
plan.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from tetris.columns import ML, NONE, Ints
from tetris.kernels import layout
from tetris.problem import PlacementProblem

JOBS = 60
"""Maximum number of modelled jobs: those with the largest possible effect on the objective. Other jobs are fixed."""
_GRID = 20
"""Number of grid steps."""
_COSTS = 1 << 30
"""Number of integer cost units for the magnitude of the objective."""
_UNITS = 1 << 24
"""Number of units for the sum of bytes or hours in a constraint. CP-SAT fails with much larger coefficients."""


@dataclass(frozen=True, slots=True)
class Here:
    """A modelled job, with one literal for each region where it may run."""

    job: int
    literal: dict[int, Any]


class HomesModel:
    """CP-SAT model of the homes of some tables and their jobs, with grid costs for each region's demand and storage.

    The current plan is given to CP-SAT as a hint for all variables.
    """

    def __init__(
        self, problem: PlacementProblem, tables: Ints, most_jobs: int = JOBS, grid: int = _GRID, more: float = 0.0
    ) -> None:
        """Builds the model with at most `most_jobs` jobs, those with the largest possible effect on the objective.

        `more` is the magnitude of costs that a caller adds to the problem's objective.
        """
        self.problem, self.tables, self.grid = problem, tables, grid
        self.most_jobs = most_jobs
        self.regions = len(problem.columns.regions)
        self.model = cp_model.CpModel()
        self.unit = (problem.magnitude + more) / _COSTS
        """Objective value of one integer cost unit."""
        self.cost: list[Any] = []
        self._now: dict[int, int] = {}
        """Current values of the variables by index."""
        self.at: dict[int, list[Any]] = {}
        for table in tables.tolist():
            self.at[table] = [self.new_literal(problem.home[table] == region) for region in range(self.regions)]
            self.model.add_exactly_one(self.at[table])
        self.here: list[Here] = []
        self._regions_of: dict[Hashable, dict[int, Any]] = {}
        """Literals by region, shared by jobs with the same tables."""
        self._pairs: dict[tuple[int, int], Any] = {}
        """Literals that a job runs at the home of a table, by the index of the job's literal and the table."""
        self._add_jobs()
        self._limit_jobs()
        self._limit_moves()
        self.add_storage()

    def new_literal(self, now: bool) -> Any:
        """Adds a Boolean variable with the current value `now`."""
        literal = self.model.new_bool_var("")
        self._hint(literal, int(now))
        return literal

    def _hint(self, variable: Any, now: int) -> None:
        self._now[variable.index] = now
        self.model.add_hint(variable, now)

    def solve(self, seed: int, effort_s: float, most_s: float = math.inf) -> tuple[list[list[int]], float]:
        """Solves the model; returns the regions of each improving solution, and the deterministic seconds spent.

        The limits are `effort_s` deterministic seconds and `most_s` seconds of wall time.
        """
        self.model.minimize(sum(self.cost))
        solver, found = one_worker(seed, effort_s), _Found(self)
        solver.parameters.max_time_in_seconds = most_s
        solver.solve(self.model, found)
        return found.homes, float(solver.response_proto.deterministic_time)

    def homes_of(self, solution: cp_model.CpSolverSolutionCallback) -> list[int]:
        """Returns the tables' regions in an intermediate solution."""
        return [next(r for r, x in enumerate(at) if solution.boolean_value(x)) for at in self.at.values()]

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
        """Adds a job: the regions where it may run, and the cost of its remote reads."""
        fixed = self.problem.fixed
        tables = fixed.job_table[fixed.job_start[job] : fixed.job_start[job + 1]]
        free = [int(t) for t in tables if int(t) in self.at]
        others = [int(t) for t in tables if int(t) not in self.at]
        weight = fixed.number[layout.READ_WEIGHT] * fixed.job_amount[job, layout.READ_PER_BYTE]
        size = fixed.job_amount[job, layout.BYTES]
        if fixed.job[job, layout.KIND] == ML:
            literal = self._together(free, {int(self.problem.home[t]) for t in others})
            self.cost.extend(-self.whole(weight * size) * here for here in literal.values())
            return Here(job, literal) if literal else None
        literal = self._most(job, free, others)
        for region, here in literal.items():
            local = sum(float(fixed.size[t]) for t in others if self.problem.home[t] == region)
            self.cost.append(-self.whole(weight * local) * here)
            for table in free:
                both = self._both(here, table, region)
                self.cost.append(-self.whole(weight * float(fixed.size[table])) * both)
        return Here(job, literal)

    def _together(self, free: list[int], homes: set[int]) -> dict[int, Any]:
        """Returns literals for the regions where all tables of an ML job are at home.

        `free` are its tables in the model, `homes` the home regions of its other tables. No new variables are needed
        for a job with one free table.
        """
        possible = range(self.regions) if not homes else sorted(homes) if len(homes) == 1 else ()
        if len(free) == 1:
            return {region: self.at[free[0]][region] for region in possible}
        common = "together", tuple(sorted(free)), tuple(possible)
        if common not in self._regions_of:
            literal = {r: self.new_literal(all(self.problem.home[t] == r for t in free)) for r in possible}
            for region, here in literal.items():
                for table in free:
                    self.model.add_implication(here, self.at[table][region])
                self.model.add_bool_or([here, *(self.at[t][region].negated() for t in free)])
            self._regions_of[common] = literal
        return self._regions_of[common]

    def _most(self, job: int, free: list[int], others: list[int]) -> dict[int, Any]:
        """Returns literals for the region with most of a job's tables. Ties: more bytes, first region (MAST 3.3)."""
        common = "most", tuple(sorted(free)), tuple(sorted(others))
        if common not in self._regions_of:
            size, homes = self.problem.fixed.size, self.problem.home
            unit = least_unit(size[free + others].tolist())
            bytes_of = {t: round(float(size[t]) / unit) for t in free + others}
            # Lexicographic: one table outweighs all bytes, and one byte unit outweighs the order of regions.
            worth = {t: (1 + sum(bytes_of.values()) + n) * self.regions for t, n in bytes_of.items()}
            region_now = self.problem.state.region[job]
            literal = {region: self.new_literal(region == region_now) for region in range(self.regions)}
            self.model.add_exactly_one(literal.values())
            order = [
                sum(worth[t] for t in others if homes[t] == r) + sum(worth[t] * self.at[t][r] for t in free) - r
                for r in range(self.regions)
            ]
            for region, here in literal.items():
                for other in range(self.regions):
                    if other != region:
                        self.model.add(order[region] > order[other]).only_enforce_if(here)
            self._regions_of[common] = literal
        return self._regions_of[common]

    def _both(self, here: Any, table: int, region: int) -> Any:
        """Returns a literal that implies that both the job's region and the table's home are `region`."""
        pair = here.index, table
        if pair not in self._pairs:
            there = self.at[table][region]
            both = self.new_literal(bool(self._now[here.index] and self._now[there.index]))
            self.model.add_implication(both, here)
            self.model.add_implication(both, there)
            self._pairs[pair] = both
        return self._pairs[pair]

    def _add_key(self, key: int, members: list[tuple[int, Here]]) -> None:
        """Adds the cost of a key's demand in each region: squared term (with the current total demand) and overload.

        Every job with a key has GPU hours above 0.
        """
        fixed, state = self.problem.fixed, self.problem.state
        hours = {job: float(fixed.job_amount[job, layout.GPU_H]) for job, _ in members}
        unit = sum(hours.values()) / self.grid
        everywhere = max(float(state.demand[key].sum()), sum(hours.values()))
        weight = fixed.number[layout.GPU_WEIGHT] * fixed.importance[key]
        overload, mean = fixed.number[layout.OVERLOAD], float(fixed.mean[key])
        for region in range(self.regions):
            parts = _merged((hours[job], here.literal[region]) for job, here in members if region in here.literal)
            if not parts:
                continue
            now = sum(hours[job] for job, _ in members if state.region[job] == region)
            demand = max(float(state.demand[key, region]) - now, 0.0) + unit * np.arange(self.grid + len(parts) + 1)
            supply, share = float(fixed.supply[key, region]), float(fixed.share[key, region])
            over = np.maximum(demand - supply, 0.0)
            strain = 1 / (1 + np.exp(-over / mean)) - 0.5 if mean > 0 else np.where(over > 0, 0.5, 0.0)
            values = weight * ((demand / everywhere - share) ** 2 + overload * strain)
            self.add_table([(round(h / unit), literal) for h, literal in parts], values)

    def _limit_jobs(self) -> None:
        """Adds the constraints on CPU quotas and on high-priority hours at home. Jobs not in the model are fixed."""
        fixed, state, now = self.problem.fixed, self.problem.state, self._now
        for app, quotas in enumerate(fixed.quota_allowed):
            mine = [here for here in self.here if fixed.job[here.job, layout.APP] == app]
            hours = {here.job: float(fixed.job_amount[here.job, layout.CPU_H]) for here in mine}
            unit = least_unit(list(hours.values()))
            for region in np.flatnonzero(np.isfinite(quotas)).tolist() if mine else ():
                parts = [(hours[h.job], h.literal[region]) for h in mine if region in h.literal]
                here_now = sum(h for h, literal in parts if now[literal.index])
                room = max(float(quotas[region]), float(state.cpu[app, region])) - float(state.cpu[app, region])
                self.model.add(sum(int(h / unit) * x for h, x in parts) <= _room((room + here_now) / unit))
        at_home = [
            (float(fixed.job_amount[here.job, layout.GPU_H]), literal)
            for here in self.here
            for region, literal in here.literal.items()
            if (key := fixed.job[here.job, layout.KEY]) != NONE and fixed.at_home[key, region]
        ]
        unit = least_unit([h for h, _ in at_home])
        home_h = float(state.now[layout.HOME_H])
        more = min(float(fixed.number[layout.WANTED_H]), home_h) - home_h
        wanted = sum(h for h, literal in at_home if now[literal.index]) + more
        if wanted > 0:
            self.model.add(sum(math.ceil(h / unit) * x for h, x in at_home) >= int(wanted / unit))

    def _limit_moves(self) -> None:
        fixed, quota = self.problem.fixed, float(self.problem.fixed.number[layout.MOVE_QUOTA])
        if math.isinf(quota):
            return
        moves = [
            (float(fixed.size[table]), literal)
            for table, literals in self.at.items()
            for region, literal in enumerate(literals)
            if region != fixed.start[table] and not self._kept(table, region)
        ]
        unit = least_unit(fixed.size[self.tables].tolist())
        moved = self.problem.moved_bytes
        room = max(quota, moved) - moved + sum(size for size, literal in moves if self._now[literal.index])
        self.model.add(sum(int(size / unit) * literal for size, literal in moves) <= _room(room / unit))

    def add_storage(self) -> None:
        """Adds the capacity constraint and the storage cost of each region."""
        fixed, state = self.problem.fixed, self.problem.state
        now = state.now[layout.STORED]
        unit = float(fixed.size[self.tables].sum()) / self.grid
        if unit == 0.0:
            return
        fine = least_unit(fixed.size[self.tables].tolist())
        weight = fixed.number[layout.STORAGE_WEIGHT]
        for region in range(self.regions):
            kept = {t: self._kept(t, region) for t in self.at}
            base = float(state.stored[region]) - sum(
                float(fixed.size[t]) for t in self.at if self.problem.home[t] == region and not kept[t]
            )
            parts = [(float(fixed.size[t]), self.at[t][region]) for t in self.at if not kept[t]]
            stored = base + unit * np.arange(self.grid + len(parts) + 1)
            values = weight * (stored / now - float(fixed.capacity_share[region])) ** 2
            room = max(float(fixed.capacity_allowed[region]), float(state.stored[region])) - base
            if sum(s for s, _ in parts) > room:
                self.model.add(sum(int(s / fine) * literal for s, literal in parts) <= _room(room / fine))
            self.add_table([(round(s / unit), literal) for s, literal in parts], values)

    def _kept(self, table: int, region: int) -> bool:
        fixed = self.problem.fixed
        return region in fixed.replica[fixed.replica_start[table] : fixed.replica_start[table + 1]]

    def add_table(self, parts: list[tuple[int, Any]], values: Any) -> None:
        """Adds a cost `values[n]`, where n is the sum of the integers in `parts` whose literals are true."""
        values = [self.whole(v - values[0]) for v in values]
        top = min(len(values) - 1, sum(n for n, _ in parts))
        if top <= 0:
            return
        level = self.model.new_int_var(0, top, "")
        self.model.add(level == sum(n * literal for n, literal in parts))
        cost = self.model.new_int_var(min(values), max(values), "")
        self.model.add_element(level, values[: top + 1], cost)
        self.cost.append(cost)
        now = sum(n * self._now[literal.index] for n, literal in parts)
        self._hint(level, now)
        self._hint(cost, values[now])

    def whole(self, cost: float) -> int:
        """Converts a cost to integer cost units."""
        return round(float(cost) / self.unit)


class _Found(cp_model.CpSolverSolutionCallback):
    """Collects the homes of intermediate solutions: the best one in the model may not be best in the objective."""

    def __init__(self, model: HomesModel) -> None:
        super().__init__()
        self._model = model
        self.homes: list[list[int]] = []

    def on_solution_callback(self) -> None:
        """Stores the homes of an improving solution."""
        self.homes.append(self._model.homes_of(self))


def _merged(parts: Iterable[tuple[float, Any]]) -> list[tuple[float, Any]]:
    """Adds up the amounts of equal literals."""
    amount: dict[int, float] = defaultdict(float)
    literals = {}
    for part, literal in parts:
        amount[literal.index] += part
        literals[literal.index] = literal
    return [(amount[index], literal) for index, literal in literals.items()]


def _room(units: float) -> int:
    """Rounds a right-hand side up to an integer, with a tolerance for rounding errors."""
    return math.ceil(units - 1e-6)


def least_unit(amounts: Sequence[float]) -> float:
    """Returns the unit of a constraint's coefficients: 1 for integers with a small sum (exact), else a part of the sum.

    Coefficients are rounded so that the model never excludes an allowed plan. A plan that exceeds a limit by less than
    a unit is rejected later, by the exact evaluation.
    """
    whole_sum = float(sum(amounts))
    return 1.0 if whole_sum <= _UNITS and all(a == int(a) for a in amounts) else whole_sum / _UNITS


def one_worker(seed: int, effort_s: float) -> cp_model.CpSolver:
    """Returns a solver with reproducible results for the same seed and effort (in deterministic seconds)."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed & 0x7FFFFFFF
    solver.parameters.max_deterministic_time = effort_s
    # Probing and repeated presolving take more time than the search, and the models have no symmetries.
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.max_presolve_iterations = 1
    solver.parameters.symmetry_level = 0
    # The caller handles Ctrl-C.
    solver.parameters.catch_sigint_signal = False
    return solver
