"""`mizzen reclaim simulate`: the simulator of machines that their owners take back. Needs no running installation.

The SDK's command passes `mizzen reclaim simulate` to the plugin `reclaim-simulate`, because `mizzen reclaim` itself is
the command of a machine's owner.
"""

from pathlib import Path
from typing import Any

import click

from server.commands import run_command


@click.command("reclaim-simulate")
@click.option("--scenario", type=click.Path(path_type=Path, dir_okay=False), required=True, help="YAML or JSON file.")
@click.option("--system", "names", multiple=True, required=True, help="A system, table-3, table-4 or all; repeatable.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Scenarios, one for each seed.")
@click.option("--seed", type=click.IntRange(min=0), help="The first seed (default: the scenario's).")
@click.option(
    "--data", type=click.Path(path_type=Path, file_okay=False), help="Folder of a failure trace without a folder."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for all results; -: standard output.")
@click.option(
    "--report", "report_path", type=click.Path(path_type=Path), help="File for an HTML report; -: standard output."
)
def reclaim_simulate(**options: Any) -> None:
    """Simulate machines that their owners take back (`mizzen reclaim simulate`).

    Compares ReclaimNet's protocols with other systems; docs/reclaim-experiments.md has the scenario file.
    """
    from research.reclaim.command_run import run_simulation

    run_command(lambda: run_simulation(**options))
