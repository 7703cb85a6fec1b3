"""Measures what repair in place changes when machines are lost: waits, lost GPU hours and times until gangs run again.

    python -m research.experiments.repairs --data FOLDER philly philly-late

The scenarios are those of `start_intervals`: machines of eight GPUs, so many that the trace offers 0.8 of their GPU
hours. Machines are lost without notice, at times drawn by seed, and return some hours later. `wait_per_workload` is the
time that a workload waits for awards, over all of its attempts. With `--regions 4`, the
machines are split over two regions with two clusters each. With `--small`, tasks have at most that many GPUs: a gang of
eight GPUs is two tasks of four.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf, log
from pathlib import Path
from typing import Any

import numpy as np

from capacity.scaling import Shortage
from domain.scheduling import MachineState
from research.experiments.start_intervals import SPANS_S, rows_of, scenario
from research.experiments.whole_machines import DAY_S, GANG_GPUS, MachineObserver, in_regions
from research.traces.rows import TraceRow
from simulation.meter import Meter
from simulation.policies import POLICIES
from simulation.random_draws import chance
from simulation.run import Run, Scenario
from simulation.supply import Keeper, Supply
from simulation.transitions import Happened, Transitions

HOUR_S = 3600.0


@dataclass(frozen=True)
class FailingMachines(Supply):
    """Loses each machine after a random time, exponentially distributed, and returns it later; and so on."""

    mean_days: float
    """The mean time between the return of a machine and its next loss, in days."""
    away_s: float
    until_s: float
    """Nothing is lost from then on."""
    seed: int

    def keeper(
        self, transitions: Transitions, meter: Meter, waiting: Callable[[], list[Shortage]], seed: int
    ) -> "LosingKeeper":
        """Returns the keeper of a run."""
        return LosingKeeper(self, transitions)


class LosingKeeper(Keeper):
    """Loses machines and returns them."""

    def __init__(self, plan: FailingMachines, transitions: Transitions) -> None:
        super().__init__()
        self._plan, self._transitions = plan, transitions
        self._events: list[tuple[float, str, str, int]] = []
        self._states: dict[str, MachineState] = {}
        for region, ledger in transitions.ledgers.items():
            for one in ledger.machines.values():
                self._states[one.id] = one
                self._lose_later(0.0, region, one.id, 0)
        self._set_due()

    def happen(self, at_s: float) -> bool:
        """Loses and returns the machines that are due."""
        while self._events and self._events[0][0] <= at_s:
            _, region, machine, times = heappop(self._events)
            if times % 2 == 0:
                self.counts.taken += 1
                self._transitions.interrupt(at_s, region, machine, lost=True)
                heappush(self._events, (at_s + self._plan.away_s, region, machine, times + 1))
            else:
                self._transitions.join(region, self._states[machine])
                self._lose_later(at_s, region, machine, times + 1)
        self._set_due()
        return True

    def _lose_later(self, at_s: float, region: str, machine: str, times: int) -> None:
        drawn = chance(self._plan.seed, "loss", f"{machine}\0{times}")
        lost_s = at_s - log(1 - drawn) * self._plan.mean_days * DAY_S
        if lost_s < self._plan.until_s:
            heappush(self._events, (lost_s, region, machine, times))

    def _set_due(self) -> None:
        self.due_s = self._events[0][0] if self._events else inf


@dataclass
class LossObserver:
    """Observes a run: how long each gang of several machines needs until it runs again after it has lost a machine."""

    machines: MachineObserver
    gangs: set[str] = field(default_factory=set)
    again_s: list[float] = field(default_factory=list)
    lost: int = 0
    repaired: int = 0
    _on: dict[str, int] = field(default_factory=dict)
    _since_s: dict[str, float] = field(default_factory=dict)

    def __call__(self, event: Happened) -> None:
        """Processes one event of the run."""
        self.machines(event)
        detail: Any = event.detail
        if event.what in ("awarded", "repaired"):
            self._on[event.workload] = len({machine for job in detail[0] for machine, _ in job})
        self.repaired += event.what == "repaired"
        if event.what == "interrupted" and self._on[event.workload] > 1:
            self.lost += 1
            self._since_s.setdefault(event.workload, event.at_s)
        elif event.what == "started" and event.workload in self._since_s:
            self.again_s.append(event.at_s - self._since_s.pop(event.workload))

    def figures(self) -> dict[str, Any]:
        """Returns the figures of the run; times in seconds."""
        again = self.again_s or [0.0]
        waits: dict[str, dict[str, float]] = {"gangs": defaultdict(float), "others": defaultdict(float)}
        out = self.machines.figures()
        for since_s, w, _, to_s, _ in self.machines.waits["award"]:
            waits["gangs" if w.gpus >= GANG_GPUS else "others"][w.id] += to_s - since_s
        out["wait_per_workload"] = {
            "all": round(float(np.mean([s for one in waits.values() for s in one.values()]))),
            **{name: round(float(np.mean(list(one.values())))) for name, one in waits.items() if one},
        }
        return out | {
            "losses_of_gangs": self.lost, "repaired": self.repaired, "again_mean": round(float(np.mean(again))),
            "again_p50_p90_max": [round(float(v)) for v in (*np.percentile(again, (50, 90)), max(again))],
        }  # fmt: skip


def split(row: TraceRow, most_gpus: int) -> TraceRow:
    """Returns the workload with tasks of at most `most_gpus` GPUs each."""
    if row.gpus_per_task <= most_gpus or row.gpus_per_task % most_gpus:
        return row
    return replace(row, tasks=row.gpus // most_gpus, gpus_per_task=most_gpus)


def measured(scene: Scenario, repair: bool) -> dict[str, Any]:
    """Runs a scenario with or without repairs and returns its figures."""
    scene = replace(scene, settings=scene.settings.model_copy(update={"repair": repair}))
    watch = LossObserver(MachineObserver(scene))
    run = Run(scene, POLICIES["global"], follow=watch).go()
    return {"cpu_s": round(run.wall_s), **watch.figures(), "work_lost_gpu_h": lost_work(run.meter)}


def lost_work(meter: Meter) -> float:
    """Returns the GPU hours of work that had to be repeated."""
    return round(meter.total.lost_gpu_s["work"] / HOUR_S, 1)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with philly.csv and the files of openb")
    parser.add_argument("--mean-days", type=float, default=15.0, help="mean time between losses of a machine")
    parser.add_argument("--away-h", type=float, default=4.0, help="hours until a lost machine returns")
    parser.add_argument("--from-days", type=float, default=0.0, help="leave out the first days of the trace")
    parser.add_argument("--days", type=float, default=inf, help="only so many days")
    parser.add_argument("--small", type=int, default=8, help="the most GPUs of a task")
    parser.add_argument("--regions", type=int, default=1, help="number of clusters; default: 1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("traces", nargs="+", choices=list(SPANS_S))
    args = parser.parse_args()
    for name in args.traces:
        rows = rows_of(name, args.data)
        from_s = rows[0].submit_s + args.from_days * DAY_S
        rows = [split(row, args.small) for row in rows if from_s <= row.submit_s < from_s + args.days * DAY_S]
        scene = in_regions(scenario(rows), args.regions) if args.regions > 1 else scenario(rows)
        until_s = rows[-1].submit_s - rows[0].submit_s
        failing = FailingMachines(args.mean_days, args.away_h * HOUR_S, until_s, args.seed)
        for repair in (False, True):
            found = measured(replace(scene, sources=failing), repair)
            print(json.dumps({"trace": name, "seed": args.seed, "repair": repair, **found}), flush=True)


if __name__ == "__main__":
    main()
