"""`mizzen tetris`: the slow path's decisions on instance files, which need no installation, and its facts in one."""

from pathlib import Path
from typing import IO, Any

import click

from mizzen.cli.output import dump
from mizzen.cli.session import Commands, Session
from server.commands import run_command
from server.night_commands import COMMANDS as NIGHT_COMMANDS
from server.usage_commands import usage

_PATH = click.Path(path_type=Path)


@click.group(cls=Commands)
def tetris() -> None:
    """Place tables near the jobs that read them."""


for command in (usage, *NIGHT_COMMANDS):
    tetris.add_command(command)


@tetris.command()
@click.argument("file", type=click.File("w", lazy=True, atomic=True), default="-")
@click.option("--window", "window_days", type=float, metavar="DAYS", help="Count runs of so many days (default: 30).")
@click.pass_obj
def export(session: Session, file: IO[str], window_days: float | None) -> None:
    """Write the instance (regions, tables, recurring jobs) to FILE (default: stdout), as JSON (operators)."""
    file.write(dump(session.client.instance(window_days), "json") + "\n")


@tetris.command()
@click.argument("instance", type=_PATH)
@click.option("--method", type=click.Choice(["climb", "exact", "v0", "v1"]), default="climb", show_default=True)
@click.option("--time-s", type=float, help="Time budget (default: 10 for climb and v1, 600 for exact).")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=_PATH, default=Path("-"), help="Where to write the plan (default: standard output).")
@click.option("--moves", type=_PATH, help="Where to write what each move gains, as JSON.")
@click.option("--replicas", type=_PATH, help="Where to write the replicas that the plan's homes call for, as JSON.")
def solve(**options: Any) -> None:
    """Find homes for the tables of INSTANCE: JSON, or a folder of Parquet files (docs/tetris-instances.md)."""
    from server.placing import run_solve

    run_command(lambda: run_solve(**options))


@tetris.command()
@click.argument("instance", type=_PATH)
@click.argument("plan", type=_PATH)
def score(instance: Path, plan: Path) -> None:
    """Print what PLAN costs for INSTANCE, term by term, and which constraints it breaks, as JSON."""
    from server.instance_files import run_score

    run_command(lambda: run_score(instance, plan))


@tetris.command()
@click.option("--tables", type=int, default=200, show_default=True)
@click.option("--regions", type=int, default=6, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=_PATH, default=Path("-"), help="A name that ends in .json, or a folder for Parquet files.")
def generate(tables: int, regions: int, seed: int, out: Path) -> None:
    """Make an instance with the shape that MAST reports."""
    from server.placing import run_generate

    run_command(lambda: run_generate(tables, regions, seed, out))
