"""`mizzen simulate`: simulates the scheduler and others on a trace, or on a day of a Tetris instance."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import click

from infra.errors import ConfigurationError
from research.rivals.policies import ALL_POLICIES
from research.traces.instance_day import FIVE_MINUTES, day_of, placement_of
from research.traces.scenario import from_trace, parse_scale
from server.commands import run_command, run_options
from server.instance_files import read_any, read_document, read_needed
from server.progress import EXIT_INTERRUPTED
from server.simulating import Case, measured_span, simulate, time_s
from simulation.policies import policies
from simulation.run import Scenario, Span
from simulation.settings import override
from tetris.documents import read_plan, read_replicas

_SHOWN_BAD = 20
_FILE = click.Path(path_type=Path, dir_okay=False)
_PATH = click.Path(path_type=Path)


@click.command("simulate")
@click.option("--fleet", type=_FILE, help="YAML file with regions, machines, tenants and assumptions.")
@click.option("--trace", metavar="[FORMAT:]PATH", help="CSV or Parquet file; FORMAT is philly or openb.")
@click.option("--scale", default="1", show_default=True, help="Arrival factor; 0.5,8+=4: 4 for 8 GPUs or more.")
@click.option("--bad-rows", type=click.Choice(["refuse", "skip"]), default="refuse", show_default=True)
@click.option(
    "--from", "from_", metavar="TIME",
    help="Start the trace at this time, such as 40d; workloads that would still run then are included.",
)  # fmt: skip
@click.option("--to", metavar="TIME", help="Ignore submissions from this time on.")
@click.option("--instance", type=_PATH, help="Simulate a day of a Tetris instance instead of fleet and trace.")
@click.option("--plan", type=_PATH, help="With --instance: homes, the output of `mizzen tetris solve`.")
@click.option("--replicas", type=_PATH, help="With --instance: replicas, the output of `solve --replicas`.")
@click.option("--reads", type=_PATH, help="With --instance: partitions that jobs read, the input of `solve --reads`.")
@run_options
def simulate_command(**options: Any) -> None:
    """Simulate the scheduler's decisions, or those of other schedulers, on a virtual clock."""
    run_command(lambda: run_simulate(**options))


def run_simulate(
    *,
    fleet: Path | None,
    trace: str | None,
    scale: str,
    bad_rows: str,
    from_: str | None,
    to: str | None,
    instance: Path | None,
    plan: Path | None,
    replicas: Path | None,
    reads: Path | None,
    names: Sequence[str],
    json_path: Path | None,
    report_path: Path | None,
    seed: int,
    until: str | None,
    measure: str | None,
    params: Sequence[str],
) -> int:
    """Runs `mizzen simulate`; returns the exit code.

    Raises:
        ConfigurationError: an option or a value in a file is invalid; the message names it.
    """
    chosen = policies(names, ALL_POLICIES)
    until_s, measured = time_s("--until", until, inf), measured_span(measure)
    try:
        if instance is not None:
            if fleet is not None or trace is not None:
                raise ConfigurationError(
                    "--instance defines fleet and workloads: --fleet and --trace cannot be used with it"
                )
            scenario = _day(instance, plan, replicas, reads, seed, params)
        else:
            if plan is not None or replicas is not None or reads is not None:
                raise ConfigurationError("--plan, --replicas and --reads belong to an instance: they need --instance")
            if fleet is None or trace is None:
                raise ConfigurationError("--fleet and --trace are required, or --instance")
            span = Span(time_s("--from", from_, 0.0), time_s("--to", to, inf))
            scenario = from_trace(
                fleet, trace, seed=seed, scale=parse_scale(scale), skip_bad=bad_rows == "skip", params=params,
                span=span, measured=measured, until_s=until_s,
            )  # fmt: skip
    except KeyboardInterrupt:
        click.echo("mizzen: interrupted while reading the files: nothing was simulated", err=True)
        return EXIT_INTERRUPTED
    _say_bad(scenario)
    return simulate([Case(scenario)], chosen, json_path, report_path)


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


def _say_bad(scenario: Scenario) -> None:
    bad = scenario.says.get("bad_rows", ())
    if bad:
        click.echo(f"mizzen: {len(bad)} bad rows of the trace are ignored:", err=True)
        for row in bad[:_SHOWN_BAD]:
            click.echo("  line {line}: {column}: {value!r}: {right}".format_map(row), err=True)
        if len(bad) > _SHOWN_BAD:
            click.echo(f"  and {len(bad) - _SHOWN_BAD} more; `--json` lists all", err=True)
