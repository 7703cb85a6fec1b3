"""Builds a scenario from files: fleet, trace, random draws, and the span of the trace."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from infra.errors import ConfigurationError
from research.traces.errors import TraceError
from research.traces.fleet import SimulatedFleet, load_simulated_fleet
from research.traces.rows import BadRow, TraceRow, refuse_bad
from research.traces.trace_readers import read_trace
from research.traces.workloads import RowCompletion, scaled, sliced, started_at_s, tenants_of
from simulation.run import EVERYTHING, Scenario, Span
from simulation.settings import override

ONCE = {0: 1.0}
_PART = re.compile(r"(?:(?P<gpus>[0-9]{1,6})\+=)?(?P<times>[0-9.]+(?:e[0-9]+)?)")


def parse_scale(text: str) -> dict[int, float]:
    """Parses a scale such as `2` or `0.5,8+=4`: smallest GPU count of a gang to the factor for its arrivals.

    Raises:
        ConfigurationError: the text is malformed, or a factor is not above 0.
    """
    out = dict(ONCE)
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        try:
            times = float(match["times"]) if match else 0.0
        except ValueError:
            times = 0.0
        if match is None or not 0 < times < inf:
            right = "must be a number above 0, optionally with other numbers for larger gangs, such as 0.5,8+=4"
            raise ConfigurationError(f"--scale {text}: {right}")
        out[int(match["gpus"] or 0)] = times
    return out


def load_rows(source: str, fleet: SimulatedFleet, skip_bad: bool) -> tuple[list[TraceRow], list[BadRow]]:
    """Returns a trace's valid rows and its bad rows. A row with an unknown tenant or GPU type is bad too.

    Raises:
        TraceError: the trace cannot be read, has no valid rows, or has bad rows and `skip_bad` is False.
    """
    trace = read_trace(source, fleet.simulation.gpus_per_machine)
    bad = list(trace.bad)
    bad += RowCompletion(fleet, fleet.simulation, 0).unknown_types(trace.rows)
    bad += tenants_of(fleet, trace.rows)[1]
    bad.sort(key=lambda row: (row.line, row.column, row.value))
    if not skip_bad:
        refuse_bad(source, bad)
    lines = {row.line for row in bad}
    rows = [row for row in trace.rows if row.line not in lines]
    if not rows:
        raise TraceError(f"trace {source}: has no valid rows" + (f", and {len(bad)} bad rows" if bad else ""))
    return rows, bad


def from_trace(
    fleet_path: Path,
    source: str,
    *,
    scale: Mapping[int, float] = ONCE,
    skip_bad: bool = False,
    params: Sequence[str] = (),
    **more: Any,
) -> Scenario:
    """Returns the scenario of a fleet file and a trace; `more` is passed on to `scenario_of`.

    Raises:
        ConfigurationError: a file or an argument is invalid.
    """
    fleet = load_simulated_fleet(fleet_path)
    fleet = fleet.model_copy(update={"simulation": override(fleet.simulation, tuple(params))})
    rows, bad = load_rows(source, fleet, skip_bad)
    return scenario_of(fleet, rows, scale=scale, bad=bad, **more)


def scenario_of(
    fleet: SimulatedFleet,
    rows: Sequence[TraceRow],
    *,
    seed: int = 0,
    scale: Mapping[int, float] = ONCE,
    span: Span = EVERYTHING,
    measured: Span = EVERYTHING,
    until_s: float = inf,
    bad: Sequence[BadRow] = (),
) -> Scenario:
    """Returns the scenario of a fleet and the valid rows of a trace.

    `span`, `measured` and `until_s` are relative to the trace's first submission; the simulation's clock is relative to
    the start of `span`. Quotas by rule are computed from the whole trace, also if only a span of it is run.
    """
    settings = fleet.simulation
    first_s = started_at_s(rows)
    zero_s = first_s + span.from_s
    completion = RowCompletion(fleet, settings, seed)
    tenants = tenants_of(fleet, rows)[0]
    copies = scaled(rows, scale, seed, settings.copy_days, settings.copy_jitter_s)
    return Scenario(
        fleet.states(),
        tenants,
        [
            completion.workload(row, at_s, zero_s, tenants[row.tenant])
            for row, at_s in sliced(copies, zero_s, first_s + span.to_s)
        ],
        settings,
        seed,
        until_s - span.from_s,
        measured.from_s - span.from_s,
        measured.to_s - span.from_s,
        span.from_s,
        sources=fleet.sources,
        says={
            "scale": {f"{gpus}+": times for gpus, times in scale.items()},
            "trace_rows": len(rows),
            "bad_rows": [asdict(one) for one in bad],
        },
    )
