"""ras: plans of `ras` for a region of 84,000 machines of 8 GPUs, 20 pools and 30 fault domains of unequal size.

The largest fault domain has twice the mean; the others have uniform weights from 0.3 to 1.3. Each type is in 24 to 30
of the fault domains, chosen at random. Shares of types and pools are Dirichlet-distributed. Each machine is in a random
pool, or with the same probability in none, and 70 % are in use. Sizes are a share of the GPUs of each type (90 %,
95 %); every pool must survive the loss of any one fault domain.

The CPU time is that of counting the machines, the plan to a gap of 0.1 %, and the choice of machines. What pools lack
is counted from the list of machines after all moves. The second solver is GLOP, on a linear program with a constraint
for each fault domain that may be lost: its optimum, rounded up, is a lower bound of the shortfall. It also computes the
even share.
"""

import math
import resource as process_resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ortools.linear_solver import pywraplp

from bench.harness import Bench, Figure, Line, Suite
from ras import moves, solve
from ras.intents import Intent
from ras.plan import RegionPlan
from ras.supply import NO_POOL, PooledMachine, PooledType, Supply, aggregate

MACHINES, POOLS, DOMAINS, GPUS = 84_000, 20, 30, 8
_MANY = 1_000_000
_LIMIT_S = 600.0
_IN_USE = 0.7


def region(machines: int, types: int, load: float, seed: int) -> tuple[list[PooledMachine], list[Intent]]:
    """Draws a region (module docstring). `load`: the sizes of all pools, as a share of the GPUs of each type."""
    random = np.random.default_rng(seed)
    weight = random.uniform(0.3, 1.3, DOMAINS)
    weight[0] = 0.0
    weight *= (DOMAINS - 2) / weight.sum()
    weight[0] = 2.0
    while True:
        there = np.zeros((DOMAINS, types), bool)
        for type_ in range(types):
            there[random.permutation(DOMAINS)[: random.integers(24, DOMAINS + 1)], type_] = True
        if there.any(axis=1).all():
            break
    share = random.dirichlet(np.full(types, 4.0)) * there
    share /= share.sum(axis=1, keepdims=True)
    counts = np.floor(weight[:, None] / DOMAINS * machines * share).astype(int)
    counts.flat[counts.argmax()] += machines - counts.sum()  # What was lost by rounding.
    kinds = [PooledType(f"type{k}", f"gpu{k}", GPUS) for k in range(types)]
    pools = [f"pool{k:02}" for k in range(POOLS)]
    names = [*pools, NO_POOL]
    out: list[PooledMachine] = []
    for domain, type_ in np.ndindex(*counts.shape):
        count = int(counts[domain, type_])
        present, busy = random.integers(0, len(names), count), random.random(count) < _IN_USE
        out += [
            PooledMachine(f"m{len(out) + k}", f"domain{domain:02}", kinds[type_], names[present[k]], bool(busy[k]))
            for k in range(count)
        ]
    parts = random.dirichlet(np.full(POOLS, 1.5))
    total = counts.sum(axis=0) * GPUS
    intents = [
        Intent(pool, {kind.resource: int(load * total[k] * parts[at]) for k, kind in enumerate(kinds)})
        for at, pool in enumerate(pools)
    ]
    return out, intents


def planned(
    machines: Sequence[PooledMachine], intents: Sequence[Intent]
) -> tuple[float, RegionPlan, moves.PoolChanges, Supply]:
    """Returns the seconds of CPU time of a plan with its changes, both, and the supply."""
    start_s = time.process_time()
    supply = aggregate(machines)
    plan = solve.plan(supply, intents, time_s=_LIMIT_S)
    changes = moves.choose(plan, machines, supply)
    return time.process_time() - start_s, plan, changes, supply


def lacking(
    machines: Sequence[PooledMachine], changes: moves.PoolChanges, intents: Sequence[Intent]
) -> dict[tuple[str, str], int]:
    """Counts, machine by machine, what each pool and resource lacks when its worst fault domain is lost."""
    target = {move.machine: move.target for move in changes.moves}
    there: Counter[tuple[str, str]] = Counter()
    in_domain: Counter[tuple[str, str, str]] = Counter()
    for machine in machines:
        pool = target.get(machine.id, machine.pool)
        there[pool, machine.type.resource] += machine.type.units
        in_domain[pool, machine.type.resource, machine.domain] += machine.type.units
    domains = {machine.domain for machine in machines}
    return {
        (one.pool, resource): max(
            max(0, size - there[one.pool, resource] + in_domain[one.pool, resource, domain]) for domain in domains
        )
        for one in intents
        for resource, size in one.sizes.items()
    }


