"""`make experiment-pools`: compares fleets with and without pools on real traces, and writes docs/experiments-pools.md.

The command may be interrupted at any time: outcomes that exist in `--out` are not computed again.
"""

import argparse
import json
import time
from pathlib import Path

from research.experiments.cases import TRACES, ExperimentCase, Sizes
from research.experiments.pools.fleets import FLEETS, LOAD, SEEDS, build_fleets
from research.experiments.pools.report import write_report
from research.experiments.replay import outcome, scene_of
from simulation.policies import POLICIES

ROOT = Path(__file__).parents[3]
POLICY = "global"


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="experiment-pools", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with ml-jobs, spot-availability and prices")
    parser.add_argument("--out", type=Path, required=True, help="the folder for cases and outcomes")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), choices=SEEDS)
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "experiments-pools.md")
    parser.add_argument("--only-report", action="store_true", help="only write the report")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cases = [ExperimentCase(trace, LOAD, seed) for seed in args.seeds for trace in TRACES]
    for case in [] if args.only_report else cases:
        run(case, args.data, args.out, Sizes())
    write_report(args.out, args.report)


def run(case: ExperimentCase, data: Path, out: Path, sizes: Sizes) -> None:
    """Runs the fleets of a case that have no outcome yet."""
    folder = case.folder(out)
    built = folder / "built"
    if not built.exists():
        build_fleets(case, data, out, sizes)
        built.touch()
    for fleet in FLEETS:
        path = folder / f"{fleet}.json"
        if not path.exists():
            began_s = time.monotonic()
            facts, scene = scene_of(folder, f"{fleet}.yaml")
            new = path.with_suffix(".new")
            new.write_text(json.dumps(outcome(facts, scene, POLICIES[POLICY])))
            new.replace(path)
            print(f"{case.name} on {fleet}: {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
