"""`mizzen spot`: commands on policies for services on spot machines. They need no running installation."""

from math import isfinite
from pathlib import Path
from typing import Any

import click

from server.commands import run_command


def _positive(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not (value > 0 and isfinite(value)):
        raise click.BadParameter(f"{value}: must be a finite number above 0", context, parameter)
    return value


def _not_negative(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not (value >= 0 and isfinite(value)):
        raise click.BadParameter(f"{value}: must be a finite number, 0 or more", context, parameter)
    return value


@click.group()
def spot() -> None:
    """Compare policies for services on spot machines."""


@spot.command()
@click.option("--traces", type=click.Path(path_type=Path), required=True, help="Folder with a JSON file for each zone.")
@click.option("--policy", "names", multiple=True, required=True, help="A policy, or all; repeatable.")
@click.option("--target", type=click.IntRange(min=1), default=3, show_default=True, help="Replicas to keep ready.")
@click.option(
    "--overprovision",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Spot replicas of SpotHedge beyond the target.",
)
@click.option(
    "--cold-start-s",
    type=float,
    callback=_not_negative,
    default=120.0,
    show_default=True,
    help="Time from the launch of a replica until it is ready.",
)
@click.option(
    "--od-price-ratio",
    type=float,
    callback=_positive,
    default=3.0,
    show_default=True,
    help="Price of an on-demand replica over that of a spot replica.",
)
@click.option(
    "--window-h", type=float, callback=_positive, default=24.0, show_default=True, help="Length of each window."
)
@click.option(
    "--windows",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Number of windows, at random offsets.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--unlimited/--counts",
    "unlimited",
    default=None,
    help="Whether a count of 1 or more stands for any number of machines (default: if no count is above 1).",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for all results; -: standard output.")
def replay(**options: Any) -> None:
    """Replay policies on traces of spot capacity.

    Prints the availability and the cost of each policy; docs/spot.md has the rules.
    """
    from server.spot_replaying import run_replay

    run_command(lambda: run_replay(**options))
