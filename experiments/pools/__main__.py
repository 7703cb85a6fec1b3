"""`make experiment-pools`: fleets with and without pools on real traces; writes docs/experiments-pools.md.

What is in `--out` already is not run again: it may be interrupted at any time.
"""

import argparse
import json
import time
from pathlib import Path

from experiments.cases import TRACES, Case, Sizes
from experiments.pools.fleets import FLEETS, LOAD, SEEDS, build_fleets
from experiments.pools.report import write_report
from experiments.replay import outcome, scene_of

ROOT = Path(__file__).parent.parent.parent
POLICY = "global"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="experiment-pools", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="has ml-jobs, spot-availability and prices")
    parser.add_argument("--out", type=Path, required=True, help="the folder for cases and outcomes")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), choices=SEEDS)
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "experiments-pools.md")
    parser.add_argument("--only-report", action="store_true", help="of what has been run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cases = [Case(trace, LOAD, seed) for seed in args.seeds for trace in TRACES]
    for case in [] if args.only_report else cases:
        run(case, args.data, args.out, Sizes())
    write_report(args.out, args.report)


def run(case: Case, data: Path, out: Path, sizes: Sizes) -> None:
    """Runs what of a case has not been run."""
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
            new.write_text(json.dumps(outcome(facts, scene, POLICY)))
            new.replace(path)
            print(f"{case.name} on {fleet}: {time.monotonic() - began_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
