"""`mizzen tetris solve`, `score`: the slow path's decisions on instance files, without an installation."""

from pathlib import Path
from typing import Any

import click

from server.commands import run_command

_FILE = click.Path(path_type=Path)


@click.group()
def tetris() -> None:
    """Decide which region is home to which table (docs/tetris.md)."""


@tetris.command()
@click.argument("instance", type=_FILE)
@click.option("--method", type=click.Choice(["climb", "exact", "v0", "v1"]), default="climb", show_default=True)
@click.option("--time-s", type=float, help="Time budget (default: 10 for climb and v1, 600 for exact).")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=_FILE, default=Path("-"), help="Where to write the plan (default: standard output).")
@click.option("--moves", type=_FILE, help="Where to write what each move gains, as JSON.")
def solve(**options: Any) -> None:
    """Find homes for the tables of INSTANCE, JSON or a folder of Parquet files (docs/tetris-instances.md)."""
    from server.placing import run_solve

    run_command(lambda: run_solve(**options))


@tetris.command()
@click.option("--tables", type=int, default=200, show_default=True)
@click.option("--regions", type=int, default=6, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--out", type=_FILE, default=Path("-"), help="A name that ends in .json, or a folder for Parquet files.")
def generate(tables: int, regions: int, seed: int, out: Path) -> None:
    """Make an instance with the shape that MAST reports."""
    from server.placing import run_generate

    run_command(lambda: run_generate(tables, regions, seed, out))


@tetris.command()
@click.argument("instance", type=_FILE)
@click.argument("plan", type=_FILE)
def score(instance: Path, plan: Path) -> None:
    """Print what PLAN costs for INSTANCE, term by term, and which constraints it breaks, as JSON."""
    from server.placing import run_score

    run_command(lambda: run_score(instance, plan))
