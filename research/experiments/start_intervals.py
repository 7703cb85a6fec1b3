"""Measures the intervals of expected starts (`gms.starts`) on replays of traces.

    python -m research.experiments.start_intervals --data FOLDER philly openb

Each trace is replayed with the policy `global` on machines of eight GPUs, so many that the trace offers 0.8 of their
GPU hours. Every five minutes the queue is forecast. The first interval of each wait counts. It is compared with one
fixed interval for each level and size, the 10th to the 90th percentile of the waits in the first half of the trace. The
second half is scored by the interval score (Gneiting and Raftery 2007) at alpha 0.2. `philly-other` has the tenants
that `philly` lacks, and `philly-late` has all tenants at a later time. The constants of `gms.starts` were chosen on
`philly-other` and on the first halves of `philly` and `openb`.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from gms.starts.forecast import HeldAmount, StartForecaster, WaitingDemand
from gms.starts.kernels import FreeMachines
from infra.errors import ConfigurationError
from research.experiments.cases import TRACES
from research.experiments.fleets import fleet_body
from research.experiments.scenes import RowLevels
from research.traces.fleet import QuotaRule, SimulatedFleet, quotas_by_rule
from research.traces.rows import TraceRow
from research.traces.scenario import scenario_of
from research.traces.trace_readers import read_trace
from simulation.hardware import Hardware
from simulation.policies import POLICIES
from simulation.run import Run
from simulation.scenario import Scenario
from simulation.transitions import Happened
from simulation.workload_state import WorkloadState

DAY_S = 86400.0
SPANS_S = {
    "philly": (30 * DAY_S, 58 * DAY_S),
    "philly-other": (30 * DAY_S, 51 * DAY_S),
    "philly-late": (62 * DAY_S, 100 * DAY_S),
    "openb": (112 * DAY_S, inf),
}
"""The submissions that are replayed, in seconds since the first one. Before, few workloads were submitted."""
LOAD = 0.8
EVERY_S = 300.0
ALPHA = 0.2
_FEWEST = 5
"""A level and size with fewer waits in the first half has the fixed interval of all workloads."""


@dataclass(frozen=True)
class MeasuredWait:
    """A wait from its first forecast on, in seconds, with the interval that was forecast."""

    at_s: float
    waited_s: float
    low_s: float
    high_s: float
    level: int
    gpus: int


@dataclass(frozen=True)
class StartScores:
    """The result for one trace, about the waits of its second half."""

    waits: int
    coverage: float
    fixed_coverage: float
    score_s: float
    fixed_score_s: float
    ratio: float


def rows_of(name: str, data: Path) -> list[TraceRow]:
    """Returns the GPU workloads of a trace that are replayed, with a level each.

    Raises:
        ConfigurationError: the trace is unknown.
    """
    if name not in SPANS_S:
        raise ConfigurationError(f"trace {name}: must be one of {', '.join(SPANS_S)}")
    source = TRACES[name.partition("-")[0]]
    rows = [row for row in read_trace(f"{source.name}:{data / source.file}").rows if row.duration_s > 0 and row.gpus]
    if name in ("philly", "philly-other"):
        tenants = sorted({row.tenant for row in rows})[name == "philly" :: 2]
        rows = [row for row in rows if row.tenant in tenants]
    first_s, (from_s, to_s), levels = rows[0].submit_s, SPANS_S[name], RowLevels(0)
    return [replace(row, priority=levels.of(row)) for row in rows if from_s <= row.submit_s - first_s < to_s]


def scenario(rows: Sequence[TraceRow]) -> Scenario:
    """Returns the scenario of a replay, without the workloads that do not fit on its machines."""
    span_s = rows[-1].submit_s - rows[0].submit_s
    held = sum(row.gpus * min(row.duration_s, rows[-1].submit_s - row.submit_s) for row in rows)
    count = max(1, round(held / span_s / LOAD / 8))
    machines = {"name": "m", "count": count, "rack": "r", "gpus": 8, "gpu_type": "v100", "cpus": 96, "memory": "512GiB"}
    regions = [{"name": "one", "clusters": [{"name": "c", "machines": [machines]}]}]
    weights: dict[str, float] = defaultdict(float)
    for row in rows:
        weights[row.tenant] += row.gpus * row.duration_s
    quotas = quotas_by_rule(QuotaRule(), weights, {"v100": 8 * count})
    settings = {"candidate_regions_percent": {}, "tick_spacing_s": 60.0}
    body = fleet_body(regions, {name: tenant.quota_gpus for name, tenant in quotas.items()}, settings)
    found = scenario_of(SimulatedFleet.model_validate(body), rows)
    hardware = Hardware(found.machines)
    return replace(found, workloads=[w for w in found.workloads if all(map(hardware.regions_for, w.jobs))])


class StartObserver:
    """Forecasts the queue of a run every `EVERY_S`, and records the waits."""

    def __init__(self, scene: Scenario) -> None:
        self._run = Run(scene, POLICIES["global"], follow=self._happened)
        self._transitions = self._run.simulator.transitions
        machines = [m for group in scene.machines.values() for m in group]
        self._number_of = {m.id: number for number, m in enumerate(machines)}
        self._machines = FreeMachines(np.zeros(len(machines), np.int64), np.array([m.gpus for m in machines]))
        self._state = {state.workload.id: state for state in self._transitions.states}
        self._forecaster = StartForecaster(scene.settings.reserve_after_s < inf)
        self._held: dict[str, HeldAmount] = {}
        self._first: dict[str, tuple[float, float, float]] = {}
        self._next_s = -inf
        self.waits: list[MeasuredWait] = []

    def go(self) -> list[MeasuredWait]:
        """Runs the scenario, and returns the waits for which there was a forecast, in the order in which they ended."""
        self._run.simulator.run(lambda progress: self._look(progress.now_s), every=1)
        return self.waits

    def _happened(self, event: Happened) -> None:
        state = self._state[event.workload]
        if event.what == "awarded":
            on = self._gpus_on(state, event)
            self._move(on, -1)
            self._held[state.id] = HeldAmount(state.id, _groups(state), 0, state.workload.gpus, event.at_s, on=on)
            if (first := self._first.pop(state.id, None)) is not None:
                at_s, low_s, high_s = first
                w = state.workload
                self.waits.append(MeasuredWait(at_s, event.at_s - at_s, low_s, high_s, w.level, w.gpus))
        elif event.what in ("finished", "left"):
            held = self._held.pop(state.id)
            self._move(held.on or (), 1)
            if event.what == "finished":
                self._forecaster.ended(held.groups, event.at_s - held.since_s)

    def _gpus_on(self, state: WorkloadState, event: Happened) -> tuple[tuple[int, int], ...]:
        machines, _ = cast(tuple[Sequence[Sequence[tuple[str, int]]], object], event.detail)
        jobs = zip(state.workload.jobs, machines, strict=True)
        return tuple((self._number_of[m], tasks * job.gpus_per_task) for job, on in jobs for m, tasks in on)

    def _move(self, on: Sequence[tuple[int, int]], sign: int) -> None:
        for number, gpus in on:
            self._machines.free[number] += sign * gpus

    def _look(self, now_s: float) -> bool:
        standing = self._run.simulator.standing
        if now_s < self._next_s or standing is None:
            return False
        self._next_s = now_s + EVERY_S
        queue, states = self._transitions.queue, self._transitions.states
        ranked = zip(standing.order.tolist(), standing.rank.tolist(), strict=True)
        waiting = [_waiting(states[number], rank) for number, rank in ranked if number in queue]
        free = FreeMachines(self._machines.pool, np.maximum(self._machines.free, 0))
        found = self._forecaster.forecast(now_s, waiting, list(self._held.values()), [0], machines=free)
        for w, (low_s, high_s) in zip(waiting, found.tolist(), strict=True):
            if w.id not in self._first and not np.isnan(low_s):
                self._first[w.id] = now_s, low_s, high_s
        return False


def _groups(state: WorkloadState) -> tuple[str, ...]:
    return f"{state.workload.tenant}/{state.workload.gpus}", str(state.workload.gpus)


def _waiting(state: WorkloadState, rank: int) -> WaitingDemand:
    w = state.workload
    size = max(job.gpus_per_task for job in w.jobs)
    return WaitingDemand(state.id, _groups(state), rank, w.level, w.gpus, 1, size=size)


def interval_score(
    waited_s: npt.NDArray[np.float64], low_s: npt.NDArray[np.float64], high_s: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Returns the interval score of each wait, in seconds; less is better."""
    outside = np.maximum(0.0, low_s - waited_s) + np.maximum(0.0, waited_s - high_s)
    return high_s - low_s + 2 / ALPHA * outside


