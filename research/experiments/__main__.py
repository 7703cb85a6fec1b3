"""`make experiment`: compares schedulers on all cells, judges each cell, and writes docs/experiments.md.

An outcome that exists is not computed again: its file is named by a hash of the trace and of the code that decides. So
the command may be interrupted at any time, and after a change only the outcomes that depend on the changed code are
computed again.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from research.experiments.bound import bound
from research.experiments.cases import (
    BASELINE,
    BASELINE_COMMIT,
    HIGH_LEVELS,
    LOADS,
    NODES,
    POLICIES,
    SEEDS,
    SOURCES,
    THIN,
    TRACES,
    VARIANTS,
    ExperimentCase,
    Sizes,
    cases,
)
from research.experiments.policies import policy_of, scenario_for
from research.experiments.replay import fitting, outcome, scene_of
from research.experiments.report import Outcomes, spent_s, verdicts, write_report
from research.experiments.store import BOUND, ROOT, OutcomeStore
from research.experiments.summary import figures


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="experiment", description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder with philly.csv and openb's two files")
    parser.add_argument("--out", type=Path, required=True, help="the folder for cells and outcomes")
    parser.add_argument("--traces", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), choices=SEEDS)
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of cells that run concurrently")
    parser.add_argument("--full", action="store_true", help="larger fleets and longer spans: hours")
    parser.add_argument("--report", type=Path, help="the page whose tables are written; default: none")
    args = parser.parse_args()
    began_s = time.monotonic()
    data = None if args.data is None else args.data.resolve()
    out, sizes = (args.out / "full", Sizes()) if args.full else (args.out, THIN)
    out.mkdir(parents=True, exist_ok=True)
    store = OutcomeStore(data, out.resolve(), sizes)
    there = [trace for trace in args.traces if _is_there(trace, data)]
    chosen = list(cases(there, args.loads, args.seeds, args.variants))
    failed = 0
    with ProcessPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run_cell, case, store, args.policies): case for case in chosen}
        try:
            for number, ended in enumerate(as_completed(running), 1):
                error = ended.exception()
                failed += error is not None
                said = f"{running[ended].name}: {error!r}" if error else ended.result()
                print(f"{number} of {len(chosen)} after {time.monotonic() - began_s:.0f} s: {said}", flush=True)
            failed += run_baseline(chosen, store, args.jobs)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            sys.exit(f"interrupted; run the same command again to continue from what is in {out}")
    found = {case: outcomes(case, store) for case in chosen}
    for line in verdicts(found):
        print(line)
    if args.report:
        write_report(found, args.report)
    print(f"{len(chosen)} cells in {time.monotonic() - began_s:.0f} s; all runs took {spent_s(found):.0f} s of CPU")
    if failed:
        sys.exit(f"{failed} cells failed")


def _is_there(trace: str, data: Path | None) -> bool:
    """Returns whether a trace is generated or its files exist; prints a line if a file is missing."""
    if trace not in TRACES:
        return True
    files = [TRACES[trace].file, *([NODES] if trace == "openb" else [])]
    missing = [name for name in files if data is None or not (data / name).exists()]
    if missing:
        print(f"{trace} is left out: {missing[0]} is not in {data or 'a folder given by --data (DATA=FOLDER)'}")
    return not missing


def run_cell(case: ExperimentCase, store: OutcomeStore, policies: Sequence[str]) -> str:
    """Runs the policies of a cell that have no outcome yet, and the bound; returns what was done."""
    began_s = time.monotonic()
    missing = [name for name in (*policies, BOUND) if not store.path(case, name).exists()]
    if missing:
        facts, scene = scene_of(store.scene(case))
        scene = fitting(scene)
        for name in missing:
            if name == BOUND:
                body: object = bound(facts, scene, (max(HIGH_LEVELS), 7))
            else:
                body = outcome(facts, scenario_for(scene, name), policy_of(name))
            store.write(case, name, body)
    return f"{case.name}: {len(missing)} runs in {time.monotonic() - began_s:.0f} s"


def run_baseline(chosen: Iterable[ExperimentCase], store: OutcomeStore, jobs: int) -> int:
    """Replays the cells that have no outcome of the baseline yet, with its commit's files below `store.out`.

    Returns the number of cells that failed.
    """
    missing = [case for case in chosen if not store.path(case, BASELINE).exists()]
    checkout = store.out / BASELINE_COMMIT
    if missing and not checkout.exists():
        made = subprocess.run(["git", "archive", BASELINE_COMMIT], cwd=ROOT, capture_output=True, check=False)
        if made.returncode:
            print(f"no baseline: {made.stderr.decode().strip()}")
            return 0
        (new := checkout.with_suffix(".new")).mkdir(exist_ok=True)
        subprocess.run(["tar", "-x", "-C", str(new)], input=made.stdout, check=True)
        new.rename(checkout)
    running = []
    for part in filter(None, (missing[k::jobs] for k in range(jobs))):
        names = [str(name) for case in part for name in (store.scene(case), store.path(case, BASELINE))]
        command = [sys.executable, str(Path(__file__).with_name("baseline.py")), *names]
        env = {**os.environ, "PYTHONPATH": str(checkout)}
        running.append(subprocess.Popen(command, cwd=checkout, env=env, stdout=subprocess.DEVNULL))
    for process in running:
        process.wait()
    failed = [case.name for case in missing if not store.path(case, BASELINE).exists()]
    if failed:
        print(f"the baseline failed on {', '.join(failed)}")
    return len(failed)


def outcomes(case: ExperimentCase, store: OutcomeStore) -> Outcomes:
    """Returns the outcomes of a cell that exist."""
    bodies = {name: store.read(case, name) for name in (*POLICIES, BASELINE)}
    ran = {name: figures(body) for name, body in bodies.items() if body is not None}
    bounds = {int(level): gpu_h for level, gpu_h in (store.read(case, BOUND) or {}).items()}
    return Outcomes(ran, bounds)


if __name__ == "__main__":
    main()
