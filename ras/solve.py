"""Chooses how many machines of each fault domain and type each pool has: one integer program for each resource.

Two objectives: the shortfall of all pools, and then the cost of changes. What pools lack is spread evenly (`_spread`).
Resources share no machines, so each is a program of its own, whose size does not depend on the number of machines.

Where all machines have the same number of units, only one number of each pool needs a search (`_minimise_whole`). A
search for all numbers, with 84,000 machines, 20 pools, 30 fault domains and 3 resources at 90 % of the supply, to a gap
of 0.1 %: HiGHS 2.3 s of CPU time; SCIP 23 s, with a shortfall of 2 units where none is needed; CP-SAT no plan in 100 s.
"""

import datetime
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import floor, gcd, inf
from typing import Any

from ortools.math_opt.python import mathopt

from ras.intents import Intent
from ras.plan import ChangeCosts, Gap, RegionPlan, cost, launch_cost, outcome
from ras.supply import NO_POOL, CellKey, Supply

GAP = 0.001
"""Relative gap to which plans are proved by default."""
_ROUNDING = 1e-6


class NotSolved(Exception):
    """The solver ended without a plan, or reports an inconsistent program."""


@dataclass
class _Program:
    """The integer program of one resource."""

    model: Any
    counts: dict[tuple[CellKey, str], Any] = field(default_factory=dict)
    """Machines by cell and pool."""
    lacks: dict[str, "_Lack"] = field(default_factory=dict)
    """By pool."""
    caps: list[Any] = field(default_factory=list)
    """For each pool, how many units of one fault domain count at most, divided by its step."""
    cost: Any = 0.0

    @property
    def short(self) -> Any:
        """The lacking units of all pools."""
        return sum((one.short for one in self.lacks.values()), start=mathopt.LinearSum([]))


class _Lack:
    """What a pool lacks. It has multiples of `step` units, so of the first step that it lacks only a part may count.

    The first step and the others are two variables, so that the linear relaxation is nearer to a plan.
    """

    def __init__(self, model: Any, needed: int, step: int) -> None:
        self._first, self._more = model.add_variable(lb=0.0), model.add_variable(lb=0.0)
        self._step, self._part = step, (needed - 1) % step + 1
        self.needed = needed
        self.at_most(needed)

    @property
    def short(self) -> Any:
        """The lacking units."""
        return self._part * self._first + self._step * self._more

    @property
    def filled(self) -> Any:
        """What together with the pool's units must be at least `needed`, rounded up to steps."""
        return self._step * (self._first + self._more) - (self._step - self._part)

    def at_most(self, units: int) -> None:
        """Limits what the pool lacks."""
        steps = (units - self._part) // self._step + 1
        self._first.upper_bound, self._more.upper_bound = min(1, steps), max(0, steps - 1)

    def value(self, values: Mapping[Any, float]) -> float:
        """Returns the lacking units of a plan."""
        return self._part * values[self._first] + self._step * values[self._more]


def plan(
    supply: Supply,
    intents: Sequence[Intent],
    prices: ChangeCosts | None = None,
    *,
    gap: float = GAP,
    time_s: float = 60.0,
    solver: mathopt.SolverType = mathopt.SolverType.HIGHS,
) -> RegionPlan:
    """Returns a plan for all pools.

    Machines of pools without an intent leave their pool. Machines that no pool needs stay where they are.

    Args:
        supply: all machines and offers of the region.
        intents: the pools, each once.
        prices: costs of changes.
        gap: relative gap at which the search for a cheaper plan ends.
        time_s: limit of each of the up to three searches for each resource.
        solver: the solver of the integer programs.

    Raises:
        NotSolved: a solver found no plan within its time.
    """
    prices = prices or ChangeCosts()
    targets: dict[CellKey, dict[str, int]] = {}
    gaps, outcomes = [], []
    for resource in sorted({r for one in intents for r in one.sizes} | {type_.resource for _, type_ in supply}):
        cells = {key: cell for key, cell in supply.items() if key[1].resource == resource}
        search = _Search(cells, intents, resource, prices, solver, gap, time_s)
        gaps.append(search.run())
        targets |= search.targets
        outcomes += [outcome(one, resource, search.targets) for one in intents if one.needs(resource)]
    return RegionPlan(targets, sorted(outcomes, key=lambda one: (one.resource, one.pool)), gaps)


