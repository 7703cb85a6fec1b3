"""`mizzen spot`: commands on policies for services on spot machines. They need no running installation."""

from dataclasses import dataclass
from pathlib import Path

import click

from mizzen_client.cli.numbers import Number
from research.spot.request_options import RequestOptions
from server.commands import run_command
from server.options import PATH, OutputOptions, finite, included, option, takes
from services.spot.spothedge_plus import OUTAGE_PRICE_S

_POSITIVE, _NOT_NEGATIVE = finite(above_zero=True), finite(above_zero=False)


@dataclass(frozen=True)
class TraceOptions:
    """Which windows are replayed, and how launches are answered in them."""

    traces: Path = option(type=PATH, required=True, help="Folder with a JSON file for each zone.")
    target: int = option(type=click.IntRange(min=1), default=3, show_default=True, help="Replicas to keep ready.")
    cold_start_s: float = option(
        callback=_NOT_NEGATIVE, default=120.0, show_default=True,
        help="Time from the grant of a replica until it is ready.",
    )  # fmt: skip
    refused_after_s: float = option(
        callback=_NOT_NEGATIVE, default=0.0, show_default=True, help="Mean time from a launch until its refusal."
    )
    granted_after_s: float = option(
        callback=_NOT_NEGATIVE, default=0.0, show_default=True, help="Mean time from a launch until its grant."
    )
    refused_share: float = option(
        type=Number(0, 1, max_open=True), default=0.0, show_default=True,
        help="Probability that a zone with capacity refuses a launch.",
    )  # fmt: skip
    od_price_ratio: float = option(
        callback=_POSITIVE, default=3.0, show_default=True,
        help="Price of an on-demand replica over that of a spot replica.",
    )  # fmt: skip
    window_h: float = option(callback=_POSITIVE, default=24.0, show_default=True, help="Length of each window.")
    windows: int = option(
        type=click.IntRange(min=1), default=100, show_default=True, help="Number of windows, at random offsets."
    )
    seed: int = option(default=0, show_default=True)
    unlimited: bool | None = option(
        "--unlimited/--counts", default=None,
        help="Whether a count of 1 or more stands for any number of machines (default: if no count is above 1).",
    )  # fmt: skip


@dataclass(frozen=True)
class ReplayOptions:
    """The options of `mizzen spot replay`."""

    replayed: TraceOptions = included(TraceOptions)
    names: tuple[str, ...] = option("--policy", multiple=True, required=True, help="A policy, or all; repeatable.")
    overprovision: int = option(
        type=click.IntRange(min=0), default=1, show_default=True, help="Spot replicas of SpotHedge beyond the target."
    )
    outage_price_s: float = option(
        callback=_NOT_NEGATIVE, default=OUTAGE_PRICE_S, show_default=True,
        help="Price that spothedge+ sets on an outage, in seconds of the target on demand.",
    )  # fmt: skip
    requests: RequestOptions = included(RequestOptions)
    sweeps: tuple[str, ...] = option(
        "--sweep", multiple=True, metavar="FIELD=VALUE,...",
        help="Also replay with each value of overprovision, outage-price-s, cold-start-s, refused-after-s or "
        "od-price-ratio; repeatable.",
    )  # fmt: skip
    optimum: bool = option(is_flag=True, help="Also compute the cheapest plan for known capacity.")
    optimum_availability: float | None = option(
        metavar="PERCENT", type=Number(0, 100),
        help="The availability that the cheapest plan must have (default: 99.5).",
    )  # fmt: skip
    output: OutputOptions = included(OutputOptions)


@dataclass(frozen=True)
class FrontierOptions:
    """The options of `mizzen spot frontier`."""

    replayed: TraceOptions = included(TraceOptions)
    prices: str | None = option(
        "--outage-price-s", metavar="SECONDS,...",
        help="The outage prices to try (default: a ladder from 0 to 15360).",
    )  # fmt: skip
    json: Path | None = option(type=PATH, help="File for all results; -: standard output.")


@click.group()
def spot() -> None:
    """Compare policies for services on spot machines."""


@spot.command()
@takes(ReplayOptions)
def replay(given: ReplayOptions) -> None:
    """Replay policies on traces of spot capacity.

    Prints the availability and the cost of each policy; docs/spot.md has the rules.
    """
    from research.spot.replay_command import run_replay

    run_command(lambda: run_replay(given))


@spot.command()
@takes(FrontierOptions)
def frontier(given: FrontierOptions) -> None:
    """Show what each outage price would have cost on your traces.

    Compares the availability and the cost of spothedge+ with those of SpotHedge without and with a spare replica.
    """
    from research.spot.frontier_command import run_frontier

    run_command(lambda: run_frontier(given))