def least_shortfall(supply: Supply, intents: Sequence[Intent], resource: str) -> tuple[float, float]:
    """Returns lower bounds by GLOP: of the shortfall, and of the largest share that a pool then lacks."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    cells = {domain: cell for (domain, type_), cell in supply.items() if type_.resource == resource}
    shorts, share = [], solver.NumVar(0, 1, "")
    free: dict[str, list[Any]] = {domain: [] for domain in cells}
    for intent in intents:
        needed = intent.needs(resource)
        units = {domain: solver.NumVar(0, GPUS * cell.present, "") for domain, cell in cells.items()}
        short = solver.NumVar(0, needed, "")
        for domain, one in units.items():
            free[domain].append(one)
            solver.Add(sum(other for name, other in units.items() if name != domain) + short >= needed)
        solver.Add(short <= needed * share)
        shorts.append(short)
    for domain, cell in cells.items():
        solver.Add(sum(free[domain]) <= GPUS * cell.present)
    solver.Minimize(sum(shorts))
    solver.Solve()
    least = float(solver.Objective().Value())
    solver.Add(sum(shorts) <= math.ceil(least - 1e-6))
    solver.Minimize(share)
    solver.Solve()
    return least, float(solver.Objective().Value())


def run(bench: Bench) -> Iterator[Figure]:
    """Yields CPU time, gap, what pools lack and moves for each load and number of types."""
    for types, load, bar_s in ((3, 0.9, 10.0), (8, 0.9, 60.0), (3, 0.95, None)):
        case = f"{types} types at {load:.0%}"
        bench.say(f"{case}: drawing")
        machines, intents = region(MACHINES, types, load, seed=types)
        bench.say(f"{case}: planning")
        cpu_s, plan, changes, supply = planned(machines, intents)
        sizes = _sizes(machines, types)
        if bar_s is not None:
            yield _figure(f"CPU time, {case}", cpu_s / bar_s, {"cpu_s": cpu_s, "bound_s": bar_s}, sizes)
        gap = max(one.relative for one in plan.gaps)
        yield _figure(f"gap, {case}", gap, {one.resource: one.relative for one in plan.gaps}, sizes)
        yield from _lacks(case, machines, intents, changes, supply, sizes)
        busy = sum(move.busy for move in changes.moves)
        amounts = {"moves": float(len(changes.moves)), "of machines in use": float(busy)}
        yield _figure(f"moves, {case}", len(changes.moves) / len(machines), amounts, sizes)
    bench.say("1,000,000 machines: drawing")
    machines, intents = region(_MANY, 3, 0.9, seed=3)
    bench.say("1,000,000 machines: planning")
    many_s, plan, _, _ = planned(machines, intents)
    peak = process_resource.getrusage(process_resource.RUSAGE_SELF).ru_maxrss / 1024
    amounts = {"cpu_s": many_s, "gap": max(one.relative for one in plan.gaps), "peak_MiB": peak}
    yield _figure("CPU time, 1,000,000 machines", many_s / 10.0, amounts, _sizes(machines, 3))


def _lacks(
    case: str, machines: Sequence[PooledMachine], intents: Sequence[Intent], changes: moves.PoolChanges, supply: Supply,
    sizes: Mapping[str, float | str],
) -> Iterator[Figure]:  # fmt: skip
    lacks = lacking(machines, changes, intents)
    least, most_beyond = 0, -math.inf
    for resource in sorted(intents[0].sizes):
        bound, share = least_shortfall(supply, intents, resource)
        least += math.ceil(bound - 1e-6)
        for one in intents:
            most_beyond = max(most_beyond, (lacks[one.pool, resource] - share * one.needs(resource)) / GPUS)
    lack = sum(lacks.values())
    amounts = {"lacking_GPUs": float(lack), "least_GPUs": float(least), "pools": float(sum(map(bool, lacks.values())))}
    yield _figure(f"lacking after a loss, {case}", (lack - least) / max(1, least), amounts, sizes)
    if least:
        yield _figure(f"machines beyond the even share, {case}", most_beyond, amounts, sizes)


def _sizes(machines: Sequence[PooledMachine], types: int) -> Mapping[str, float | str]:
    return {"machines": len(machines), "pools": POOLS, "domains": DOMAINS, "types": types}


def _figure(line: str, ratio: float, amounts: Mapping[str, float], sizes: Mapping[str, float | str]) -> Figure:
    return Figure(SUITE.name, SUITE.line(line), ratio, amounts, 1, sizes)


SUITE = Suite(
    "ras",
    (
        Line("CPU time, 3 types at 90%", 1.0),
        Line("gap, 3 types at 90%", 0.001),
        Line("lacking after a loss, 3 types at 90%", 0.0),
        Line("moves, 3 types at 90%", None),
        Line("CPU time, 8 types at 90%", 1.0),
        Line("gap, 8 types at 90%", 0.001),
        Line("lacking after a loss, 8 types at 90%", 0.0),
        Line("moves, 8 types at 90%", None),
        Line("gap, 3 types at 95%", 0.001),
        Line("lacking after a loss, 3 types at 95%", 0.0),
        Line("machines beyond the even share, 3 types at 95%", 1.0),
        Line("moves, 3 types at 95%", None),
        Line("CPU time, 1,000,000 machines", None),
    ),
    run,
)
