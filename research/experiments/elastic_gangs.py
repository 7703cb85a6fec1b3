"""Measures what elastic gangs change: waits, completion times and lost GPU hours, on replays of traces.

    python -m research.experiments.elastic_gangs --data FOLDER philly

The scenarios are those of `start_intervals`: machines of eight GPUs, so many that the trace offers 0.8 of their GPU
hours. A share of the gangs of at least 4 GPUs, drawn by seed, consists of tasks of one GPU. Without elasticity, such a
gang has its GPUs of the trace; with it, it has half of them to twice as many. The work is divided by the tasks: with n
times as many tasks it needs 1/n of the time, without any loss by communication.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from research.experiments.start_intervals import SPANS_S, rows_of, scenario
from research.traces.rows import TraceRow
from simulation.policies import POLICIES
from simulation.random_draws import chance
from simulation.run import Run, Scenario
from simulation.transitions import Happened

GANG_GPUS = 4
DAY_S = 86400.0
VARIANTS = ("fixed", "starts", "grows", "shrinks")
"""Fixed numbers of tasks; numbers that change from attempt to attempt; growth, too; and victims that shrink, too."""


def elastic_rows(rows: Sequence[TraceRow], share: float, seed: int, *, elastic: bool) -> list[TraceRow]:
    """Returns the rows, in which a share of the gangs has tasks of one GPU and, if `elastic`, a range of them."""
    out = []
    for row in rows:
        if row.gpus >= GANG_GPUS and chance(seed, "elastic", row.workload_id) < share:
            sizes = (max(1, row.gpus // 2), 2 * row.gpus) if elastic else (None, None)
            row = replace(row, tasks=row.gpus, gpus_per_task=1, min_tasks=sizes[0], max_tasks=sizes[1])
        out.append(row)
    return out


class _Times:
    """The first start and the end of each workload, and how long it waited for awards, over all attempts."""

    def __init__(self, scene: Scenario) -> None:
        self.started_s: dict[str, float] = {}
        self.finished_s: dict[str, float] = {}
        self.waited_s = dict.fromkeys((w.id for w in scene.workloads), 0.0)
        self.shrunk = 0
        self._since_s = {w.id: w.submit_s for w in scene.workloads}

    def __call__(self, event: Happened) -> None:
        if event.what == "started":
            self.started_s.setdefault(event.workload, event.at_s)
        elif event.what == "finished":
            self.finished_s[event.workload] = event.at_s
        elif event.what == "evicted":
            self._since_s[event.workload] = event.at_s
        elif event.what in ("awarded", "shrunk"):
            self.shrunk += event.what == "shrunk"
            self.waited_s[event.workload] += event.at_s - self._since_s.pop(event.workload, event.at_s)


def figures(scene: Scenario, chosen: set[str], variant: str) -> dict[str, Any]:
    """Runs a scenario and returns its figures. `chosen`: the gangs that are, or could be, elastic; times in seconds."""
    times = _Times(scene)
    changed = {"grow": variant in ("grows", "shrinks"), "shrink": variant == "shrinks"}
    settings = scene.settings.model_copy(update=changed)
    run = Run(replace(scene, settings=settings), POLICIES["global"], follow=times).go()
    total, out = run.meter.total, dict[str, Any]()
    for name, group in (
        ("elastic", [w for w in scene.workloads if w.id in chosen]),
        ("others", [w for w in scene.workloads if w.id not in chosen]),
    ):
        waits = [times.started_s[w.id] - w.submit_s for w in group if w.id in times.started_s]
        spans = [times.finished_s[w.id] - w.submit_s for w in group if w.id in times.finished_s]
        out[name] = {
            "workloads": len(group), "finished": len(spans), "wait_mean": round(float(np.mean(waits))),
            "wait_per_workload": round(float(np.mean([times.waited_s[w.id] for w in group]))),
            "wait_p90": round(float(np.percentile(waits, 90))), "completion_mean": round(float(np.mean(spans))),
            "completion_p50": round(float(np.median(spans))),
        }  # fmt: skip
    lost = {what: round(gpu_s / 3600, 1) for what, gpu_s in sorted(total.lost_gpu_s.items())}
    return out | {
        "preemptions": total.preemptions, "shrunk": times.shrunk, "growths": total.growths,
        "held_gpu_h": round(total.held_gpu_s / 3600),
        "lost_gpu_h": lost,
    }  # fmt: skip


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with philly.csv and the files of openb")
    parser.add_argument("--share", type=float, default=0.5, help="share of the gangs that are elastic; default: 0.5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--days", type=float, default=inf, help="only the first days of the trace")
    parser.add_argument("traces", nargs="+", choices=list(SPANS_S))
    args = parser.parse_args()
    for name in args.traces:
        rows = rows_of(name, args.data)
        rows = [row for row in rows if row.submit_s < rows[0].submit_s + args.days * DAY_S]
        fixed, elastic = (elastic_rows(rows, args.share, args.seed, elastic=one) for one in (False, True))
        chosen = {row.workload_id for row in elastic if row.max_tasks is not None}
        machines = scenario(rows)
        for variant in VARIANTS:
            scene = scenario(fixed if variant == "fixed" else elastic)
            assert {r: len(m) for r, m in scene.machines.items()} == {r: len(m) for r, m in machines.machines.items()}
            found = figures(scene, chosen, variant)
            print(json.dumps({"trace": name, "seed": args.seed, "variant": variant, **found}), flush=True)


if __name__ == "__main__":
    main()
