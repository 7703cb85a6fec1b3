"""Runs the simulator for `mizzen what-if` and `mizzen simulate`: shows progress, and writes JSON and the report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

import simulation.simulator
from infra.errors import ConfigurationError
from infra.reports.formats import number, percent
from infra.reports.tables import aligned
from server.options import RunOptions, time_s
from server.outputs import write_json
from server.progress import EXIT_INTERRUPTED, Shown, interrupts, shown
from simulation.live import change, live_scenario, load_live
from simulation.policies import SchedulingPolicy, policies
from simulation.result import name_of
from simulation.run import EVERYTHING, Run, Scenario, Span, check_policy
from simulation.settings import SimulationSettings, override

if TYPE_CHECKING:
    from server.commands import WhatIfOptions


@dataclass(frozen=True)
class Case:
    """A scenario, and a description of how it differs from the unchanged scenario."""

    scenario: Scenario
    change: str | None = None


def what_if(given: "WhatIfOptions") -> int:
    """Simulates the live fleet from a snapshot, unchanged and with the change, if there is one; returns the exit code.

    Raises:
        ConfigurationError: an option or a value in the file is invalid; the message names it.
    """
    run = given.run
    chosen, until_s, measured = policies(run.names), run.until_s, measured_span(run.measure)
    live = load_live(given.snapshot)
    settings = override(SimulationSettings(), run.params)
    cases = [Case(live_scenario(live, settings, run.seed, until_s, measured))]
    if given.changes or given.drains:
        changed = change(live, given.changes, given.drains)
        says = ", ".join((*given.changes, *(f"drain {region}" for region in given.drains)))
        cases.append(Case(live_scenario(changed, settings, run.seed, until_s, measured), says))
    return simulate(cases, chosen, run)


def simulate(cases: Sequence[Case], chosen: Sequence[SchedulingPolicy], given: RunOptions) -> int:
    """Runs every policy on every case; returns the exit code.

    The JSON file gets one object for a single run, otherwise a list. The results of an interrupted run are also
    written, and are marked as interrupted.

    Raises:
        ConfigurationError: a policy does not support the scenario, or a file cannot be written.
    """
    for path in (given.json, given.report):
        if path is not None and str(path) != "-" and not path.absolute().parent.is_dir():
            raise ConfigurationError(f"{path}: folder {path.absolute().parent} does not exist")
    wanted = [(case, policy) for case in cases for policy in chosen]
    for case, policy in wanted:
        check_policy(case.scenario, policy)
    err = Console(stderr=True)
    runs: list[Run] = []
    with interrupts() as interrupted, shown(err) as show:
        for case, policy in wanted:
            runs.append(Run(case.scenario, policy, change=case.change))
            name = policy.name if case.change is None else f"{policy.name}, {case.change}"
            runs[-1].go(_watched(show(name), interrupted))
            if runs[-1].interrupted:
                break
    outcomes = [run.to_json() for run in runs]
    if given.json is not None:
        write_json(given.json, outcomes if len(wanted) > 1 else outcomes[0], indent=None)
    if str(given.json) != "-":
        click.echo("\n".join(_summary(outcomes)))
    if given.report is not None:
        from simulation.report import render  # It imports matplotlib, which takes a second.

        given.report.write_text(render(outcomes), encoding="utf-8")
    if runs[-1].interrupted:
        far = f"{runs[-1].policy.name}: {_line(runs[-1].simulator.progress)}"
        err.print(f"mizzen: interrupted: {far}", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    return 0


def _watched(show: Shown, interrupted: Callable[[], bool]) -> Callable[[simulation.simulator.RunProgress], bool]:
    """Returns the callback of a run: it shows the progress and returns whether to stop."""

    def stop(p: simulation.simulator.RunProgress) -> bool:
        show(p.done, _line(p))
        return interrupted()

    return stop


def _line(p: simulation.simulator.RunProgress) -> str:
    days, rest = divmod(int(p.now_s), 86400)
    clock = (f"{days}d " if days else "") + f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"simulated {clock}, {p.finished:,} of {p.workloads:,} workloads finished, {p.queued:,} queued"


def _summary(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    rows = [("POLICY", "FINISHED", "ALLOCATED", "SATURATED", "MISSED IN QUOTA", "PREEMPTIONS", "LOST GPU H")]
    for one in outcomes:
        rows.append(
            (
                name_of(one) + (" *" if one["run"]["interrupted"] else ""),
                f"{one['finished']:,} of {one['workloads']:,}",
                percent(one["allocation_rate"]),
                percent(one["saturated_allocation_rate"]),
                percent(one["objective_miss_rate"]["within_quota"]["all"]),
                f"{one['preemptions']:,}",
                number(one["lost_gpu_hours"]),
            )
        )
    return aligned(rows) + (["* interrupted"] if outcomes[-1]["run"]["interrupted"] else [])


def measured_span(text: str | None) -> Span:
    """Returns the span of `--measure FROM..TO`; None: everything.

    Raises:
        ConfigurationError: the text is malformed.
    """
    if text is None:
        return EVERYTHING
    first, dots, last = text.partition("..")
    if not dots:
        raise ConfigurationError(f"--measure {text}: must be FROM..TO, such as 40d..40d8h")
    return Span(time_s("--measure", first or "0", 0.0), time_s("--measure", last or None, inf))
