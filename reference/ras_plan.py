"""The plain counterpart of `ras.solve`: tries every assignment of individual machines to pools.

The even share of a shortfall, which is a linear program over fractions of machines, has a constraint for each fault
domain that may be lost.
"""

from collections.abc import Sequence
from itertools import product
from math import floor, inf

import numpy as np
from numpy.typing import NDArray
from ortools.linear_solver import pywraplp

from ras.intents import Intent
from ras.plan import ChangeCosts
from ras.supply import NO_POOL, OfferedMachines, PooledMachine

Bools = NDArray[np.bool_]
Longs = NDArray[np.int64]


def least(
    machines: Sequence[PooledMachine], offers: Sequence[OfferedMachines], intents: Sequence[Intent], prices: ChangeCosts
) -> tuple[int, int]:
    """Returns the least shortfall in units, and the least cost of a plan with it. All machines have one resource.

    It takes (pools + 1) to the power of the machines, present and offered.
    """
    every = [*machines, *(PooledMachine("", one.domain, one.type) for one in offers for _ in range(one.count))]
    present = np.arange(len(every)) < len(machines)
    pools = [NO_POOL, *(intent.pool for intent in intents)]
    plans: Longs = np.array(list(product(range(len(pools)), repeat=len(every))), np.int64)
    allowed = np.ones(len(plans), bool)
    cost = np.zeros(len(plans), np.int64)
    for at, machine in enumerate(every):
        has = pools.index(machine.pool) if machine.pool in pools else -1
        for to, intent in enumerate(intents, 1):
            if to != has and not intent.may_get(machine.type):
                allowed &= plans[:, at] != to
        launch = prices.launch + round(machine.type.usd_per_h * prices.launched_usd_per_h)
        price = (prices.busy if machine.busy else prices.idle) if present[at] else launch
        cost += price * (plans[:, at] != has)
    shorts = np.stack([_lacks(plans == to, every, intent) for to, intent in enumerate(intents, 1)], axis=1)
    total = shorts.sum(axis=1)
    fewest = int(total[allowed].min())
    allowed &= total == fewest
    if fewest:
        resource = every[0].type.resource
        needs = np.array([one.needs(resource) for one in intents])
        share = _even_share(every, intents, resource, fewest)
        more = max(machine.type.units for machine in every)
        while True:
            most = [floor(share * need + more + 1e-6) for need in needs]
            if (even := allowed & (shorts <= most).all(axis=1)).any():
                allowed = even
                break
            more *= 2
    return fewest, int(cost[allowed].min())


def _lacks(mine: Bools, machines: Sequence[PooledMachine], intent: Intent) -> Longs:
    """Returns what the pool lacks under each plan: [plans]. `mine`: [plans, machines], the machines of the pool."""
    resource = machines[0].type.resource
    needed, most = intent.needs(resource), intent.most_of_a_domain(resource)
    domains = sorted({machine.domain for machine in machines})
    units = np.array([machine.type.units for machine in machines], np.int64)
    places = np.array([domains.index(machine.domain) for machine in machines])
    counted = np.stack(
        [(mine[:, places == at] * units[places == at]).sum(axis=1) for at in range(len(domains))], axis=1
    )
    if most != inf:
        counted = np.minimum(counted, int(most))
    left = counted.sum(axis=1)
    if intent.survives_loss:
        left = np.min([left - counted[:, at] for at in range(len(domains))], axis=0)
    lacks: Longs = np.maximum(0, needed - left)
    return lacks


def _even_share(machines: Sequence[PooledMachine], intents: Sequence[Intent], resource: str, total: int) -> float:
    """Returns the least largest share that a pool lacks if all pools lack `total` and machines are divisible."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    share = solver.NumVar(0, 1, "")
    domains = sorted({machine.domain for machine in machines})
    parts = [[solver.NumVar(0, 1, "") for _ in intents] for _ in machines]
    for part in parts:
        solver.Add(sum(part) <= 1)
    shorts = []
    for to, intent in enumerate(intents):
        needed = intent.needs(resource)
        short = solver.NumVar(0, needed, "")
        shorts.append(short)
        solver.Add(short <= share * needed)
        counted = {domain: solver.NumVar(0, min(intent.most_of_a_domain(resource), 1e9), "") for domain in domains}
        for domain, one in counted.items():
            here = [m.type.units * part[to] for m, part in zip(machines, parts, strict=True) if m.domain == domain]
            solver.Add(one <= sum(here))
        for lost in domains if intent.survives_loss else [""]:
            solver.Add(sum(one for domain, one in counted.items() if domain != lost) + short >= needed)
        for machine, part in zip(machines, parts, strict=True):
            if machine.pool != intent.pool and not intent.may_get(machine.type):
                part[to].SetUb(0)
    solver.Add(sum(shorts) <= total)
    solver.Minimize(share)
    assert solver.Solve() == pywraplp.Solver.OPTIMAL
    return float(share.solution_value())
