"""`mizzen simulate`: reads the files, shows the progress, and writes JSON and the report."""

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
from server.instance_files import read_any, read_document, read_needed
from server.outputs import write_json
from server.progress import EXIT_INTERRUPTED, Shown, interrupts, shown
from simulation.day import FIVE_MINUTES, day_of, placement_of
from simulation.live import change, live_scenario, load_live
from simulation.policies import Policy, policies
from simulation.run import Run, Scenario, check_policy
from simulation.scenario import EVERYTHING, Span, from_trace, parse_scale
from simulation.settings import SimulationSettings, override
from tetris.documents import read_plan, read_replicas

_SHOWN_BAD = 20


@dataclass(frozen=True)
class Case:
    """A scenario, and a description of how it differs from the unchanged scenario."""

    scenario: Scenario
    change: str | None = None


def simulate(cases: Sequence[Case], names: Sequence[str], json_path: Path | None, report_path: Path | None) -> int:
    """Runs every policy on every case; returns the exit code.

    `json_path` gets one object for a single run, otherwise a list; `-` is standard output. The results of an
    interrupted run are also written, and are marked as interrupted.

    Raises:
        ConfigurationError: a policy is unknown, or a file cannot be written.
    """
    chosen = policies(names)
    for path in (json_path, report_path):
        if path is not None and str(path) != "-" and not path.absolute().parent.is_dir():
            raise ConfigurationError(f"{path}: folder {path.absolute().parent} does not exist")
    for case in cases:
        for policy in chosen:
            check_policy(case.scenario, policy)
    err = Console(stderr=True)
    _say_bad(cases[0].scenario, err)
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


def _say_bad(scenario: Scenario, err: Console) -> None:
    if scenario.bad:
        err.print(f"mizzen: {len(scenario.bad)} bad rows of the trace are ignored:", highlight=False)
        for row in scenario.bad[:_SHOWN_BAD]:
            err.print(f"  {row}", highlight=False, markup=False, soft_wrap=True)
        if len(scenario.bad) > _SHOWN_BAD:
            err.print(f"  and {len(scenario.bad) - _SHOWN_BAD} more; `--json` lists all", highlight=False)


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


def run_simulate(
    *,
    fleet: Path | None,
    trace: str | None,
    names: Sequence[str],
    json_path: Path | None,
    report_path: Path | None,
    seed: int,
    scale: str,
    bad_rows: str,
    from_: str | None,
    to: str | None,
    until: str | None,
    measure: str | None,
    params: Sequence[str],
    from_live: Path | None,
    changes: Sequence[str],
    drains: Sequence[str],
    instance: Path | None,
    plan: Path | None,
    replicas: Path | None,
    reads: Path | None,
) -> int:
    """Runs `mizzen simulate`; returns the exit code.

    Raises:
        ConfigurationError: an option or a value in a file is invalid; the message names it.
    """
    policies(names)
    until_s = _time_s("--until", until, inf)
    measured = _measured(measure)
    try:
        if from_live is not None:
            if instance is not None:
                raise ConfigurationError("--from-live and --instance both define fleet and workloads: give only one")
            cases = _live(from_live, fleet, trace, seed, params, until_s, measured, changes, drains)
        elif instance is not None:
            if fleet is not None or trace is not None:
                raise ConfigurationError(
                    "--instance defines fleet and workloads: --fleet and --trace cannot be used with it"
                )
            cases = [Case(_day(instance, plan, replicas, reads, seed, params))]
        else:
            if plan is not None or replicas is not None or reads is not None:
                raise ConfigurationError("--plan, --replicas and --reads belong to an instance: they need --instance")
            if fleet is None or trace is None:
                raise ConfigurationError("--fleet and --trace are required, or --from-live, or --instance")
            if changes or drains:
                raise ConfigurationError("--set and --drain change a live snapshot: they need --from-live")
            span = Span(_time_s("--from", from_, 0.0), _time_s("--to", to, inf))
            scenario = from_trace(
                fleet, trace, seed=seed, scale=parse_scale(scale), skip_bad=bad_rows == "skip", params=params,
                span=span, measured=measured, until_s=until_s,
            )  # fmt: skip
            cases = [Case(scenario)]
    except KeyboardInterrupt:
        click.echo("mizzen: interrupted while reading the files: nothing was simulated", err=True)
        return EXIT_INTERRUPTED
    return simulate(cases, names, json_path, report_path)


def _day(
    instance: Path, plan: Path | None, replicas: Path | None, reads: Path | None, seed: int, params: Sequence[str]
) -> Scenario:
    columns = read_any(instance)
    known = {"table": columns.table_names, "region": columns.regions, "job": columns.job_names}
    homes = {} if plan is None else read_document(plan, lambda text: read_plan(text, known["table"], known["region"]))
    copies = None if replicas is None else read_document(replicas, lambda text: read_replicas(text, known))
    needed = read_needed(columns, reads)
    try:
        placement = placement_of(columns, columns.homes_of(homes), copies, needed)
    except ValueError as error:
        raise ConfigurationError(f"{replicas}: {error} (--reads)") from None
    return day_of(columns, placement, seed=seed, settings=override(FIVE_MINUTES, tuple(params)))


def _live(
    snapshot: Path,
    fleet: Path | None,
    trace: str | None,
    seed: int,
    params: Sequence[str],
    until_s: float,
    measured: Span,
    changes: Sequence[str],
    drains: Sequence[str],
) -> list[Case]:
    if fleet is not None or trace is not None:
        raise ConfigurationError("--from-live defines fleet and workloads: --fleet and --trace cannot be used with it")
    live = load_live(snapshot)
    settings = override(SimulationSettings(), tuple(params))
    cases = [Case(live_scenario(live, settings, seed, until_s, measured))]
    if changes or drains:
        changed = change(live, changes, drains)
        says = ", ".join((*changes, *(f"drain {region}" for region in drains)))
        cases.append(Case(live_scenario(changed, settings, seed, until_s, measured), says))
    return cases


def _time_s(option: str, text: str | None, absent: float) -> float:
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


def _measured(text: str | None) -> Span:
    if text is None:
        return EVERYTHING
    first, dots, last = text.partition("..")
    if not dots:
        raise ConfigurationError(f"--measure {text}: must be FROM..TO, such as 40d..40d8h")
    return Span(_time_s("--measure", first or "0", 0.0), _time_s("--measure", last or None, inf))
