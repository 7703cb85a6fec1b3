"""`mizzen spot frontier`: replays the settings of the frontier with progress, and writes its table and JSON."""

from dataclasses import asdict

import click
from rich.console import Console

from research.spot.commands import FrontierOptions
from research.spot.frontier import PRICES_S, FrontierPoint, frontier_of
from research.spot.replay_command import read_windows
from research.spot.runs import PolicyCase, ReplayBench
from research.spot.sweeps import read_values
from server.outputs import STANDARD, check_outputs, write_json
from server.progress import EXIT_INTERRUPTED, interrupts, shown


def run_frontier(given: FrontierOptions) -> int:
    """Runs `mizzen spot frontier`; returns the exit code. An interrupted run prints nothing.

    Raises:
        ConfigurationError: an option or a trace file is not valid; the message names it.
    """
    flag = "--outage-price-s"
    prices_s = PRICES_S if given.prices is None else read_values(flag, flag.removeprefix("--"), given.prices)
    check_outputs({"--json": given.json}, {})
    trace, windows, settings = read_windows(given.replayed)
    cases = [PolicyCase("spothedge+", settings, 0, price_s) for price_s in prices_s]
    cases += [PolicyCase("spothedge", settings, extra) for extra in (0, 1)]
    err = Console(stderr=True)
    with interrupts() as interrupted, shown(err) as show:
        bench, points, progress = ReplayBench(trace, windows, None, interrupted, {}), [], show("frontier")
        for at, case in enumerate(cases):

            def replayed(done: int, before: int = at * windows.count) -> None:
                whole = len(cases) * windows.count
                progress((before + done) / whole, f"{before + done:,} of {whole:,} windows replayed")

            result = None if interrupted() else bench.run(case, replayed)
            if result is None:
                err.print("mizzen: interrupted: nothing is shown", highlight=False)
                return EXIT_INTERRUPTED
            points.append(FrontierPoint(case, result))
    frontier = frontier_of(points)
    if given.json is not None:
        body = {"traces": str(given.replayed.traces), "settings": asdict(settings), "windows": asdict(windows)}
        write_json(given.json, {**body, **frontier.to_json()})
    if given.json != STANDARD:
        click.echo(str(frontier.table()))
    return 0
