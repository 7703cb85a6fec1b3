"""`make experiment`: compares schedulers on all cells, judges each cell, and writes docs/experiments.md.

An outcome that exists is not computed again: its file is named by a hash of the trace and of the code that decides. So
the command may be interrupted at any time, and after a change only what the change concerns runs again.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import lru_cache
from math import inf
from pathlib import Path

from research.experiments.bound import bound
from research.experiments.cases import (
    BASELINE,
    BASELINE_COMMIT,
    HIGH_LEVELS,
    LOADS,
    MAST,
    NODES,
    OURS,
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
from research.experiments.replay import fitting, outcome, scene_of
from research.experiments.report import Outcomes, verdicts, write_report
from research.experiments.scenes import build
from research.experiments.summary import CellFigures, figures
from research.rivals.policies import ALL_POLICIES
from simulation.policies import SchedulingPolicy
from simulation.run import Scenario

ROOT = Path(__file__).parents[2]
_SCENES = ("research/traces", "research/experiments/scenes.py", "research/experiments/fleets.py",
           "research/experiments/cases.py", "examples/philly/fleet.yaml")  # fmt: skip
"""What the files of a cell depend on, beside the trace."""
_RUNS = ("simulation", "infra/config/scheduling.py", "domain", "gms", "rms", "research/experiments/replay.py",
         "research/experiments/summary.py")  # fmt: skip
"""What outcomes depend on in addition."""
_RIVALS = ("research/rivals",)
_BOUND = "bound"


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
    parser.add_argument("--report", type=Path, help="the page whose tables are written; default: none")
    args = parser.parse_args()
    began_s = time.monotonic()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    data = None if args.data is None else args.data.resolve()
    there = [trace for trace in args.traces if _is_there(trace, data)]
    chosen = list(cases(there, args.loads, args.seeds, args.variants))
    failed = 0
    with ProcessPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run_cell, case, data, out, args.policies, THIN): case for case in chosen}
        try:
            for number, ended in enumerate(as_completed(running), 1):
                error = ended.exception()
                failed += error is not None
                said = f"{running[ended].name}: {error!r}" if error else ended.result()
                print(f"{number} of {len(chosen)} after {time.monotonic() - began_s:.0f} s: {said}", flush=True)
            run_baseline(chosen, data, out, args.jobs)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            sys.exit(f"interrupted; run the same command again to go on from what is in {out}")
    found = {case: outcomes(case, data, out) for case in chosen}
    for line in verdicts(found):
        print(line)
    if args.report:
        write_report(found, args.report)
    print(f"{len(chosen)} cells in {time.monotonic() - began_s:.0f} s; all runs took {_spent_s(found):.0f} s of CPU")
    if failed:
        sys.exit(f"{failed} cells failed")


def _is_there(trace: str, data: Path | None) -> bool:
    """Returns whether a trace is generated, or its files exist; says so if not."""
    if trace not in TRACES:
        return True
    files = [TRACES[trace].file, *([NODES] if trace == "openb" else [])]
    missing = [name for name in files if data is None or not (data / name).exists()]
    if missing:
        print(f"{trace} is left out: {missing[0]} is not in {data or 'a folder given by --data (DATA=FOLDER)'}")
    return not missing


def run_cell(case: ExperimentCase, data: Path | None, out: Path, policies: Sequence[str], sizes: Sizes) -> str:
    """Runs the policies of a cell that have no outcome yet, and the bound; returns what was done."""
    began_s = time.monotonic()
    folder = _scene(case, data, out, sizes)
    missing = [name for name in (*policies, _BOUND) if not _path(case, name, data, out).exists()]
    if missing:
        facts, scene = scene_of(folder)
        scene = fitting(scene)
        for name in missing:
            if name == _BOUND:
                body: object = bound(facts, scene, (max(HIGH_LEVELS), 7))
            else:
                body = asdict(figures(outcome(facts, scenario_for(scene, name), policy_of(name))))
            _write(_path(case, name, data, out), body)
    return f"{case.name}: {len(missing)} runs in {time.monotonic() - began_s:.0f} s"


def policy_of(name: str) -> SchedulingPolicy:
    """Returns the policy with a name; `mast` is `global` without the rules that MAST does not have."""
    return replace(ALL_POLICIES[OURS], name=MAST) if name == MAST else ALL_POLICIES[name]


def scenario_for(scene: Scenario, name: str) -> Scenario:
    """Returns the scenario of a policy: MAST has no reservations; all others have the live scheduler's defaults."""
    if name != MAST:
        return scene
    return replace(scene, settings=scene.settings.model_copy(update={"reserve_after_s": inf}))


