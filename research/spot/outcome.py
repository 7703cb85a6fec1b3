"""The results of `mizzen spot replay`, and their form as JSON."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from research.spot.runs import CaseResult, OptimumResult, PolicyCase, ReplayBench
from research.spot.sweeps import SweepResult


@dataclass
class ReplayOutcome:
    """The results of a command that are complete."""

    traces: Path
    bench: ReplayBench
    base: PolicyCase
    """The settings of the main table; its policy has no meaning."""
    policies: dict[str, CaseResult] = field(default_factory=dict)
    sweeps: list[SweepResult] = field(default_factory=list)
    optimum: OptimumResult | None = None
    missing: list[str] = field(default_factory=list)
    """What an interrupted command did not complete."""


def document(outcome: ReplayOutcome) -> dict[str, Any]:
    """Returns the results as values of JSON."""
    bench, trace, windows = outcome.bench, outcome.bench.trace, outcome.bench.windows
    body: dict[str, Any] = {
        "traces": str(outcome.traces),
        "zones": [zone.name for zone in trace.zones],
        "gap_s": trace.gap_s,
        "ticks": trace.ticks,
        "ticks_cut": trace.cut,
        "unlimited": trace.unlimited,
        "settings": {
            **asdict(outcome.base.settings),
            "overprovision": outcome.base.extra,
            "outage_price_s": outcome.base.outage_price_s,
        },
        "windows": {**asdict(windows), "window_s": bench.length_s},
        "interrupted": bool(outcome.missing),
    }
    if bench.workload is not None:
        body["requests"] = bench.workload.described
    body["policies"] = [_result(name, one, outcome.optimum) for name, one in outcome.policies.items()]
    if outcome.sweeps:
        body["sweeps"] = [
            {
                "field": one.sweep.field,
                "cases": [
                    {"value": value, **_result(name, of, one.optimum(outcome.optimum))}
                    for (name, value), of in one.results.items()
                ],
            }
            for one in outcome.sweeps
        ]
    if outcome.optimum is not None:
        body["optimum"] = outcome.optimum.to_json()
    return body


def _result(name: str, result: CaseResult, optimum: OptimumResult | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "policy": name,
        "means": {name: asdict(mean) for name, mean in result.means().items()},
        "shortfall": result.shortfall().to_json(),
        "windows": [
            {**one.to_json(), "shortfall": short.to_json()}
            for one, short in zip(result.windows, result.shortfalls, strict=True)
        ],
    }
    if result.latency:
        body["latency"] = {
            "means": {name: asdict(mean) for name, mean in result.latency_means().items()},
            "windows": [one.to_json() for one in result.latency],
        }
    if optimum is not None:
        body["cost_over_optimum"] = {reading: optimum.ratio(reading, result) for reading in optimum.by_reading}
    return body
