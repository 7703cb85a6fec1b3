"""Runs the systems of `simulation/reclaim/` on scenarios and seeds, for docs/reclaim-experiments.md.

    python -m research.experiments.reclaim.systems --scenario FILE --out rows.jsonl --seeds 10

Results that are already in the output file are not computed again, so an interrupted run resumes.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from research.reclaim.compare import Runner
from research.reclaim.scenario_files import read
from research.reclaim.systems import SYSTEMS, System

_ALIASES = ("p1+p2+p3", "p1+p2", "p1+p3")
"""The same systems as published, no-shaping and random-dst."""
VARIED = (
    ("rules", "min_local", (1, 5)), ("rules", "max_load", (0.5, 1.0)), ("rules", "alpha", (0.5, 2.0)),
    ("p1", "write_share", (0.1, 0.3, 0.5, 1.0)), ("", "research_share", (0.2, 0.4)),
    ("", "loss_budget_s", (30.0, 150.0, 600.0, 1800.0)), ("", "restart_s", (10.0, 60.0)), ("", "window_days", (3, 28)),
    ("", "period_s", (1800.0, 3600.0)), ("", "traffic_period_s", (1.0, 60.0)), ("", "budget_confidence", (0.9,)),
    ("", "bandwidth_confidence", (0.5,)),
)  # fmt: skip
"""The constants of the sensitivity table, with the values that are tried in addition to the default."""
PARTICIPATION = (0.75, 0.5, 0.25, 0.0)
"""The shares of machines whose agent limits their traffic (section X)."""


def sensitivity() -> list[System]:
    """Returns `published` with one constant changed, for each value in `VARIED`."""
    base = SYSTEMS["published"]
    found = []
    for part, name, values in VARIED:
        for value in values:
            if part:
                changed = base.with_parameters(**{part: replace(getattr(base.parameters, part), **{name: value})})
            else:
                changed = base.with_parameters(**{name: value})
            found.append(replace(changed, name=f"{name}={value:g}"))
    return found


def main() -> None:
    """Appends the results of all systems to the output file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="the folder of a failure trace")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--system", action="append", help="a system; default: all")
    parser.add_argument("--sensitivity", action="store_true", help="vary the constants of published instead")
    given = parser.parse_args()
    document = read(given.scenario)
    groups = [(document, [system for name, system in SYSTEMS.items() if name not in _ALIASES])]
    if given.sensitivity:
        base = SYSTEMS["published"]
        groups = [(document, sensitivity())] + [
            (document.model_copy(update={"participation": share}), [replace(base, name=f"participation={share:g}")])
            for share in PARTICIPATION
        ]
    if given.system:
        groups = [(one, [system for system in systems if system.name in given.system]) for one, systems in groups]
    done = set()
    if given.out.exists():
        done = {(row["system"], row["seed"]) for row in map(json.loads, given.out.read_text().splitlines())}
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for one, systems in groups:
            left = [system for system in systems if (system.name, seed) not in done]
            for row in Runner(one, given.scenario.parent, given.data).rows([seed], left) if left else ():
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row["system"], seed, round(row["loss_gpu_h"], 2), round(row["wall_s"], 1), flush=True)


if __name__ == "__main__":
    main()
