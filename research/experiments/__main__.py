"""`make experiment`: compares schedulers on real traces, and writes docs/experiments.md and its pictures.

The command may be interrupted at any time: outcomes that exist in `--out` are not computed again.
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from research.experiments.cases import BEFORE, FEW_REGIONS, LOADS, SEEDS, VARIANTS, ExperimentCase, cases
from research.experiments.report import write_report

ROOT = Path(__file__).parents[2]
REPLAY = Path(__file__).with_name("replay.py")
_SAYING = threading.Lock()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="experiment", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder with philly.csv and openb's two files")
    parser.add_argument("--out", type=Path, required=True, help="the folder for cases and outcomes")
    parser.add_argument("--before", type=Path, help="an earlier checkout, whose policy `global` is run for comparison")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), choices=SEEDS)
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of cases that run concurrently")
    parser.add_argument("--report", type=Path, default=ROOT / "docs" / "experiments.md")
    parser.add_argument("--only-report", action="store_true", help="write the report from the existing outcomes")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = list(cases(args.loads, args.seeds, args.variants))
    failed = [] if args.only_report else _run_all(chosen, args.data.resolve(), args.out, args.before, args.jobs)
    write_report(args.out, args.report)
    if failed:
        sys.exit(f"{len(failed)} cases failed: {', '.join(failed)}")


def _run_all(chosen: Sequence[ExperimentCase], data: Path, out: Path, before: Path | None, jobs: int) -> list[str]:
    """Runs the cases; returns the names of those that failed."""
    began_s = time.monotonic()
    done = 0
    failed: list[str] = []

    def run(case: ExperimentCase) -> None:
        nonlocal done
        why = _run(case, data, out, before)
        with _SAYING:
            done += 1
            if why:
                failed.append(case.name)
            minutes = (time.monotonic() - began_s) / 60
            how = f": {why}" if why else ""
            print(f"{done} of {len(chosen)} after {minutes:.0f} min: {case.name}{how}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, chosen))
    return failed


def _run(case: ExperimentCase, data: Path, out: Path, before: Path | None) -> str:
    """Runs one case in separate processes; returns the error, or an empty string."""
    folder = case.folder(out)
    ran = partial(subprocess.run, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if not (folder / "case.json").exists():
        made = ran([sys.executable, "-m", "research.experiments.scenes", str(data), str(out), case.name], cwd=ROOT)
        if made.returncode:
            return made.stderr.strip()[-300:]
    if not (folder / "bound.json").exists():
        found = ran([sys.executable, "-m", "research.experiments.bound", str(folder)], cwd=ROOT)
        if found.returncode:
            return found.stderr.strip()[-300:]
    runs = [(ROOT, [sys.executable, str(REPLAY), str(folder), *case.policies])]
    if before is not None and case.variant != FEW_REGIONS:
        runs.append((before.resolve(), [sys.executable, str(REPLAY), str(folder), "global", "--as", BEFORE]))
    for checkout, command in runs:
        ended = ran(command, cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)})
        if ended.returncode:
            return ended.stderr.strip()[-300:]
    return ""


if __name__ == "__main__":
    main()
