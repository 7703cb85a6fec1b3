"""`make experiment-gaming`: what persons gain who try to get ahead of others, against honest use.

In each cell a few persons (`strategies.persons`) follow a strategy, at the same time as each other; they belong to
different tenants. Everybody states a `max_runtime`: the runtime times a lognormal factor of median 2, at least 1. The
results are stored as those of `make experiment`.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from research.experiments.cases import HOUR_S, OURS, SEEDS, SOURCES, THIN, VARIANTS, ExperimentCase, cases
from research.experiments.policies import policy_of
from research.experiments.replay import fitting, scene_of
from research.experiments.store import OutcomeStore
from research.experiments.strategies import HONEST, STRATEGIES, GamingStrategy, RewrittenPiece, persons, rewritten
from simulation.run import Run
from simulation.scenario import Scenario
from simulation.simulator import Simulator
from simulation.transitions import Happened

SIZES = replace(THIN, warm_up_s=4 * HOUR_S, measured_s=8 * HOUR_S, after_s=16 * HOUR_S)
"""The run ends a day after the beginning of the measured span."""
PARAMS = ("limited_percent=100", "tick_spacing_s=180", "provisioning_p90_s=150", "provisioning_p99_s=150")
"""Provisioning takes 150 s always: random delays of new ids would be noise."""
TENANTS = 3
GAIN_AT_MOST = 0.05
FIGURES = {"wait_h": -1, "delay_h": -1, "worked_gpu_h": 1}
"""The figures of a person, and whether more is better."""


@dataclass
class PersonActions:
    """Observes a run, and acts for the persons: submits, cancels, and lets slots wait for work."""

    strategy: GamingStrategy
    pieces: Sequence[RewrittenPiece]

    def __post_init__(self) -> None:
        """Prepares the look-ups by workload."""
        self.simulator: Simulator | None = None
        self._piece_of = {w.id: piece for piece in self.pieces for w in piece.workloads}
        self._next = {a.id: b.id for piece in self.pieces for lane in piece.lanes for a, b in zip(lane, lane[1:])}
        self.awarded_s: dict[str, float] = {}
        """By workload, the first award."""
        self.finished_s: dict[str, float] = {}
        self.runs: dict[str, list[list[float]]] = defaultdict(list)
        """By workload, the beginning and end of each time in which it worked."""
        self._winner: dict[str, str] = {}

    def __call__(self, event: Happened) -> None:
        """Processes one event of the run."""
        id_, at_s = event.workload, event.at_s
        if id_ not in self._piece_of:
            return
        assert self.simulator is not None
        if event.what == "submitted" and self.strategy.resubmit_after_s < inf:
            self.simulator.cancel(at_s + self.strategy.resubmit_after_s, id_)
        elif event.what == "cancelled" and self.strategy.resubmit_after_s < inf:
            self.simulator.submit(at_s, id_)
        elif event.what == "awarded" and id_ not in self.awarded_s:
            self.awarded_s[id_] = at_s
            if self.strategy.copies:
                self._cancel_copies(at_s, id_)
        elif event.what == "started":
            idle_s = max(0.0, self._piece_of[id_].origin.submit_s - at_s)
            if idle_s:
                self.simulator.prolong(at_s, id_, idle_s)
            self.runs[id_].append([at_s + idle_s, inf])
        elif event.what in ("evicted", "interrupted", "finished"):
            if self.runs[id_] and self.runs[id_][-1][1] == inf:
                self.runs[id_][-1][1] = max(at_s, self.runs[id_][-1][0])
            if event.what == "finished":
                self.finished_s[id_] = at_s
                if id_ in self._next:
                    self.simulator.submit(at_s, self._next[id_])

    def _cancel_copies(self, at_s: float, id_: str) -> None:
        piece = self._piece_of[id_]
        winner = self._winner.setdefault(piece.origin.id, id_)
        assert self.simulator is not None
        for copy in [w.id for w in piece.workloads] if winner == id_ else [id_]:
            if copy != winner:
                self.simulator.cancel(at_s, copy)

    def figures(self, piece: RewrittenPiece, end_s: float) -> dict[str, float]:
        """Returns the figures of a piece up to `end_s`: wait, delay of its end (hours), and worked GPU hours.

        Of a lane, the wait is the time from the need (the honest submission) to the award of the last workload, without
        the work of those before it; the delay is the time from the need to the end, without its work. Of several lanes
        the last one counts, of copies the one that works.
        """
        if piece.copies:
            lanes = [lane for lane in piece.lanes if lane[0].id == self._winner.get(piece.origin.id, piece.lanes[0][0].id)]
        else:
            lanes = list(piece.lanes)
        need_s, waits, delays, gpu_s = piece.origin.submit_s, [], [], 0.0
        for lane in lanes:
            spans = [[(a, min(b, end_s)) for a, b in self.runs[w.id] if a < end_s] for w in lane]
            before = sum(b - a for part in spans[:-1] for a, b in part)
            work_s = before + sum(b - a for a, b in spans[-1])
            waits.append(max(0.0, min(end_s, self.awarded_s.get(lane[-1].id, inf)) - need_s - before))
            delays.append(min(end_s, self.finished_s.get(lane[-1].id, inf)) - need_s - work_s)
            gpu_s += work_s * lane[0].gpus
        return {"wait_h": max(waits) / 3600, "delay_h": max(delays) / 3600, "worked_gpu_h": gpu_s / 3600}


def gamed(scene: Scenario, strategy: GamingStrategy, who: set[tuple[str, str]]) -> tuple[Scenario, list[RewrittenPiece]]:
    """Returns the scenario in which some persons follow a strategy with what they submit in it, and their pieces."""
    best: dict[str, int] = {}
    for w in scene.workloads:
        best[w.tenant] = min(best.get(w.tenant, w.level), w.level)
    mine = [w for w in scene.workloads if (w.tenant, w.user) in who and w.submit_s >= 0]
    pieces = [rewritten(w, strategy, best[w.tenant]) for w in mine]
    ids = {w.id for w in mine}
    others = [w for w in scene.workloads if w.id not in ids]
    return replace(scene, workloads=others + [w for piece in pieces for w in piece.workloads]), pieces


def run_strategy(facts: dict[str, Any], scene: Scenario, strategy: GamingStrategy) -> dict[str, Any]:
    """Runs a strategy on a cell, and returns the figures of each person."""
    from_s, to_s, end_s = (facts[name] - facts["from_s"] for name in ("measure_from_s", "measure_to_s", "until_s"))
    who = persons(scene.workloads, from_s, to_s, TENANTS)
    scene, pieces = gamed(scene, strategy, who)
    actions = PersonActions(strategy, pieces)
    began_s = time.process_time()
    run = Run(scene, policy_of(OURS), follow=actions)
    actions.simulator = run.simulator
    run.go()
    out: dict[str, Any] = {"cpu_s": time.process_time() - began_s}
    for tenant, user in sorted(who):
        own = [p for p in pieces if (p.origin.tenant, p.origin.user) == (tenant, user)]
        own = [p for p in own if from_s <= p.origin.submit_s < to_s]
        found = [actions.figures(piece, end_s) for piece in own]
        out[f"{tenant}/{user}"] = {"pieces": len(own), **{name: sum(one[name] for one in found) for name in FIGURES}}
    return out


def run_case(case: ExperimentCase, store: OutcomeStore, names: Sequence[str]) -> str:
    """Runs the strategies of a cell that have no outcome yet; returns what was done."""
    missing = [name for name in ("honest", *names) if not store.path(case, _file(name)).exists()]
    if missing:
        facts, scene = scene_of(store.scene(case), params=PARAMS)
        scene = fitting(scene)
        for name in missing:
            store.write(case, _file(name), run_strategy(facts, scene, {"honest": HONEST, **STRATEGIES}[name]))
    return f"{case.name}: {len(missing)} runs"


def _file(name: str) -> str:
    return f"gaming-{name.replace(' ', '-')}"


def ratios(cells: Sequence[ExperimentCase], store: OutcomeStore, name: str, figure: str) -> list[float]:
    """Returns, by seed, the sum of a figure over the persons of its cells, divided by that of honest use."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for case in cases_with(cells, store, name):
        for k, strategy in enumerate((name, "honest")):
            people = store.read(case, _file(strategy))
            sums[case.seed][k] += sum(one[figure] for who, one in people.items() if who != "cpu_s")
    return [gaming / honest for gaming, honest in sums.values() if honest]