class _Search:
    """The searches for one resource."""

    def __init__(
        self, cells: Supply, intents: Sequence[Intent], resource: str, prices: ChangeCosts,
        solver: mathopt.SolverType, gap: float, time_s: float,
    ) -> None:  # fmt: skip
        self._cells, self._intents, self._resource, self._prices = cells, intents, resource, prices
        self._solver, self._gap, self._time_s = solver, gap, time_s
        units = {type_.units for _, type_ in cells}
        self._alike = len(units) == 1 and all(_is_whole(one.most_of_a_domain(resource), max(units)) for one in intents)
        """Whether all machines are the same to all pools (`_minimise_whole`)."""
        self._program = _program(cells, intents, resource, prices, gcd(*units) or 1)
        self.targets: dict[CellKey, dict[str, int]] = {}
        self._values: dict[Any, float] = {}
        """The variables' values in the plan of the newest search."""

    def run(self) -> Gap:
        """Searches; `targets` has the numbers of machines afterwards. Returns the proof."""
        program = self._program
        total, least_short = 0, self._minimise_divisible(program, program.short)
        least_cost = self._without_shortfall() if least_short < _ROUNDING else None
        if least_cost is None:
            least_short = self._minimise_whole(program.short, 0.0)
            total = round(sum(one.value(self._values) for one in program.lacks.values()))
            program.model.add_linear_constraint(program.short <= total)
            least_cost = self._spread(total)
        for (cell, pool), variable in program.counts.items():
            self.targets.setdefault(cell, {})[pool] = round(self._values[variable])
        for cell in self._cells:
            self.targets.setdefault(cell, {})
        spent = cost(self._cells, self.targets, self._prices, self._resource)
        return Gap(self._resource, total, round(least_short + 0.499), spent, min(least_cost, spent))

    def _spread(self, total: int) -> float:
        """Searches for the cheapest plan that spreads the shortfall evenly; returns the bound of its cost.

        Even: if machines were divisible, no pool would have to lack more than a share of what it needs. A pool may lack
        this share and one machine, or more machines (2, 4, ...) where no plan has fewer.
        """
        even = _program(self._cells, self._intents, self._resource, self._prices, 1)  # Parts of machines count, too.
        worst = even.model.add_variable(lb=0.0, ub=1.0)
        for lack in even.lacks.values():
            even.model.add_linear_constraint(lack.short <= lack.needed * worst)
        even.model.add_linear_constraint(even.short <= total)
        share = self._minimise_divisible(even, worst)
        more = machine = max((type_.units for _, type_ in self._cells), default=1)
        while True:
            for lack in self._program.lacks.values():
                lack.at_most(min(lack.needed, floor(share * lack.needed + more + _ROUNDING)))
            try:
                return self._minimise_whole(self._program.cost, self._gap)
            except NotSolved:
                if more > total + machine:
                    raise
                more *= 2

    def _without_shortfall(self) -> float | None:
        """Searches for the cheapest plan without a shortfall; returns the bound of its cost; None: none was found."""
        lacks = self._program.lacks.values()
        for lack in lacks:
            lack.at_most(0)
        try:
            return self._minimise_whole(self._program.cost, self._gap)
        except NotSolved:
            for lack in lacks:
                lack.at_most(lack.needed)
            return None

    def _minimise_divisible(self, program: _Program, objective: Any) -> float:
        """Returns the least value of an objective if machines were divisible."""
        with _divisible(program.counts.values()), _divisible(program.caps):
            return self._minimise(objective, 0.0, program)

    def _minimise_whole(self, objective: Any, gap: float) -> float:
        """Minimises as `_minimise`.

        If all machines have the same number of units, the program with given caps is a flow of machines through a
        network. Optima of a flow are whole, so only the caps, one for each pool, need a search. A limit of the sum of
        all shortfalls may be in the way; then all numbers of machines are searched.
        """
        if not self._alike:
            return self._minimise(objective, gap)
        counts = self._program.counts.values()
        with _divisible(counts):
            bound = self._minimise(objective, gap)
        if all(abs(self._values[one] - round(self._values[one])) < _ROUNDING for one in counts):
            return bound
        return self._minimise(objective, gap)

    def _minimise(self, objective: Any, gap: float, program: _Program | None = None) -> float:
        """Minimises. Returns the proved lower bound; sets `_values`."""
        model = (program or self._program).model
        model.minimize(objective)
        found = self._solve(model, gap)
        if not found.has_primal_feasible_solution():
            raise NotSolved(
                f"{self._resource}: no plan within {self._time_s:g} s of {self._solver.name}: {found.termination}"
            )
        self._values = found.variable_values()
        return float(found.best_objective_bound())

    def _solve(self, model: Any, gap: float) -> Any:
        for seed in range(1, 4):
            params = mathopt.SolveParameters(
                time_limit=datetime.timedelta(seconds=self._time_s),
                relative_gap_tolerance=gap,
                random_seed=seed,
                threads=None if self._solver is mathopt.SolverType.HIGHS else 1,  # HiGHS uses one by default.
            )
            # With some seeds HiGHS fails on one small program in thousands; OR-Tools 9.15 raises an AttributeError.
            with suppress(AttributeError, RuntimeError):
                return mathopt.solve(model, self._solver, params=params)
        raise NotSolved(f"{self._resource}: {self._solver.name} has failed")


