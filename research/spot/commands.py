"""`mizzen spot`: commands on policies for services on spot machines. They need no running installation."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import click

from research.spot.spothedge_plus import OUTAGE_PRICE_S
from server.commands import run_command

F = TypeVar("F", bound=Callable[..., Any])


def _positive(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not (value > 0 and isfinite(value)):
        raise click.BadParameter(f"{value}: must be a finite number above 0", context, parameter)
    return value


def _not_negative(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not (value >= 0 and isfinite(value)):
        raise click.BadParameter(f"{value}: must be a finite number, 0 or more", context, parameter)
    return value


def _request_options(command: F) -> F:
    """Adds the options on requests. Their defaults are in `research.spot.request_source`, because some depend on the
    trace.
    """
    number: dict[str, Any] = {"type": float, "callback": _positive}
    options = (
        click.option(
            "--requests",
            metavar="poisson:RATE_PER_S|FILE",
            help="Also measure the latency of requests: a rate, or a CSV file with requests per minute or tokens.",
        ),
        click.option(
            "--request-scale",
            **number,
            help="Factor of the number of requests in a file (default: 1e-4 for requests per minute, otherwise 1).",
        ),
        click.option("--request-cap", **number, help="Most requests in a minute, after scaling (default: 90)."),
        click.option("--service-s", **number, help="Mean time to answer a request without tokens (default: 10)."),
        click.option("--prefill-tokens-per-s", **number, help="For files with tokens (default: 4000)."),
        click.option("--decode-tokens-per-s", **number, help="For files with tokens, per request (default: 30)."),
        click.option(
            "--concurrency",
            type=click.IntRange(min=1),
            help="Requests that a replica answers at a time (default: 4; 16 for files with tokens).",
        ),
        click.option("--timeout-s", **number, help="Time after which a request fails (default: 100)."),
    )
    for option in reversed(options):
        command = option(command)
    return command


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
    "--outage-price-s",
    type=float,
    callback=_not_negative,
    default=OUTAGE_PRICE_S,
    show_default=True,
    help="Price that spothedge+ sets on an outage, in seconds of the target on demand.",
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
@_request_options
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="FIELD=VALUE,...",
    help="Also replay with each value of overprovision, outage-price-s, cold-start-s or od-price-ratio; repeatable.",
)
@click.option("--optimum", is_flag=True, help="Also compute the cheapest plan for known capacity.")
@click.option(
    "--optimum-availability",
    metavar="PERCENT",
    type=click.FloatRange(0, 100),
    help="The availability that the cheapest plan must have (default: 99.5).",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for all results; -: standard output.")
@click.option(
    "--report", "report_path", type=click.Path(path_type=Path), help="File for an HTML report; -: standard output."
)
def replay(**options: Any) -> None:
    """Replay policies on traces of spot capacity.

    Prints the availability and the cost of each policy; docs/spot.md has the rules.
    """
    from research.spot.command_run import run_replay

    run_command(lambda: run_replay(**options))
