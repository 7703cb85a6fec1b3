"""`mizzen what-if`: simulates the live fleet from a snapshot, unchanged and with a change."""

from collections.abc import Sequence
from math import inf
from pathlib import Path

from server.simulating import Case, measured_span, simulate, time_s
from simulation.live import change, live_scenario, load_live
from simulation.policies import policies
from simulation.settings import SimulationSettings, override


def run_what_if(
    *,
    snapshot: Path,
    changes: Sequence[str],
    drains: Sequence[str],
    names: Sequence[str],
    json_path: Path | None,
    report_path: Path | None,
    seed: int,
    until: str | None,
    measure: str | None,
    params: Sequence[str],
) -> int:
    """Runs `mizzen what-if`; returns the exit code.

    Raises:
        ConfigurationError: an option or a value in the file is invalid; the message names it.
    """
    chosen = policies(names)
    until_s, measured = time_s("--until", until, inf), measured_span(measure)
    live = load_live(snapshot)
    settings = override(SimulationSettings(), tuple(params))
    cases = [Case(live_scenario(live, settings, seed, until_s, measured))]
    if changes or drains:
        changed = change(live, changes, drains)
        says = ", ".join((*changes, *(f"drain {region}" for region in drains)))
        cases.append(Case(live_scenario(changed, settings, seed, until_s, measured), says))
    return simulate(cases, chosen, json_path, report_path)
