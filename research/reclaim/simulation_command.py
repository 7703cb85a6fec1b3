"""Compares systems for `mizzen reclaim simulate`: simulates with progress, and writes tables, JSON and a report."""

from collections.abc import Sequence

import click
from rich.console import Console

from infra.errors import ConfigurationError
from research.reclaim.commands import ReclaimOptions
from research.reclaim.compare import Runner, figures
from research.reclaim.results import Results
from research.reclaim.scenario_files import read
from research.reclaim.systems import ABLATION, SYSTEMS, TABLE_3, System
from research.reclaim.tables import tables
from research.reclaim.traces import ScenarioError
from server.outputs import STANDARD, check_outputs, write_json, write_text
from server.progress import EXIT_INTERRUPTED, interrupts, shown

_GROUPS = {
    "table-3": TABLE_3,
    "table-4": tuple(system.name for system in ABLATION),
    "all": (*TABLE_3, "reclaimnet", "sdk", "joint", *(system.name for system in ABLATION[:4]), "p2+p3"),
}


def run_simulation(given: ReclaimOptions) -> int:
    """Runs the command; returns the exit code. An interrupted run prints the results that are complete.

    Raises:
        ConfigurationError: an option or the scenario is not valid; the message names it.
    """
    chosen, output = _systems(given.names), given.output
    check_outputs({"--json": output.json, "--report": output.report}, {"--scenario": given.scenario})
    err = Console(stderr=True)
    try:
        document = read(given.scenario)
        runner = Runner(document, given.scenario.parent, given.data)
        first = document.seed if given.seed is None else given.seed
        found = Results(runner.scenario(first), list(range(first, first + given.seeds)))
        total = given.seeds * len(chosen)
        with interrupts() as interrupted, shown(err) as show:
            said = show("simulating")
            for row in runner.rows(found.seeds, chosen):
                found.rows.append(row)
                said(len(found.rows) / total, f"{row['system']}, seed {row['seed']}")
                if interrupted():
                    break
    except ScenarioError as error:
        raise ConfigurationError(f"--scenario: {error}") from None
    if output.json is not None:
        write_json(output.json, found.document())
    if STANDARD not in (output.json, output.report):
        click.echo("\n\n".join([found.about(), *map(str, tables(figures(found.rows)).values())]))
    if output.report is not None:
        from research.reclaim.report import render  # It imports matplotlib, which takes a second.

        write_text(output.report, render(found))
    if len(found.rows) < total:
        err.print("mizzen: interrupted: not all systems and seeds are shown", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    return 0


def _systems(names: Sequence[str]) -> list[System]:
    chosen: list[str] = []
    for name in names:
        if name not in SYSTEMS and name not in _GROUPS:
            known = ", ".join((*_GROUPS, *SYSTEMS))
            raise ConfigurationError(f"--system: {name}: no such system: give one of {known}")
        chosen += _GROUPS.get(name, (name,))
    return [SYSTEMS[name] for name in dict.fromkeys(chosen)]
