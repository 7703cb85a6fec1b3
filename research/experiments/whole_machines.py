"""Measures how many machines are whole, and how long gangs wait, on replays of traces with and without rules.

    python -m research.experiments.whole_machines --data FOLDER philly openb

The scenarios are those of `start_intervals`: machines of eight GPUs, so many that the trace offers 0.8 of their GPU
hours. A share of a GPU takes a whole slot. With `--regions 4`, the machines are split over two regions with two
clusters each. A machine is whole while all of its GPUs are free; the free GPUs of other machines are in pieces.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, cast

import numpy as np

from research.experiments.replay import RunObserver
from research.experiments.start_intervals import SPANS_S, rows_of, scenario
from simulation.policies import POLICIES
from simulation.run import Run, Scenario
from simulation.settings import override
from simulation.transitions import Happened

GANG_GPUS = 8
DAY_S = 86400.0


class MachineObserver(RunObserver):
    """Observes the waits of a run, and the free GPUs of its machines."""

    def __init__(self, scene: Scenario) -> None:
        super().__init__(list(scene.workloads), {name: dict(t.quota_gpus) for name, t in scene.tenants.items()})
        machines = [m for group in scene.machines.values() for m in group]
        self._number_of = {m.id: number for number, m in enumerate(machines)}
        self._total = np.array([m.gpus for m in machines])
        self._free = self._total.copy()
        self._on: dict[str, list[tuple[int, int]]] = {}
        self._now_s = 0.0
        self._gangs: set[str] = set()
        self.whole_s = self.pieces_s = self.starved_s = self.starved_pieces_s = 0.0

    def __call__(self, event: Happened) -> None:
        """Processes one event of the run."""
        self._advance(event.at_s)
        w = self._of[event.workload]
        if event.what in ("moved", "repaired", "finished", "left"):
            self._move(w.id, 1)
        if event.what in ("awarded", "moved", "repaired"):
            self._gangs.discard(w.id)
            placed = cast(tuple[Sequence[Sequence[tuple[str, int]]], object], event.detail)[0]
            jobs = zip(w.jobs, placed, strict=True)
            self._on[w.id] = [(self._number_of[m], tasks * job.gpus_per_task) for job, on in jobs for m, tasks in on]
            self._move(w.id, -1)
        if event.what in ("submitted", "left") and w.gpus >= GANG_GPUS:
            self._gangs.add(w.id)
        super().__call__(event)

    def _move(self, workload: str, sign: int) -> None:
        for number, gpus in self._on[workload]:
            self._free[number] += sign * gpus

    def _advance(self, at_s: float) -> None:
        span_s = at_s - self._now_s
        if span_s > 0:
            free = np.maximum(self._free, 0)
            whole, pieces = int((free == self._total).sum()), int(free[free < self._total].sum())
            self.whole_s += span_s * whole
            self.pieces_s += span_s * pieces
            if self._gangs:
                self.starved_s += span_s
                self.starved_pieces_s += span_s * pieces
            self._now_s = at_s

    def figures(self) -> dict[str, Any]:
        """Returns the figures of the run. Waits are until the award, in seconds."""
        self.close(self._now_s)
        found = [(w, within, min(to, self._now_s) - since) for since, w, within, to, _ in self.waits["award"]]
        out: dict[str, Any] = {}
        for name, waits in {
            "all": [s for w, _, s in found],
            "gangs": [s for w, _, s in found if w.gpus >= GANG_GPUS],
            "small": [s for w, _, s in found if w.gpus < GANG_GPUS],
            "over": [s for w, within, s in found if not within],
            "over_gangs": [s for w, within, s in found if not within and w.gpus >= GANG_GPUS],
            "high": [s for w, _, s in found if w.level <= 2],
        }.items():
            if waits:
                out[name] = [len(waits), *(round(float(v)) for v in (np.mean(waits), *np.percentile(waits, (90, 99))))]
                out[name].append(round(max(waits)))
        return out | {
            "lost_gpu_h": round(sum(gpu_s for _, gpu_s in self.lost) / 3600, 1),
            "worked_gpu_h": round(sum(w.gpus * (to - since) for w, since, to in self.worked) / 3600),
            "evictions": len(self.evictions),
            "moves": len(self.moves),
            "whole": round(self.whole_s / self._now_s, 2),
            "pieces": round(self.pieces_s / self._now_s, 2),
            "starved": round(self.starved_s / self._now_s, 3),
            "starved_pieces": round(self.starved_pieces_s / max(1.0, self.starved_s), 2),
        }


def in_regions(scene: Scenario, parts: int) -> Scenario:
    """Returns the scenario with its machines split over `parts` clusters, two in each region."""
    machines = [m for group in scene.machines.values() for m in group]
    out: dict[str, list[Any]] = {}
    for number, machine in enumerate(machines):
        part = number * parts // len(machines)
        region = f"r{part // 2}"
        out.setdefault(region, []).append(replace(machine, cluster=f"c{part % 2}", rack=f"k{number % 3}"))
    return replace(scene, machines={name: tuple(group) for name, group in out.items()})


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with philly.csv and the files of openb")
    parser.add_argument("--regions", type=int, default=1, help="number of clusters; default: 1")
    parser.add_argument("--param", action="append", default=[], help="setting of the simulation, NAME=VALUE")
    parser.add_argument("--until-days", type=float, default=inf)
    parser.add_argument("traces", nargs="+", choices=list(SPANS_S))
    args = parser.parse_args()
    for name in args.traces:
        scene = scenario(rows_of(name, args.data))
        if args.regions > 1:
            scene = in_regions(scene, args.regions)
        scene = replace(scene, settings=override(scene.settings, tuple(args.param)), until_s=args.until_days * DAY_S)
        watch = MachineObserver(scene)
        run = Run(scene, POLICIES["global"], follow=watch).go()
        print(json.dumps({"trace": name, "cpu_s": round(run.wall_s), **watch.figures()}), flush=True)


if __name__ == "__main__":
    main()
