"""Compares policies for `mizzen spot replay`: replays them with progress, and writes tables, JSON and a report."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import click
from rich.console import Console

from infra.errors import ConfigurationError
from research.spot.answers import AnswerSettings
from research.spot.commands import ReplayOptions, TraceOptions
from research.spot.outcome import ReplayOutcome, document
from research.spot.policies import POLICIES
from research.spot.replay import ReplaySettings
from research.spot.replay_tables import tables
from research.spot.request_source import workload_of
from research.spot.runs import PolicyCase, ReplayBench, Sweep, check_reachable, solve
from research.spot.sweeps import SweepResult, parse_sweeps, run_sweep
from research.spot.traces import SpotTrace, SpotTraceError, read_traces
from research.spot.windows import Windows
from server.outputs import STANDARD, check_outputs, write_json, write_text
from server.progress import EXIT_INTERRUPTED, Shown, interrupts, shown

_ALL = "all"
_AVAILABILITY = 99.5
"""The default of `--optimum-availability`."""


def run_replay(given: ReplayOptions) -> int:
    """Runs `mizzen spot replay`; returns the exit code. An interrupted run prints the results that are complete.

    Raises:
        ConfigurationError: an option or a trace file is not valid; the message names it.
        MizzenError: the optimum of a window was not found.
    """
    names, sweeps, output = _policies(given.names), parse_sweeps(given.sweeps), given.output
    if given.optimum_availability is not None and not given.optimum:
        share = f"{given.optimum_availability:g}"
        raise ConfigurationError(
            f"--optimum-availability: {share}: has no effect without --optimum: give --optimum as well"
        )
    check_outputs({"--json": output.json, "--report": output.report}, {})
    trace, span, settings = read_windows(given.replayed)
    workload = workload_of(given.requests, span.ticks * trace.gap_s)
    base = PolicyCase("", settings, given.overprovision, given.outage_price_s)
    err = Console(stderr=True)
    with interrupts() as interrupted:
        outcome = ReplayOutcome(given.replayed.traces, ReplayBench(trace, span, workload, interrupted, {}), base)
        least = (_AVAILABILITY if given.optimum_availability is None else given.optimum_availability) / 100
        if given.optimum:
            check_reachable(least, outcome.bench, settings)
        _run(outcome, names, sweeps, least if given.optimum else None, err)
        if output.json is not None:
            write_json(output.json, document(outcome))
        if STANDARD not in (output.json, output.report) and outcome.policies:
            click.echo("\n\n".join(map(str, tables(outcome))))
        if output.report is not None and outcome.policies:
            from research.spot.report import render  # It imports matplotlib, which takes a second.

            write_text(output.report, render(outcome))
    if outcome.missing:
        said = ", ".join(outcome.missing)
        err.print(f"mizzen: interrupted: not complete, and not shown: {said}", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    return 0


def read_windows(given: TraceOptions) -> tuple[SpotTrace, Windows, ReplaySettings]:
    """Returns the trace, its windows and the settings of a replay.

    Raises:
        ConfigurationError: a trace file or the length of the windows is not valid.
    """
    try:
        trace = read_traces(given.traces, unlimited=given.unlimited)
    except SpotTraceError as error:
        raise ConfigurationError(f"--traces: {error}") from None
    answers = AnswerSettings(given.refused_after_s, given.granted_after_s, given.refused_share)
    settings = ReplaySettings(given.target, given.cold_start_s, given.od_price_ratio, answers)
    return trace, Windows(_ticks(given.window_h, trace), given.windows, given.seed), settings


def _run(
    outcome: ReplayOutcome, names: Sequence[str], sweeps: Sequence[Sweep], least: float | None, err: Console
) -> None:
    """Fills the outcome. `least` is the availability of the optimum; None: the optimum is not wanted."""
    bench, count = outcome.bench, outcome.bench.windows.count
    bases = [replace(outcome.base, policy=name) for name in names]
    with shown(err) as show:
        for base in bases:
            result = None if bench.interrupted() else bench.run(base, _replayed(show(base.policy), count))
            if result is None:
                outcome.missing.append(base.policy)
            else:
                outcome.policies[base.policy] = result
        for sweep in sweeps:
            what = f"sweep of {sweep.field}"
            found = SweepResult(sweep, {}) if bench.interrupted() else run_sweep(bench, sweep, bases, show(what))
            if found.results:
                outcome.sweeps.append(found)
            if len(found.results) < sum(len(sweep.cases(base)) for base in bases):
                outcome.missing.append(f"the {what}")
        if least is not None:
            if not bench.interrupted():
                outcome.optimum = solve(bench, outcome.base.settings, least, show("optimum"))
            if outcome.optimum is None:
                outcome.missing.append("the optimum")


def _replayed(show: Shown, count: int) -> Callable[[int], None]:
    return lambda done: show(done / count, f"{done:,} of {count:,} windows replayed")


def _policies(names: Sequence[str]) -> list[str]:
    chosen: list[str] = []
    for name in names:
        if name != _ALL and name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ConfigurationError(f"--policy: {name}: no such policy: give {_ALL}, or one of {known}")
        chosen += POLICIES if name == _ALL else [name]
    return list(dict.fromkeys(chosen))


def _ticks(window_h: float, trace: SpotTrace) -> int:
    ticks = int(window_h * 3600 / trace.gap_s + 1e-9)
    gap_h, whole_h = trace.gap_s / 3600, trace.ticks * trace.gap_s / 3600
    if not 1 <= ticks <= trace.ticks:
        raise ConfigurationError(
            f"--window-h: {window_h:g}: the trace has {trace.ticks:,} ticks of {trace.gap_s:g} s: "
            f"give {gap_h:.4g} to {whole_h:.6g} hours"
        )
    return ticks
