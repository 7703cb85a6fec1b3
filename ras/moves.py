"""The individual machines that carry out a plan."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ras.plan import ChangeCosts, RegionPlan, launch_cost
from ras.supply import NO_POOL, CellKey, PooledMachine, Supply


@dataclass(frozen=True)
class PoolMove:
    """A machine that gets another pool. Its name stays."""

    machine: str
    source: str
    """Its present pool; empty: none."""
    target: str
    """The pool that it gets; empty: none."""
    busy: bool


@dataclass(frozen=True)
class PoolLaunch:
    """Machines of one cell that a pool needs to be launched."""

    cell: CellKey
    pool: str
    count: int


@dataclass(frozen=True)
class PoolChanges:
    """What carries out a plan."""

    moves: list[PoolMove] = field(default_factory=list)
    launches: list[PoolLaunch] = field(default_factory=list)


def choose(
    plan: RegionPlan, machines: Iterable[PooledMachine], supply: Supply, prices: ChangeCosts | None = None
) -> PoolChanges:
    """Chooses machines: idle ones before those in use, and those with the smallest id first.

    Args:
        plan: the numbers of machines.
        machines: all machines of which `supply` was counted.
        supply: the cells of the plan.
        prices: the plan's costs of changes.
    """
    prices = prices or ChangeCosts()
    cells: dict[CellKey, list[PooledMachine]] = defaultdict(list)
    for machine in machines:
        cells[machine.domain, machine.type].append(machine)
    changes = PoolChanges()
    for cell, wanted in sorted(plan.targets.items()):
        launch_first = launch_cost(cell[1], prices) < prices.busy
        _choose_in_cell(cell, wanted, cells[cell], supply[cell].offered, launch_first, changes)
    return changes


def _choose_in_cell(
    cell: CellKey,
    wanted: Mapping[str, int],
    machines: list[PooledMachine],
    offered: int,
    launch_first: bool,
    changes: PoolChanges,
) -> None:
    pools: dict[str, list[PooledMachine]] = defaultdict(list)
    for machine in sorted(machines, key=lambda one: (one.busy, one.id)):
        pools[machine.pool].append(machine)
    free = pools.pop(NO_POOL, [])
    leaving = [one for pool, all_ in pools.items() for one in all_[: max(0, len(all_) - wanted.get(pool, 0))]]
    in_use, launched = [one for one in free if one.busy], [None] * offered
    spare: list[PooledMachine | None] = [*leaving, *(one for one in free if not one.busy)]
    spare += [*launched, *in_use] if launch_first else [*in_use, *launched]
    for pool, count in sorted(wanted.items()):
        missing = max(0, count - len(pools.get(pool, ())))
        taken, spare = spare[:missing], spare[missing:]
        changes.moves.extend(PoolMove(one.id, one.pool, pool, one.busy) for one in taken if one is not None)
        if launches := taken.count(None):
            changes.launches.append(PoolLaunch(cell, pool, launches))
    changes.moves.extend(PoolMove(one.id, one.pool, NO_POOL, one.busy) for one in spare if one is not None and one.pool)
