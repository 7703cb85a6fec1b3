"""`mizzen reclaim simulate`: the simulator of machines that their owners take back. Needs no running installation.

The SDK's command passes `mizzen reclaim simulate` to the plugin `reclaim-simulate`, because `mizzen reclaim` itself is
the command of a machine's owner.
"""

from dataclasses import dataclass
from pathlib import Path

import click

from server.commands import run_command
from server.options import FILE, OutputOptions, included, option, takes


@dataclass(frozen=True)
class ReclaimOptions:
    """The options of `mizzen reclaim simulate`."""

    scenario: Path = option(type=FILE, required=True, help="YAML or JSON file.")
    names: tuple[str, ...] = option(
        "--system", multiple=True, required=True, help="A system, table-3, table-4 or all; repeatable."
    )
    seeds: int = option(type=click.IntRange(min=1), default=1, show_default=True, help="Scenarios, one for each seed.")
    seed: int | None = option(type=click.IntRange(min=0), help="The first seed (default: the scenario's).")
    data: Path | None = option(
        type=click.Path(path_type=Path, file_okay=False), help="Folder of a failure trace without a folder."
    )
    output: OutputOptions = included(OutputOptions)


@click.command("reclaim-simulate")
@takes(ReclaimOptions)
def reclaim_simulate(given: ReclaimOptions) -> None:
    """Simulate machines that their owners take back (`mizzen reclaim simulate`).

    Compares ReclaimNet's protocols with other systems; docs/reclaim-experiments.md has the scenario file.
    """
    from research.reclaim.simulation_command import run_simulation

    run_command(lambda: run_simulation(given))
