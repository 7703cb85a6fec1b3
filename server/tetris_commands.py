"""`mizzen tetris`: commands for the placement of tables, on instance files or in a running installation."""

from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import click

from infra.errors import ConfigurationError
from mizzen.cli.printer import dump, emit_one
from mizzen_client.cli.numbers import Number
from mizzen_client.cli.session import Commands, Session, finish, say
from server.commands import EXIT_USAGE, run_command
from server.options import argument, option, takes
from server.placement_run_commands import COMMANDS as PLACEMENT_COMMANDS
from server.usage_commands import usage

_PATH = click.Path(path_type=Path)


class Output(click.Path):
    """An output path: a file, or optionally a folder. Checks for a trailing slash, which `Path` would remove."""

    def __init__(self, *, may_be_folder: bool = False) -> None:
        super().__init__(path_type=Path)
        self.may_be_folder = may_be_folder

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType.convert`."""
        if str(value).endswith("/") and not (self.may_be_folder and not str(value).rstrip("/").endswith(".json")):
            self.fail(f"{value}: ends with a slash: give the name of a file", param, ctx)
        return super().convert(value, param, ctx)


_OUTPUT = Output()


@click.group(cls=Commands)
def tetris() -> None:
    """Place tables near the jobs that read them."""


for command in (usage, *PLACEMENT_COMMANDS):
    tetris.add_command(command)


@tetris.command()
@click.argument("file", type=click.File("w", lazy=True, atomic=True), default="-")
@click.option(
    "--window",
    "window_days",
    type=Number(min=0, min_open=True),
    metavar="DAYS",
    help="Runs of the last DAYS days (default: 30).",
)
@click.option("--reads", type=click.File("w", lazy=True, atomic=True), help="File for the partitions that jobs read.")
@click.option("--region", help="Export the datacenters and partitions of this region instead.")
@click.pass_obj
def export(
    session: Session, file: IO[str], window_days: float | None, reads: IO[str] | None, region: str | None
) -> None:
    """Write the instance (regions, tables, recurring jobs) to FILE (default: stdout), as JSON (operators)."""
    if reads is not None and region is not None:
        raise click.UsageError(
            "--reads: not with --region: its instance already contains the partitions that jobs read"
        )
    file.write(dump(session.client.instance(window_days, region), "json") + "\n")
    if reads is not None:
        reads.write(dump(session.client.reads(window_days), "json") + "\n")


@tetris.command()
@click.argument("instance", type=_PATH)
@click.argument("plan", type=_PATH)
@click.pass_obj
def assign(session: Session, instance: Path, plan: Path) -> None:
    """Assign partitions to datacenters, all or none, as PLAN does for INSTANCE (export --region; operators).

    A partition that is not in PLAN is assigned to its datacenter in INSTANCE.
    """
    from server.instance_files import read_homes

    try:
        homes = read_homes(instance, plan)
    except ConfigurationError as error:
        say(str(error))
        finish(EXIT_USAGE)
    answer = session.client.assign_datacenters(homes)
    emit_one(session, answer, lambda: "{assigned} assigned, {unchanged} unchanged".format(**answer),
             name=str(answer["assigned"]))  # fmt: skip


@dataclass(frozen=True)
class SolveOptions:
    """The options of `mizzen tetris solve`."""

    instance: Path = argument(type=_PATH)
    method: str = option(type=click.Choice(["climb", "exact", "v0"]), default="climb", show_default=True)
    time_s: float | None = option(type=Number(min=0), help="Budget of CPU time (default: 10 for climb, 600 for exact).")
    seed: int = option(type=click.IntRange(min=0), default=0, show_default=True)
    out: Path = option(type=_OUTPUT, default=Path("-"), help="File for the plan (default: standard output).")
    moves: Path | None = option(type=_OUTPUT, help="File for the moves and the gain of each, as JSON.")
    replicas: Path | None = option(type=_OUTPUT, help="File for the replicas that jobs need under the plan, as JSON.")
    reads: Path | None = option(
        type=_PATH, help="Partitions that jobs read (export --reads); only these are replicated."
    )


# Commands on files: they do not call the API.
@tetris.command(cls=click.Command)
@takes(SolveOptions)
def solve(given: SolveOptions) -> None:
    """Find homes for the tables of INSTANCE: JSON, or a folder of Parquet files (docs/tetris-instances.md)."""
    from server.outputs import check_outputs
    from server.progress import starting

    def work() -> int:
        with starting():
            outputs = {f"--{name}": getattr(given, name) for name in ("out", "moves", "replicas")}
            inputs = {"INSTANCE": given.instance, "--reads": given.reads}
            check_outputs(outputs, {name: path for name, path in inputs.items() if path is not None})
            if given.method != "v0":
                say("loading the search, which takes some seconds and does not count as search time")
            from server.tetris_solve import run_solve
        return run_solve(given)

    run_command(work)


@tetris.command(cls=click.Command)
@click.argument("instance", type=_PATH)
@click.argument("plan", type=_PATH)
def score(instance: Path, plan: Path) -> None:
    """Print the cost of PLAN for INSTANCE, term by term, and the violated constraints, as JSON."""
    from server.instance_files import run_score

    run_command(lambda: run_score(instance, plan))
