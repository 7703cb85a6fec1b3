"""Machines that a pool has and does not need, which then any pool and any tenant may get."""

from collections.abc import Sequence
from dataclasses import replace

from ras.intents import Intent
from ras.plan import RegionPlan, outcome
from ras.supply import CellKey


def without_surplus(plan: RegionPlan, intents: Sequence[Intent]) -> RegionPlan:
    """Returns the plan in which pools leave, or do not get, machines that they do not need.

    A machine is left only if the pool then lacks nothing, so pools that lack something leave none. Machines of the
    fault domains with the most of the pool are left first. Machines that were launched for the pool stay. Without the
    surplus the solver's bounds of the cost are those of the plan before.
    """
    targets = {cell: dict(pools) for cell, pools in plan.targets.items()}
    for intent in intents:
        for resource in sorted({type_.resource for _, type_ in targets}):
            units: dict[str, int] = {}
            for (domain, type_), pools in targets.items():
                if type_.resource == resource:
                    units[domain] = units.get(domain, 0) + type_.units * pools.get(intent.pool, 0)
            cells = [cell for cell in targets if cell[1].resource == resource and not cell[1].launched_for]
            for cell in sorted(cells, key=lambda one: (-units[one[0]], one)):
                _leave(targets, intent, cell)
    outcomes = [
        outcome(next(one for one in intents if one.pool == was.pool), was.resource, targets) for was in plan.outcomes
    ]
    return replace(plan, targets=targets, outcomes=outcomes)


def _leave(targets: dict[CellKey, dict[str, int]], intent: Intent, cell: CellKey) -> None:
    """Leaves as many machines of a cell as the pool does not need, found by bisection."""
    resource, count = cell[1].resource, targets[cell].get(intent.pool, 0)
    least, most = 0, count
    while least < most:
        half = (least + most + 1) // 2
        targets[cell][intent.pool] = count - half
        found = outcome(intent, resource, targets)
        least, most = (half, most) if found.after_loss >= found.needed else (least, half - 1)
    if count:
        targets[cell][intent.pool] = count - least
