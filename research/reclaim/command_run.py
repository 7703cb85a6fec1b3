"""Runs `mizzen reclaim simulate`: reads the scenario, simulates with progress, and writes tables, JSON and a report."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from infra.errors import ConfigurationError
from research.reclaim.adaptivity import Adaptivity, adaptivity
from research.reclaim.compare import Runner, figures
from research.reclaim.documents import read
from research.reclaim.scenario import EPOCH_S, STEP_S, Scenario
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


@dataclass
class Simulated:
    """What a command has simulated so far."""

    scenario: Scenario
    """The scenario of the first seed."""
    gap: Adaptivity | None
    seeds: list[int]
    rows: list[dict[str, Any]] = field(default_factory=list)


def run_simulation(
    *,
    scenario: Path,
    names: Sequence[str],
    seeds: int,
    seed: int | None,
    data: Path | None,
    json_path: Path | None,
    report_path: Path | None,
) -> int:
    """Runs the command; returns the exit code. An interrupted run prints the results that are complete.

    Raises:
        ConfigurationError: an option or the scenario is not valid; the message names it.
    """
    chosen = _systems(names)
    check_outputs({"--json": json_path, "--report": report_path}, {"--scenario": scenario})
    err = Console(stderr=True)
    try:
        document = read(scenario)
        runner = Runner(document, scenario.parent, data)
        first = document.seed if seed is None else seed
        numbers = list(range(first, first + seeds))
        given = runner.scenario(first)
        found = Simulated(given, gap_of(given), numbers)
        with interrupts() as interrupted, shown(err) as show:
            said = show("simulating")
            total = len(numbers) * len(chosen)
            for row in runner.rows(numbers, chosen):
                found.rows.append(row)
                said(len(found.rows) / total, f"{row['system']}, seed {row['seed']}")
                if interrupted():
                    break
    except ScenarioError as error:
        raise ConfigurationError(f"--scenario: {error}") from None
    if json_path is not None:
        write_json(json_path, document_of(found))
    if STANDARD not in (json_path, report_path):
        click.echo(f"{about(found)}\n")
        click.echo("\n\n".join(str(table).rstrip() for table in tables(figures(found.rows))))
    if report_path is not None:
        from research.reclaim.report import render  # It imports matplotlib, which takes a second.

        write_text(report_path, render(found))
    if len(found.rows) < len(numbers) * len(chosen):
        err.print("mizzen: interrupted: not all systems and seeds are shown", highlight=False, soft_wrap=True)
        return EXIT_INTERRUPTED
    return 0


def gap_of(scenario: Scenario) -> Adaptivity | None:
    """Returns the adaptivity gap of theorem 2 for the scenario's mean hazard and the links within buildings; None if no
    epoch has a hazard.
    """
    per_epoch = round(EPOCH_S / STEP_S)
    epochs = scenario.links_bytes_s.shape[1] // per_epoch
    local = scenario.links_bytes_s[0, : epochs * per_epoch].reshape(epochs, per_epoch).mean(1)
    hazard = scenario.emergency_per_h.mean(0)[:epochs]
    good = hazard > 0
    if not good.any():
        return None
    return adaptivity(hazard[good], local[good], 1.0)


def about(found: Simulated) -> str:
    """Returns a paragraph about the scenario."""
    one = found.scenario
    departs = one.lending.departs
    without = (one.lending.notice_s[departs] == 0).mean() if departs.any() else 0.0
    said = (
        f"{one.name}: {len(one.machines)} machines with {int(one.machines.gpus.sum())} GPUs in {len(one.buildings)} "
        f"buildings, {one.length_s / 86400:g} days ({(one.length_s - one.measured_from_s) / 86400:g} measured); seed "
        f"{one.seed}: {int(departs.sum())} departures, {without:.0%} without notice, "
        f"{one.lent_gpu_s / 3600:,.0f} GPU hours lent in the measured days; {len(one.work)} jobs of "
        f"{float(one.work.gpus @ one.work.work_s) / 3600:,.0f} GPU hours; correlation of hazard and bandwidth "
        f"{one.correlation():.2f}"
    )
    if found.gap is not None:
        said += f"; adaptivity gap (theorem 2, one link): {found.gap.ratio - 1:.1%}"
    return said + "."


def document_of(found: Simulated) -> dict[str, Any]:
    """Returns the results as JSON."""
    gap = None
    if found.gap is not None:
        gap = {name: None if value != value else value for name, value in asdict(found.gap).items()}
        gap["ratio"] = found.gap.ratio
    return {
        "scenario": found.scenario.name,
        "about": about(found),
        "seeds": found.seeds,
        "gap": gap,
        "rows": found.rows,
    }


def _systems(names: Sequence[str]) -> list[System]:
    chosen: list[str] = []
    for name in names:
        if name not in SYSTEMS and name not in _GROUPS:
            known = ", ".join((*_GROUPS, *SYSTEMS))
            raise ConfigurationError(f"--system: {name}: no such system: give one of {known}")
        chosen += _GROUPS.get(name, (name,))
    return [SYSTEMS[name] for name in dict.fromkeys(chosen)]
