"""Summary of a plan for an operator: the terms of the objective, and the storage and demand of each region."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from domain.instance import HIGH_PRIORITY, PlanScore, Violation
from tetris.columns import NONE, Columns, Floats, Ints
from tetris.problem import PlacementProblem

_REGIONS_SHOWN = 40
_MUCH = 1000.0
"""Ratios from here on are shown in scientific notation."""
_TERMS = ("read", "gpu", "storage", "total")


@dataclass(frozen=True, slots=True)
class RegionReport:
    """One region under one plan."""

    region: str
    stored_bytes: float
    capacity_bytes: float
    supply_h: dict[str, float]
    """Supply in GPU hours, by GPU type."""
    demand_h: dict[str, float]
    """GPU hours of the jobs that would run in the region, by GPU type."""
    high_demand_h: dict[str, float]
    """`demand_h` of the jobs of priority 1 and 2 only."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Comparison of a plan with the homes at the start."""

    before: PlanScore
    after: PlanScore
    regions_before: tuple[RegionReport, ...]
    regions_after: tuple[RegionReport, ...]
    tables: int
    moved_tables: int
    moved_bytes: float
    """Bytes that the plan copies between regions."""

    def document(self) -> dict[str, Any]:
        """Returns the summary as a JSON object; `of` reads it."""
        return asdict(self)

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> "Summary":
        """Reads a summary from its JSON object."""
        scores = {name: _score(body[name]) for name in ("before", "after")}
        regions = {
            name: tuple(RegionReport(**r) for r in body[name]) for name in ("regions_before", "regions_after")
        }  # fmt: skip
        return cls(**{**body, **scores, **regions})


def summarise(columns: Columns, home: Ints) -> Summary:
    """Compares the plan with the home regions `home` [T] to the start."""
    problem = PlacementProblem(columns)
    before, regions = problem.score(), _regions(columns, problem)
    problem.restart(home)
    return Summary(
        before=before,
        after=problem.score(),
        regions_before=regions,
        regions_after=_regions(columns, problem),
        tables=len(home),
        moved_tables=int((home != columns.home).sum()),
        moved_bytes=float(problem.moved_bytes),
    )


def lines(summary: Summary) -> list[str]:
    """Formats a summary as text lines: a table of the terms and, for up to 40 regions, a table of the regions.

    The regions' table shows, before and after, the stored bytes divided by the capacity, and for each GPU type the
    hours of high-priority jobs and of all jobs divided by the supply.
    """
    rows = [["", "BEFORE", "AFTER"]]
    rows += [[name, *(f"{getattr(s, name):.6g}" for s in (summary.before, summary.after))] for name in _TERMS]
    out = _aligned(rows)
    if len(summary.regions_after) <= _REGIONS_SHOWN:
        out += ["", *_aligned(_region_rows(summary.regions_before, summary.regions_after)), ""]
    moved = f"{summary.moved_tables:,} of {summary.tables:,} tables move, {summary.moved_bytes:,.0f} bytes are copied"
    return [*out, moved]


def violation_lines(summary: Summary) -> list[str]:
    """Returns a line for each constraint that the plan violates."""
    return [f"constraint violated: {v.constraint} {v.where}, by {v.by:.6g}" for v in summary.after.violations]


def _regions(columns: Columns, problem: PlacementProblem) -> tuple[RegionReport, ...]:
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


def _region_rows(before: Sequence[RegionReport], after: Sequence[RegionReport]) -> list[list[str]]:
    types = sorted({g for one in (*before, *after) for g in {**one.supply_h, **one.demand_h}})
    rows = [["REGION", "stored/capacity", *(cell for g in types for cell in (f"{g} high/supply", f"{g} all/supply"))]]
    for one, two in zip(before, after, strict=True):
        cells = [one.region, _change(one.stored_bytes, two.stored_bytes, one.capacity_bytes, "bytes")]
        for g in types:
            supply = one.supply_h.get(g, 0.0)
            cells.append(_change(one.high_demand_h.get(g, 0.0), two.high_demand_h.get(g, 0.0), supply, "h"))
            cells.append(_change(one.demand_h.get(g, 0.0), two.demand_h.get(g, 0.0), supply, "h"))
        rows.append(cells)
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _change(before: float, after: float, whole: float, unit: str) -> str:
    """Formats two amounts as ratios to `whole`; if `whole` is 0, as amounts in their unit."""
    if not whole:
        return f"{before:.4g} -> {after:.4g} {unit} of 0" if before or after else "-"
    return f"{_part(before / whole)} -> {_part(after / whole)}"


def _part(part: float) -> str:
    return f"{part:.2f}" if part < _MUCH else f"{part:.0e}"


def _demand(columns: Columns, region: Ints, flows: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> Floats:
    demand = np.zeros_like(columns.supply_h)
    np.add.at(demand, (columns.gpu_type[flows], region[flows]), columns.gpu_h[flows])
    return demand


def _by_type(columns: Columns, hours: Floats) -> dict[str, float]:
    return {name: float(h) for name, h in zip(columns.gpu_types, hours, strict=True) if h > 0}


def _score(body: Mapping[str, Any]) -> PlanScore:
    return PlanScore(**{**body, "violations": tuple(Violation(**v) for v in body["violations"])})
