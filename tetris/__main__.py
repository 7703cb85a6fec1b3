"""Computes a plan in a separate process: `python -m tetris FOLDER`.

A separate process is used because compiled searches block the interpreter and large instances need much memory. The
input in the folder is the instance (`instance/`), the partitions that jobs read (`reads.json`), and `request.json`:
`time_s`, `seed`, `policy` (the replica policy; null to plan homes only) and `droppable` (the replicas, as [table,
region], that the placement run may drop). The results are written to the same folder. Each line on stdout reports
progress: a fraction from 0 to 1, the phase, and the total.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tetris.climb import SearchStep, climb, load, may_prove
from tetris.columns import Columns
from tetris.documents import plan_document, read_reads
from tetris.folders import read_folder
from tetris.pieces import RequiredPieces
from tetris.placement_run import plan_placement_run
from tetris.replicas import ReplicaPolicy

_PATIENCE = 3.0
"""On a very busy machine, the search ends after this multiple of its budget in real time. The activity that waits for
this process gives it four times the budget, and more than `_LEAST_S` in addition."""
_LEAST_S = 60.0


def main(folder: Path) -> None:
    """Reads the request and writes `plan.json`; with a policy also `replicas.json`, `moves.jsonl` and `report.json`."""
    request = json.loads((folder / "request.json").read_text())
    columns = read_folder(folder / "instance")
    how: dict[str, Any] = {"time_s": request["time_s"], "seed": request["seed"], "listener": _print_step}
    load(may_prove(columns))
    latest_s = time.monotonic() + max(_LEAST_S, _PATIENCE * request["time_s"])
    how["stop"] = lambda: time.monotonic() > latest_s
    if request["policy"] is None:
        _write(folder / "plan.json", plan_document(columns.plan_of(climb(columns, **how).home)))
        return
    needed = RequiredPieces.of(columns, read_reads((folder / "reads.json").read_bytes()))
    stay = _staying(columns, {(table, region) for table, region in request.get("droppable", [])})
    plan = plan_placement_run(columns, _policy(request["policy"]), needed=needed, stay=stay, **how)
    _write(folder / "plan.json", plan_document(plan.homes))
    _write(folder / "replicas.json", plan.replicas)
    with (folder / "moves.jsonl").open("w") as lines:
        for move in plan.moves:
            lines.write(json.dumps(asdict(move)) + "\n")
    report = {"summary": plan.summary.document(), "unplaced": plan.unplaced, "unplaced_jobs": plan.unplaced_jobs}
    _write(folder / "report.json", report)


def _staying(columns: Columns, droppable: set[tuple[str, str]]) -> npt.NDArray[np.bool_]:
    owner = np.repeat(np.arange(len(columns.table_names)), np.diff(columns.replica_start))
    pairs = zip(owner, columns.replica, strict=True)
    return np.array([(columns.table_names[t], columns.regions[r]) not in droppable for t, r in pairs], np.bool_)


def _policy(given: dict[str, Any]) -> ReplicaPolicy:
    together = {tuple(sorted(pair["regions"])): pair["probability"] for pair in given["correlated"]}
    return ReplicaPolicy(**{**given, "correlated": together})


def _print_step(step: SearchStep) -> None:
    print(f"{step.part:.4f} {step.phase}: total {step.total:.6g}", flush=True)


def _write(path: Path, body: Any) -> None:
    path.write_text(json.dumps(body) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