def cases_with(cells: Sequence[ExperimentCase], store: OutcomeStore, name: str) -> list[ExperimentCase]:
    """Returns the cells that have outcomes of a strategy and of honest use."""
    return [case for case in cells if all(store.path(case, _file(one)).exists() for one in (name, "honest"))]


def table(cells: Sequence[ExperimentCase], store: OutcomeStore, names: Sequence[str]) -> list[str]:
    """Returns the table of gains: by strategy, the mean over the seeds and its standard error, in percent."""
    lines = ["| strategy | wait | delay of the end | worked GPU hours | |", "| --- | --- | --- | --- | --- |"]
    for name in names:
        row, most = [], -inf
        for figure, sign in FIGURES.items():
            gains = [sign * 100 * (ratio - 1) for ratio in ratios(cells, store, name, figure)]
            if not gains:
                break
            error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else inf
            row.append(f"{mean(gains):+.1f} ± {error:.1f} %")
            most = max(most, mean(gains))
        else:
            verdict = "met" if most <= 100 * GAIN_AT_MOST else "**missed**"
            lines.append(f"| {name} | {' | '.join(row)} | {verdict} |")
    return lines


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="gaming", description=__doc__)
    parser.add_argument("--data", type=Path, help="the folder with philly.csv; without it, only the generated trace")
    parser.add_argument("--out", type=Path, required=True, help="the folder for cells and outcomes")
    parser.add_argument("--traces", nargs="+", default=["philly", "synthetic"], choices=list(SOURCES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), choices=SEEDS)
    parser.add_argument("--loads", type=float, nargs="+", default=[1.2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--jobs", type=int, default=2, help="number of cells that run concurrently")
    args = parser.parse_args()
    traces = [name for name in args.traces if args.data is not None or not SOURCES[name].file]
    out = args.out / "gaming"
    out.mkdir(parents=True, exist_ok=True)
    store = OutcomeStore(None if args.data is None else args.data.resolve(), out.resolve(), SIZES)
    chosen = list(cases(traces, args.loads, args.seeds, args.variants))
    with ProcessPoolExecutor(args.jobs) as pool:
        for line in pool.map(run_case, chosen, [store] * len(chosen), [args.strategies] * len(chosen)):
            print(line, flush=True)
    for trace in traces:
        for variant in args.variants:
            part = [case for case in chosen if (case.trace, case.variant) == (trace, variant)]
            print("\n".join(["", f"{trace}, {variant}:", "", *table(part, store, args.strategies)]))
    print("\n".join(["", "all:", "", *table(chosen, store, args.strategies)]))


if __name__ == "__main__":
    main()
