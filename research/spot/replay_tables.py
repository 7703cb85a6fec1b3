"""The tables of `mizzen spot replay`, for the terminal and for the report."""

from collections.abc import Mapping

from infra.reports.formats import NONE
from infra.reports.tables import ReportTable
from research.spot.outcome import ReplayOutcome
from research.spot.runs import CaseResult, OptimumResult
from research.spot.sweeps import SweepResult
from research.spot.windows import Mean

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


def tables(outcome: ReplayOutcome) -> list[ReportTable]:
    """Returns all tables."""
    found = [main_table(outcome)]
    if outcome.bench.workload is not None:
        found.append(latency_table(outcome))
    found += [sweep_table(one, outcome.optimum) for one in outcome.sweeps]
    return found if outcome.optimum is None else [*found, optimum_table(outcome.optimum, outcome.policies)]


def main_table(outcome: ReplayOutcome) -> ReportTable:
    """Returns the table of availability and cost, with a row for each policy."""
    rows = [[name, *_cells(_MAIN, one.means()), *_shortfall(one)] for name, one in outcome.policies.items()]
    return ReportTable(["POLICY", *_MAIN, *_SHORTFALL], rows, _NOTE)


def latency_table(outcome: ReplayOutcome) -> ReportTable:
    """Returns the table of the requests' latency, with a row for each policy."""
    assert outcome.bench.workload is not None
    rows = [[name, *_cells(_SERVED, one.latency_means())] for name, one in outcome.policies.items()]
    timeout_s = outcome.bench.workload.serving.timeout_s
    return ReportTable(
        ["POLICY", *_SERVED], rows, f"latency of all requests; a failed request counts as {timeout_s:g} s"
    )


def sweep_table(found: SweepResult, optimum: OptimumResult | None) -> ReportTable:
    """Returns the table of a sweep, with a row for each policy and value.

    If the optimum does not depend on the setting, it has a row for each reading, and each policy has its cost over it.
    """
    has_requests = any(one.latency for one in found.results.values())
    main: _Columns = {name: _MAIN[name] for name in ("AVAILABILITY %", "COST %")}
    latency: _Columns = _LATENCY if has_requests else {}
    columns = ["POLICY", found.sweep.field.upper(), *main, *_SHORTFALL, *latency]
    rows = [
        [policy, _number(value), *_cells(main, one.means()), *_shortfall(one), *_cells(latency, one.latency_means())]
        for (policy, value), one in found.results.items()
    ]
    note = _NOTE
    known = found.optimum(optimum)
    if known is not None:
        first = next(iter(known.by_reading))
        columns.append("OVER OPTIMUM")
        for row, result in zip(rows, found.results.values(), strict=True):
            row.append(_number(known.ratio(first, result), ".2f"))
        for reading in known.by_reading:
            costs = [_cell(known.mean(reading, name), 100, digits) for name, _, digits in main.values()]
            rows.append([f"optimum, {reading}", NONE, *costs, *[NONE] * (len(columns) - 2 - len(costs))])
        note += f"\ncost over that of the optimum with readiness {first} (OVER OPTIMUM)"
    return ReportTable(columns, rows, note)


def optimum_table(optimum: OptimumResult, results: Mapping[str, CaseResult]) -> ReportTable:
    """Returns the table of the optimum, and of each policy's cost over it."""
    readings = list(optimum.by_reading)
    costs = [_cell(optimum.mean(reading, "cost"), 100, 1) for reading in readings]
    rows = [["optimum", _cell(optimum.mean(readings[0], "availability"), 100, 2), *costs]]
    for name, one in results.items():
        ratios = [optimum.ratio(reading, one) for reading in readings]
        available = _cell(one.means()["availability"], 100, 2)
        rows.append([name, available, *(NONE if ratio is None else f"{ratio:.2f} times" for ratio in ratios)])
    columns = ["POLICY", "AVAILABILITY %", *(f"COST %, {reading.upper()}" for reading in readings)]
    gap = max(one.gap for plans in optimum.by_reading.values() for one in plans)
    note = (
        f"optimum: cheapest plan with at least {100 * optimum.availability:g} % availability and known capacity, % of "
        f"all on-demand; largest gap of the solver {100 * gap:.1f} %"
    )
    return ReportTable(columns, rows, note)


def _cells(columns: _Columns, found: Mapping[str, Mean]) -> list[str]:
    return [_cell(found[of], factor, digits) if of in found else NONE for of, factor, digits in columns.values()]


def _shortfall(result: CaseResult) -> list[str]:
    found = result.shortfall()
    parts = (getattr(found, of) / found.total_s if found.total_s else None for of in _SHORTFALL.values())
    return [_number(None if part is None else 100 * part, ".1f") for part in parts]


def _number(value: float | None, form: str = "g") -> str:
    return NONE if value is None else format(value, form)


def _cell(value: Mean, factor: float, digits: int) -> str:
    return f"{factor * value.mean:,.{digits}f} ± {factor * value.standard_error:,.{digits}f}"