@contextmanager
def _divisible(variables: Collection[Any]) -> Iterator[None]:
    """Lets integer variables have any value until the end of the block."""
    whole = [one for one in variables if one.integer]
    for one in whole:
        one.integer = False
    try:
        yield
    finally:
        for one in whole:
            one.integer = True


def _program(cells: Supply, intents: Sequence[Intent], resource: str, prices: ChangeCosts, step: int) -> _Program:
    """Returns the program. `step`: all machines have a multiple of it as units."""
    model = mathopt.Model()
    program = _Program(model)
    units: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for key, cell in cells.items():
        domain, type_ = key
        here = []
        for intent in intents:
            most = cell.present + cell.offered if intent.may_get(type_) else cell.held(intent.pool)
            if not most or not (intent.needs(resource) or cell.held(intent.pool)):
                continue
            count = model.add_integer_variable(lb=cell.held(intent.pool) if type_.launched_for else 0, ub=most)
            program.counts[key, intent.pool] = count
            units[intent.pool, domain].append(type_.units * count)
            here.append(count)
            program.cost += _leaving(model, count, cell.idle[intent.pool], cell.busy[intent.pool], prices)
        pools = {one.pool for one in intents}
        for pool in {*cell.idle, *cell.busy} - pools - {NO_POOL}:
            program.cost += cell.idle[pool] * prices.idle + cell.busy[pool] * prices.busy
        sources = [
            (cell.idle[NO_POOL], prices.idle),
            (cell.busy[NO_POOL], prices.busy),
            (cell.offered, launch_cost(type_, prices)),
        ]
        arriving = [model.add_variable(lb=0.0, ub=count) for count, _ in sources]
        program.cost += sum(price * one for one, (_, price) in zip(arriving, sources, strict=True))
        owned = cell.present - cell.held(NO_POOL)
        model.add_linear_constraint(sum(here, start=mathopt.LinearSum([])) <= owned + sum(arriving))
    for intent in intents:
        if intent.needs(resource):
            _count(program, intent, resource, units, step)
    return program


def _leaving(model: Any, count: Any, idle: int, busy: int, prices: ChangeCosts) -> Any:
    """Adds the machines that leave a pool, idle ones first, and returns their cost."""
    if not idle + busy:
        return 0.0
    gone_idle, gone_busy = model.add_variable(lb=0.0, ub=idle), model.add_variable(lb=0.0, ub=busy)
    model.add_linear_constraint(count + gone_idle + gone_busy >= idle + busy)
    return prices.idle * gone_idle + prices.busy * gone_busy


def _count(
    program: _Program, intent: Intent, resource: str, units: dict[tuple[str, str], list[Any]], step: int
) -> None:
    """Adds what counts of each fault domain, and what the pool lacks.

    Of each fault domain at most `cap` units count. If the counted units minus `cap` suffice, any fault domain may be
    lost; and the best `cap` is that of the domain with most of the pool, so a multiple of `step`.
    """
    model, needed, most = program.model, intent.needs(resource), intent.most_of_a_domain(resource)
    step = step if _is_whole(most, step) else 1
    lack = program.lacks[intent.pool] = _Lack(model, needed, step)
    program.caps.append(steps := model.add_integer_variable(lb=0.0, ub=most / step))
    counted = []
    for (pool, _), here in units.items():
        if pool == intent.pool:
            one = model.add_variable(lb=0.0)
            model.add_linear_constraint(one <= step * steps)
            model.add_linear_constraint(one <= sum(here))
            counted.append(one)
    left = sum(counted, start=mathopt.LinearSum([])) - (step * steps if intent.survives_loss else 0.0)
    model.add_linear_constraint(left + lack.filled >= needed)


def _is_whole(most: float, step: int) -> bool:
    return most == inf or most % step == 0
