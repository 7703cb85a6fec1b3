"""`mizzen simulate`: simulates the scheduler and others on a trace, or on a day of a Tetris instance."""

from dataclasses import dataclass
from math import inf
from pathlib import Path

import click

from infra.errors import ConfigurationError
from research.rivals.policies import ALL_POLICIES
from research.traces.instance_day import FIVE_MINUTES, day_of, placement_of
from research.traces.scenario import from_trace, parse_scale
from server.commands import run_command
from server.instance_files import read_any, read_document, read_needed
from server.options import FILE, PATH, RunOptions, included, option, takes, time_s
from server.progress import EXIT_INTERRUPTED
from server.simulations import Case, measured_span, simulate
from simulation.policies import policies
from simulation.run import Scenario, Span
from simulation.settings import override
from tetris.documents import read_plan, read_replicas

_SHOWN_BAD = 20


@dataclass(frozen=True)
class SimulateOptions:
    """The options of `mizzen simulate`."""

    fleet: Path | None = option(type=FILE, help="YAML file with regions, machines, tenants and assumptions.")
    trace: str | None = option(metavar="[FORMAT:]PATH", help="CSV or Parquet file; FORMAT is philly or openb.")
    scale: str = option(default="1", show_default=True, help="Arrival factor; 0.5,8+=4: 4 for 8 GPUs or more.")
    bad_rows: str = option(type=click.Choice(["refuse", "skip"]), default="refuse", show_default=True)
    from_: str | None = option(
        "--from",
        metavar="TIME",
        help="Start the trace at this time, such as 40d; workloads that would still run then are included.",
    )
    to: str | None = option(metavar="TIME", help="Ignore submissions from this time on.")
    instance: Path | None = option(type=PATH, help="Simulate a day of a Tetris instance instead of fleet and trace.")
    plan: Path | None = option(type=PATH, help="With --instance: homes, the output of `mizzen tetris solve`.")
    replicas: Path | None = option(type=PATH, help="With --instance: replicas, the output of `solve --replicas`.")
    reads: Path | None = option(
        type=PATH, help="With --instance: partitions that jobs read, the input of `solve --reads`."
    )
    run: RunOptions = included(RunOptions)


@click.command("simulate")
@takes(SimulateOptions)
def simulate_command(given: SimulateOptions) -> None:
    """Simulate the scheduler's decisions, or those of other schedulers, on a virtual clock."""
    run_command(lambda: run_simulate(given))


def run_simulate(given: SimulateOptions) -> int:
    """Runs `mizzen simulate`; returns the exit code.

    Raises:
        ConfigurationError: an option or a value in a file is invalid; the message names it.
    """
    chosen = policies(given.run.names, ALL_POLICIES)
    try:
        scenario = _traced(given) if given.instance is None else _day(given, given.instance)
    except KeyboardInterrupt:
        click.echo("mizzen: interrupted while reading the files: nothing was simulated", err=True)
        return EXIT_INTERRUPTED
    _say_bad(scenario)
    return simulate([Case(scenario)], chosen, given.run)


def _traced(given: SimulateOptions) -> Scenario:
    until_s, measured = given.run.until_s, measured_span(given.run.measure)
    if given.plan is not None or given.replicas is not None or given.reads is not None:
        raise ConfigurationError("--plan, --replicas and --reads belong to an instance: they need --instance")
    if given.fleet is None or given.trace is None:
        raise ConfigurationError("--fleet and --trace are required, or --instance")
    return from_trace(
        given.fleet, given.trace, seed=given.run.seed, scale=parse_scale(given.scale),
        skip_bad=given.bad_rows == "skip", params=given.run.params,
        span=Span(time_s("--from", given.from_, 0.0), time_s("--to", given.to, inf)), measured=measured,
        until_s=until_s,
    )  # fmt: skip


def _day(given: SimulateOptions, instance: Path) -> Scenario:
    if given.fleet is not None or given.trace is not None:
        raise ConfigurationError("--instance defines fleet and workloads: --fleet and --trace cannot be used with it")
    columns, plan, replicas = read_any(instance), given.plan, given.replicas
    known = {"table": columns.table_names, "region": columns.regions, "job": columns.job_names}
    homes = {} if plan is None else read_document(plan, lambda text: read_plan(text, known["table"], known["region"]))
    copies = None if replicas is None else read_document(replicas, lambda text: read_replicas(text, known))
    needed = read_needed(columns, given.reads)
    try:
        placement = placement_of(columns, columns.homes_of(homes), copies, needed)
    except ValueError as error:
        raise ConfigurationError(f"{replicas}: {error} (--reads)") from None
    return day_of(columns, placement, seed=given.run.seed, settings=override(FIVE_MINUTES, given.run.params))


def _say_bad(scenario: Scenario) -> None:
    bad = scenario.says.get("bad_rows", ())
    if bad:
        click.echo(f"mizzen: {len(bad)} bad rows of the trace are ignored:", err=True)
        for row in bad[:_SHOWN_BAD]:
            click.echo("  line {line}: {column}: {value!r}: {right}".format_map(row), err=True)
        if len(bad) > _SHOWN_BAD:
            click.echo(f"  and {len(bad) - _SHOWN_BAD} more; `--json` lists all", err=True)
