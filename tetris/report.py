"""What an operator looks at before anything moves: each region's storage and demand over supply, before and after."""

from dataclasses import dataclass

import numpy as np

from domain.instance import HIGH_PRIORITY
from tetris.columns import NONE, Columns, Floats, Ints
from tetris.problem import Problem


@dataclass(frozen=True, slots=True)
class RegionReport:
    """One region under one plan."""

    region: str
    stored_bytes: float
    capacity_bytes: float
    supply_h: dict[str, float]
    """GPU type to hours."""
    demand_h: dict[str, float]
    """Of the jobs that would run there, by the GPU type that they need."""
    high_demand_h: dict[str, float]
    """The same of priority 1 and 2."""


def report(columns: Columns, home: Ints) -> tuple[RegionReport, ...]:
    """Each region under the plan [T], in the order of their names."""
    problem = Problem(columns, home)
    region = problem.state.region
    flows = (region != NONE) & (columns.gpu_type != NONE)
    demand = _demand(columns, region, flows)
    high = _demand(columns, region, flows & (columns.priority <= HIGH_PRIORITY))
    stored = problem.state.stored
    return tuple(
        RegionReport(
            name,
            float(stored[index]),
            float(columns.capacity_bytes[index]),
            *(_by_type(columns, hours[:, index]) for hours in (columns.supply_h, demand, high)),
        )
        for index, name in enumerate(columns.regions)
    )


def lines(before: tuple[RegionReport, ...], after: tuple[RegionReport, ...]) -> list[str]:
    """A table: storage over capacity, and by GPU type high-priority and all demand over supply, before and after."""
    types = sorted({g for one in (*before, *after) for g in {**one.supply_h, **one.demand_h}})
    rows = [["REGION", "STORAGE", *(cell for g in types for cell in (f"{g} HIGH", f"{g} ALL"))]]
    for one, two in zip(before, after, strict=True):
        cells = [one.region, _change(one.stored_bytes, two.stored_bytes, one.capacity_bytes)]
        for g in types:
            supply = one.supply_h.get(g, 0.0)
            cells.append(_change(one.high_demand_h.get(g, 0.0), two.high_demand_h.get(g, 0.0), supply))
            cells.append(_change(one.demand_h.get(g, 0.0), two.demand_h.get(g, 0.0), supply))
        rows.append(cells)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _change(before: float, after: float, whole: float) -> str:
    """Parts of what is there; demand where there is no supply is told as such."""
    if not whole:
        return "-" if not before and not after else f"{_none(before)} > {_none(after)}"
    return f"{before / whole:.2f} > {after / whole:.2f}"


def _none(amount: float) -> str:
    return "none there" if amount else "0"


def _demand(columns: Columns, region: Ints, flows: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Floats:
    demand = np.zeros_like(columns.supply_h)
    np.add.at(demand, (columns.gpu_type[flows], region[flows]), columns.gpu_h[flows])
    return demand


def _by_type(columns: Columns, hours: Floats) -> dict[str, float]:
    return {name: float(h) for name, h in zip(columns.gpu_types, hours, strict=True) if h > 0}
