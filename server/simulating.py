"""Runs the simulator for a command: shows the progress, and writes JSON and the report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import click
from rich.console import Console

import simulation.simulator
from domain.units import parse_duration_s
from infra.errors import ConfigurationError
from server.outputs import write_json
from server.progress import EXIT_INTERRUPTED, Shown, interrupts, shown
from simulation.policies import Policy
from simulation.run import EVERYTHING, Run, Scenario, Span, check_policy


@dataclass(frozen=True)
class Case:
    """A scenario, and a description of how it differs from the unchanged scenario."""

    scenario: Scenario
    change: str | None = None


def simulate(cases: Sequence[Case], chosen: Sequence[Policy], json_path: Path | None, report_path: Path | None) -> int:
    """Runs every policy on every case; returns the exit code.

    `json_path` gets one object for a single run, otherwise a list; `-` is standard output. The results of an
    interrupted run are also written, and are marked as interrupted.

    Raises:
        ConfigurationError: a policy does not support the scenario, or a file cannot be written.
    """
    for path in (json_path, report_path):
        if path is not None and str(path) != "-" and not path.absolute().parent.is_dir():
            raise ConfigurationError(f"{path}: folder {path.absolute().parent} does not exist")
    for case in cases:
        for policy in chosen:
            check_policy(case.scenario, policy)
    err = Console(stderr=True)
    runs: list[Run] = []
    with interrupts() as interrupted, shown(err) as show:
        for case in cases:
            for policy in chosen:
                runs.append(Run(case.scenario, policy, change=case.change))
                runs[-1].go(_watched(show(_name(policy, case)), interrupted))
                if runs[-1].interrupted:
                    break
            if runs[-1].interrupted:
                break
    outcomes = [run.to_json() for run in runs]
    if json_path is not None:
        write_json(json_path, outcomes if len(chosen) * len(cases) > 1 else outcomes[0], indent=None)
    if str(json_path) != "-":
        click.echo(_summary(outcomes))
    if report_path is not None:
        from simulation.report import render

        report_path.write_text(render(outcomes), encoding="utf-8")
    if runs[-1].interrupted:
        err.print(f"mizzen: interrupted: {_far(runs[-1])}", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    return 0


def _name(policy: Policy, case: Case) -> str:
    return policy.name if case.change is None else f"{policy.name}, {case.change}"


def _watched(show: Shown, interrupted: Callable[[], bool]) -> Callable[[simulation.simulator.Progress], bool]:
    """Returns the callback of a run: it shows the progress and returns whether to stop."""

    def stop(p: simulation.simulator.Progress) -> bool:
        show(p.done, _line(p))
        return interrupted()

    return stop


def duration(span_s: float) -> str:
    """Formats seconds as `3d 04:05:06`."""
    days, rest = divmod(int(span_s), 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


def _line(p: simulation.simulator.Progress) -> str:
    return f"simulated {duration(p.now_s)}, {p.finished:,} of {p.workloads:,} workloads finished, {p.queued:,} queued"


def _far(run: Run) -> str:
    return f"{run.policy.name}: {_line(run.simulator.progress)}"


def _summary(outcomes: Sequence[dict[str, Any]]) -> str:
    rows = [("POLICY", "FINISHED", "ALLOCATED", "SATURATED", "MISSED IN QUOTA", "PREEMPTIONS", "LOST GPU H")]
    for one in outcomes:
        run = one["run"]
        rows.append(
            (
                one["policy"] + (f" ({run['change']})" if run["change"] else "") + (" *" if run["interrupted"] else ""),
                f"{one['finished']:,} of {one['workloads']:,}",
                percent(one["allocation_rate"]),
                percent(one["saturated_allocation_rate"]),
                percent(one["objective_miss_rate"]["within_quota"]["all"]),
                f"{one['preemptions']:,}",
                f"{one['lost_gpu_hours']:,.1f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "* interrupted"] if outcomes[-1]["run"]["interrupted"] else lines)


def percent(rate: float | None) -> str:
    """Formats a rate as a percentage; `-` for None."""
    return "-" if rate is None else f"{100 * rate:.2f} %"


def time_s(option: str, text: str | None, absent: float) -> float:
    """Returns the seconds of a duration such as 40d or of a number of seconds; `absent` if `text` is None."""
    if text is None:
        return absent
    try:
        value = float(text) if text.replace(".", "", 1).isdigit() else parse_duration_s(text)
    except ValueError:
        raise ConfigurationError(
            f"{option} {text}: must be a number of seconds, or a duration such as 40d or 12h30m"
        ) from None
    return value


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
