"""The tables of `mizzen spot replay`, for the terminal and for the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from research.spot.runs import CaseResult, OptimumResult
from research.spot.sweeps import SweepResult
from research.spot.windows import Mean

NONE = "-"
_MAIN = {
    "AVAILABILITY %": ("availability", 100, 2),
    "COST %": ("cost", 100, 1),
    "ON-DEMAND %": ("on_demand_share", 100, 1),
    "LAUNCHES": ("launches", 1, 1),
    "PREEMPTIONS": ("preemptions", 1, 1),
}
_LATENCY = {
    "P50 S": ("p50_s", 1, 1),
    "P90 S": ("p90_s", 1, 1),
    "P99 S": ("p99_s", 1, 1),
    "FAILED %": ("failed_share", 100, 2),
}
_SERVED = {"REQUESTS": ("requests", 1, 0), **_LATENCY, "INTERRUPTED": ("interrupted", 1, 1)}
_SHORTFALL = {"START %": "first_s", "USED FELL %": "used_fell_s", "ALL FELL %": "all_fell_s"}
_NOTE = """means over windows ± standard errors; cost relative to all on-demand
share of the time with too few replicas that is within a cold start after the start of a window (START), after all used
zones fell together (USED FELL) and after all zones fell together (ALL FELL, part of USED FELL)"""
_Columns = Mapping[str, tuple[str, int, int]]


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    rows: Sequence[Sequence[str]]
    """The rows; the first one is the header."""
    note: str

    def __str__(self) -> str:
        """Returns the table with aligned columns, for a terminal."""
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = ["  ".join(text.ljust(n) for text, n in zip(row, widths, strict=True)).rstrip() for row in self.rows]
        return "\n".join([*lines, self.note])


def main_table(results: Mapping[str, CaseResult]) -> Table:
    """Returns the table of availability and cost, with a row for each policy."""
    rows = [[name, *_cells(_MAIN, one.means()), *_shortfall(one)] for name, one in results.items()]
    return Table([["POLICY", *_MAIN, *_SHORTFALL], *rows], _NOTE)


def latency_table(results: Mapping[str, CaseResult], timeout_s: float) -> Table:
    """Returns the table of the requests' latency, with a row for each policy."""
    rows = [[name, *_cells(_SERVED, one.latency_means())] for name, one in results.items()]
    note = f"latency of all requests; a failed request counts as {timeout_s:g} s"
    return Table([["POLICY", *_SERVED], *rows], note)


def sweep_table(found: SweepResult, optimum: OptimumResult | None) -> Table:
    """Returns the table of a sweep, with a row for each policy and value.

    If the optimum does not depend on the setting, it has a row for each reading, and each policy has its cost over it.
    """
    has_requests = any(one.latency for one in found.results.values())
    main: _Columns = {name: _MAIN[name] for name in ("AVAILABILITY %", "COST %")}
    latency: _Columns = _LATENCY if has_requests else {}
    header = ["POLICY", found.sweep.field.upper(), *main, *_SHORTFALL, *latency]
    rows = [
        [policy, _number(value), *_cells(main, one.means()), *_shortfall(one), *_cells(latency, one.latency_means())]
        for (policy, value), one in found.results.items()
    ]
    note = _NOTE
    known = found.optimum(optimum)
    if known is not None:
        first = next(iter(known.by_reading))
        header.append("OVER OPTIMUM")
        for row, result in zip(rows, found.results.values(), strict=True):
            row.append(_number(known.ratio(first, result), ".2f"))
        for reading in known.by_reading:
            costs = [_cell(known.mean(reading, name), 100, digits) for name, _, digits in main.values()]
            rows.append([f"optimum, {reading}", NONE, *costs, *[NONE] * (len(header) - 2 - len(costs))])
        note += f"\ncost over that of the optimum with readiness {first} (OVER OPTIMUM)"
    return Table([header, *rows], note)


def optimum_table(optimum: OptimumResult, results: Mapping[str, CaseResult]) -> Table:
    """Returns the table of the optimum, and of each policy's cost over it."""
    readings = list(optimum.by_reading)
    costs = [_cell(optimum.mean(reading, "cost"), 100, 1) for reading in readings]
    rows = [["optimum", _cell(optimum.mean(readings[0], "availability"), 100, 2), *costs]]
    for name, one in results.items():
        ratios = [optimum.ratio(reading, one) for reading in readings]
        available = _cell(one.means()["availability"], 100, 2)
        rows.append([name, available, *(NONE if ratio is None else f"{ratio:.2f} times" for ratio in ratios)])
    header = ["POLICY", "AVAILABILITY %", *(f"COST %, {reading.upper()}" for reading in readings)]
    gap = max(one.gap for plans in optimum.by_reading.values() for one in plans)
    note = (
        f"optimum: cheapest plan with at least {100 * optimum.availability:g} % availability and known capacity, % of "
        f"all on-demand; largest gap of the solver {100 * gap:.1f} %"
    )
    return Table([header, *rows], note)


def _cells(columns: _Columns, found: Mapping[str, Mean]) -> list[str]:
    return [
        _cell(found[field], factor, digits) if field in found else NONE for field, factor, digits in columns.values()
    ]


def _shortfall(result: CaseResult) -> list[str]:
    found = result.shortfall()
    return [_number(100 * getattr(found, field) / found.total_s if found.total_s else None, ".1f")
            for field in _SHORTFALL.values()]  # fmt: skip


def _number(value: float | None, form: str = "g") -> str:
    return NONE if value is None else format(value, form)


def _cell(value: Mean, factor: float, digits: int) -> str:
    return f"{factor * value.mean:,.{digits}f} ± {factor * value.standard_error:,.{digits}f}"