def scores(waits: Sequence[MeasuredWait]) -> StartScores:
    """Returns the scores of the second half of the waits, by the time of their forecasts."""
    ordered = sorted(waits, key=lambda one: one.at_s)
    half = len(ordered) // 2
    known: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in ordered[:half]:
        known[one.level, one.gpus].append(one.waited_s)
    every = [one.waited_s for one in ordered[:half]]
    later = ordered[half:]
    samples = [known[one.level, one.gpus] for one in later]
    fixed = np.array([np.quantile(s if len(s) >= _FEWEST else every, (ALPHA / 2, 1 - ALPHA / 2)) for s in samples])
    waited, own = np.array([w.waited_s for w in later]), np.array([(w.low_s, w.high_s) for w in later])
    cover, fixed_cover = (float(np.mean((e[:, 0] <= waited) & (waited <= e[:, 1]))) for e in (own, fixed))
    score, fixed_score = (float(interval_score(waited, *ends.T).mean()) for ends in (own, fixed))
    return StartScores(len(later), cover, fixed_cover, score, fixed_score, score / fixed_score)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with philly.csv and the files of openb")
    parser.add_argument("traces", nargs="+", choices=list(SPANS_S))
    args = parser.parse_args()
    for name in args.traces:
        found = scores(StartObserver(scenario(rows_of(name, args.data))).go())
        print(json.dumps({"trace": name, **asdict(found)}), flush=True)


if __name__ == "__main__":
    main()