def run_baseline(chosen: Iterable[ExperimentCase], data: Path | None, out: Path, jobs: int) -> None:
    """Replays the cells that have no outcome of the baseline yet, in a checkout of its commit below `out`."""
    missing = [case for case in chosen if not _path(case, BASELINE, data, out).exists()]
    checkout = out / BASELINE_COMMIT
    if missing and not checkout.exists():
        made = subprocess.run(
            ["git", "worktree", "add", "--detach", str(checkout), BASELINE_COMMIT], cwd=ROOT, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        if made.returncode:
            print(f"no baseline: {made.stderr.strip()}")
            return
    parts = [missing[k::jobs] for k in range(jobs)]
    running = []
    for part in filter(None, parts):
        pairs = [(str(_scene(case, data, out)), str(_raw(case, data, out))) for case in part]
        command = [
            sys.executable,
            str(Path(__file__).with_name("baseline.py")),
            *(name for pair in pairs for name in pair),
        ]
        env = {**os.environ, "PYTHONPATH": str(checkout)}
        running.append(subprocess.Popen(command, cwd=checkout, env=env, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in running]
    for case in missing:
        raw = _raw(case, data, out)
        if raw.exists():
            _write(_path(case, BASELINE, data, out), asdict(figures(json.loads(raw.read_text()))))
            raw.unlink()
    if any(codes):
        print(f"the baseline failed on some cells (exit codes {codes})")


def outcomes(case: ExperimentCase, data: Path | None, out: Path) -> Outcomes:
    """Returns the outcomes of a cell that exist."""
    paths = {name: _path(case, name, data, out) for name in (*POLICIES, BASELINE)}
    ran = {name: CellFigures(**json.loads(path.read_text())) for name, path in paths.items() if path.exists()}
    most = _path(case, _BOUND, data, out)
    bounds = {int(level): gpu_h for level, gpu_h in json.loads(most.read_text()).items()} if most.exists() else {}
    return Outcomes(ran, bounds)


# ------------------------------------------------------------------------------------------------------------- details


def _scene(case: ExperimentCase, data: Path | None, out: Path, sizes: Sizes = THIN) -> Path:
    """Returns the folder of a cell's files, which are written if they do not exist."""
    scenes = out / f"scenes-{_hash(_SCENES)}-{_trace_hash(case.trace, data)}"
    if not (case.folder(scenes) / "case.json").exists():
        build(case, data or Path(), scenes, sizes)
    return case.folder(scenes)


def _path(case: ExperimentCase, name: str, data: Path | None, out: Path) -> Path:
    """Returns the file of an outcome."""
    sources: tuple[str, ...] = _SCENES
    if name == _BOUND:
        sources = (*_SCENES, "research/experiments/bound.py")
    elif name != BASELINE:
        sources = (*_SCENES, *_RUNS, *(_RIVALS if name not in (OURS, MAST, "federated") else ()))
    return out / "outcomes" / f"{case.name}.{name}.{_hash(sources)}-{_trace_hash(case.trace, data)}.json"


def _raw(case: ExperimentCase, data: Path | None, out: Path) -> Path:
    path = _path(case, BASELINE, data, out)
    path.parent.mkdir(exist_ok=True)
    return path.with_suffix(".raw")


def _write(path: Path, body: object) -> None:
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(body))
    new.replace(path)


@lru_cache
def _hash(names: tuple[str, ...]) -> str:
    """Returns a hash of source files, and of the Python files in folders."""
    digest = hashlib.sha256()
    for name in names:
        path = ROOT / name
        for source in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(f"{source.relative_to(ROOT)}\0".encode() + source.read_bytes())
    return digest.hexdigest()[:10]


@lru_cache
def _trace_hash(trace: str, data: Path | None) -> str:
    if trace not in TRACES or data is None:
        return "generated"
    files = [TRACES[trace].file, *([NODES] if trace == "openb" else [])]
    return hashlib.sha256(b"".join((data / name).read_bytes() for name in files)).hexdigest()[:10]


def _spent_s(found: dict[ExperimentCase, Outcomes]) -> float:
    return sum(one.cpu_s for cell in found.values() for one in cell.ran.values())


if __name__ == "__main__":
    main()
