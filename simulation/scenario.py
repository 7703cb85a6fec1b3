"""From files to a scenario: the fleet, the trace, what is drawn, and the span that is looked at."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from infra.errors import ConfigurationError
from simulation.errors import TraceError
from simulation.fleet import SimulatedFleet, load_simulated_fleet
from simulation.run import Scenario
from simulation.settings import override
from simulation.trace.reading import read_trace
from simulation.trace.rows import BadRow, TraceRow, refuse_bad
from simulation.workloads import Completion, scaled, sliced, started_at_s, tenants_of


@dataclass(frozen=True)
class Span:
    """From and to, in seconds on the simulation's clock."""

    from_s: float = 0.0
    to_s: float = inf

    def __post_init__(self) -> None:
        if not 0 <= self.from_s < self.to_s:
            raise ConfigurationError(f"span {self.from_s:g}..{self.to_s:g}: must be from 0 on, and to later than from")


EVERYTHING = Span()
ONCE = {0: 1.0}
_PART = re.compile(r"(?:(?P<gpus>[0-9]{1,6})\+=)?(?P<times>[0-9.]+(?:e[0-9]+)?)")


def parse_scale(text: str) -> dict[int, float]:
    """By how much arrivals are multiplied, by the least number of a gang's GPUs: `2`, or `0.5,8+=4`.

    Raises:
        ConfigurationError: it is none.
    """
    out = dict(ONCE)
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        try:
            times = float(match["times"]) if match else 0.0
        except ValueError:
            times = 0.0
        if match is None or not 0 < times < inf:
            right = "must be a number above 0, or one for all and others for large gangs, such as 0.5,8+=4"
            raise ConfigurationError(f"--scale {text}: {right}")
        out[int(match["gpus"] or 0)] = times
    return out


def load_rows(source: str, fleet: SimulatedFleet, skip_bad: bool) -> tuple[list[TraceRow], list[BadRow]]:
    """A trace's good rows and, where they may be skipped, its bad ones: also those of tenants or types that are none.

    Raises:
        TraceError: the trace cannot be read, has no good row, or has bad ones that may not be skipped.
    """
    trace = read_trace(source, fleet.simulation.gpus_per_machine)
    bad = list(trace.bad)
    bad += Completion(fleet, fleet.simulation, 0).unknown_types(trace.rows)
    bad += tenants_of(fleet, trace.rows)[1]
    bad.sort(key=lambda row: (row.line, row.column, row.value))
    if not skip_bad:
        refuse_bad(source, bad)
    lines = {row.line for row in bad}
    rows = [row for row in trace.rows if row.line not in lines]
    if not rows:
        raise TraceError(f"trace {source}: has no rows" + (f" but {len(bad)} bad ones" if bad else ""))
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
    """The scenario of a fleet file and a trace; `more` is as `scenario_of` takes it.

    Raises:
        ConfigurationError: something in a file or an argument cannot be; it is named.
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
    """The scenario of a fleet and a trace's rows, all of them good.

    Times of `span`, `measured` and `until_s` count from the trace's first submission; the simulation's clock from the
    start of the span. Quotas by rule look at the whole trace, whatever span of it is run.
    """
    settings = fleet.simulation
    first_s = started_at_s(rows)
    zero_s = first_s + span.from_s
    completion = Completion(fleet, settings, seed)
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
        bad=bad,
        sources=fleet.sources,
        says={"scale": {f"{gpus}+": times for gpus, times in scale.items()}, "trace_rows": len(rows)},
    )
