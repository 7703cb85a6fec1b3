"""Replays a cell under a policy, and records every wait from the events of the run.

Waits are not taken from the simulator's own statistics.
"""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from research.traces.scenario import from_trace
from simulation.hardware import Hardware
from simulation.policies import SchedulingPolicy
from simulation.run import Run, Scenario, Span
from simulation.transitions import Happened
from simulation.workloads import SimulatedWorkload

MACHINES = ("usd", "usd_by", "pools", "interruptions", "available_gpu_hours", "lost_gpu_hours_by")
"""Keys of the simulator's statistics on machines that are copied to the outcome."""
COLUMNS = ("level", "gpus", "within_quota", "wait_s", "ended", "provisioning_s")
"""Columns of a wait. `ended`: whether it ended before the run did. `provisioning_s`: the provisioning that ended it."""


class RunObserver:
    """Observes the events of a run. Times are seconds on the simulation's clock.

    A wait until the award begins with the submission or the notice of an eviction. A wait until the start begins with
    the submission, or with the notice of the eviction that ended the workload's last run. A wait is within quota if, at
    its beginning, the GPUs of the tenant's unfinished workloads of this level and higher ones, this workload included,
    are within the tenant's quota of the GPU type. The rule is the same for all policies.
    """

    def __init__(self, workloads: list[SimulatedWorkload], quotas: dict[str, dict[str, int]]) -> None:
        self._of = {w.id: w for w in workloads}
        self._ids = [w.id for w in sorted(workloads, key=lambda w: (w.submit_s, w.id))]
        self._quotas = quotas
        self._unfinished: dict[tuple[str, str, int], int] = defaultdict(int)
        self._began: dict[str, dict[str, tuple[float, bool]]] = {"award": {}, "start": {}}
        self.waits: dict[str, list[tuple[float, SimulatedWorkload, bool, float, float]]] = {"award": [], "start": []}
        """(began, workload, within quota, ended, provisioning) until the award and until the start."""
        self._ready_s: dict[str, float] = {}
        self._owing: dict[str, str] = {}
        """Evictor of each victim that still holds slots."""
        self._works_since_s: dict[str, float] = {}
        self._awards: dict[str, int] = defaultdict(int)
        self._evicted_s: dict[str, float] = {}
        self.worked: list[tuple[SimulatedWorkload, float, float]] = []
        self.finished: list[tuple[float, SimulatedWorkload]] = []
        self.evictions: list[float] = []
        self.moves: list[float] = []
        self.lost: list[tuple[float, float]] = []
        """(when, GPU-seconds held without work: through evictions, and through provisioning after the first)."""

    def __call__(self, event: Happened) -> None:
        """Processes one event of the run."""
        w, at_s = self._of[event.workload], event.at_s
        getattr(self, f"_{event.what}")(w, at_s, event.detail)

    def _submitted(self, w: SimulatedWorkload, at_s: float, _: Any) -> None:
        self._unfinished[self._key(w)] += w.gpus
        self._begin("award", w, at_s)
        self._begin("start", w, at_s)

    def _awarded(self, w: SimulatedWorkload, at_s: float, detail: Any) -> None:
        self._end("award", w, at_s, 0.0)
        self._ready_s[w.id] = at_s
        self._awards[w.id] += 1
        for victim in detail[1]:
            self._owing[self._ids[int(victim)]] = w.id

    def _started(self, w: SimulatedWorkload, at_s: float, _: Any) -> None:
        provisioning_s = at_s - self._ready_s[w.id]
        if w.id in self._began["start"]:
            self._end("start", w, at_s, provisioning_s)
        if self._awards[w.id] > 1:
            self.lost.append((at_s, provisioning_s * w.gpus))
        self._works_since_s[w.id] = at_s

    def _evicted(self, w: SimulatedWorkload, at_s: float, _: Any) -> None:
        self.evictions.append(at_s)
        self._evicted_s[w.id] = at_s
        self._begin("award", w, at_s)
        since_s = self._works_since_s.pop(w.id, None)
        if since_s is not None:
            self.worked.append((w, since_s, at_s))
            self._begin("start", w, at_s)

    _interrupted = _evicted
    """The loss of a machine is counted as an eviction."""

    def _moving(self, w: SimulatedWorkload, at_s: float, _: Any) -> None:
        self.moves.append(at_s)
        self._evicted_s[w.id] = at_s
        self.worked.append((w, self._works_since_s.pop(w.id), at_s))
        self._begin("start", w, at_s)

    def _moved(self, w: SimulatedWorkload, at_s: float, _: Any) -> None:
        self._left(w, at_s, None)
        self._ready_s[w.id] = at_s
        self._awards[w.id] += 1

    def _repaired(self, w: SimulatedWorkload, at_s: float, _: Any) -> None:
        self._end("award", w, at_s, 0.0)
        self._moved(w, at_s, None)

    def _left(self, w: SimulatedWorkload, at_s: float, _: Any) -> None:
        self.lost.append((at_s, (at_s - self._evicted_s[w.id]) * w.gpus))
        evictor = self._owing.pop(w.id, None)
        if evictor is not None:
            self._ready_s[evictor] = at_s

    def _finished(self, w: SimulatedWorkload, at_s: float, _: Any) -> None:
        self._unfinished[self._key(w)] -= w.gpus
        self.worked.append((w, self._works_since_s.pop(w.id), at_s))
        self.finished.append((at_s, w))

    def close(self, at_s: float) -> None:
        """Ends the observation: records the unfinished waits and runs up to `at_s`."""
        for until, began in self._began.items():
            for id_, (began_s, within) in began.items():
                self.waits[until].append((began_s, self._of[id_], within, float("inf"), 0.0))
        for id_, since_s in self._works_since_s.items():
            self.worked.append((self._of[id_], since_s, at_s))

    def _begin(self, until: str, w: SimulatedWorkload, at_s: float) -> None:
        self._began[until].setdefault(w.id, (at_s, self._is_within(w)))

    def _end(self, until: str, w: SimulatedWorkload, at_s: float, provisioning_s: float) -> None:
        began_s, within = self._began[until].pop(w.id)
        self.waits[until].append((began_s, w, within, at_s, provisioning_s))

    def _key(self, w: SimulatedWorkload) -> tuple[str, str, int]:
        return w.tenant, _type(w), w.level

    def _is_within(self, w: SimulatedWorkload) -> bool:
        if not w.gpus:
            return True
        asked = sum(self._unfinished[w.tenant, _type(w), level] for level in range(1, w.level + 1))
        return asked <= self._quotas.get(w.tenant, {}).get(_type(w), 0)


def _type(w: SimulatedWorkload) -> str:
    return w.jobs[0].gpu_types[0] if w.gpus else ""


def scene_of(folder: Path, fleet: str = "fleet.yaml", params: Sequence[str] = ()) -> tuple[dict[str, Any], Scenario]:
    """Returns the facts of a case (`case.json`), and its scenario on one of its fleets, with settings replaced."""
    facts = json.loads((folder / "case.json").read_text())
    scene = from_trace(
        folder / fleet, str(folder / "trace.csv"), seed=facts["seed"], until_s=facts["until_s"], params=params,
        span=Span(facts["from_s"], facts["until_s"]), measured=Span(facts["measure_from_s"], facts["measure_to_s"]),
    )  # fmt: skip
    return facts, scene


def fitting(scene: Scenario) -> Scenario:
    """Returns the scenario without the workloads that do not fit on its machines even if they are empty."""
    hardware = Hardware(scene.machines)
    return replace(scene, workloads=[w for w in scene.workloads if all(map(hardware.regions_for, w.jobs))])


def outcome(facts: dict[str, Any], scene: Scenario, policy: SchedulingPolicy) -> dict[str, Any]:
    """Runs one policy, and returns the waits that began in the measured span, and the work over the whole run."""
    watch = RunObserver(list(scene.workloads), facts["quotas"])
    began_s = time.process_time()
    run = Run(scene, policy, follow=watch).go()
    cpu_s = time.process_time() - began_s
    from_s, to_s, end_s = (facts[name] - facts["from_s"] for name in ("measure_from_s", "measure_to_s", "until_s"))
    watch.close(end_s)
    report = run.to_json()
    return {
        "policy": policy.name,
        "case": facts["name"],
        "cpu_s": cpu_s,
        "decisions": report["decisions"],
        "allocation_rate": report["allocation_rate"],
        "columns": COLUMNS,
        "waits": {
            until: [
                (
                    w.level,
                    w.gpus,
                    int(within),
                    round(min(ended_s, end_s) - began, 1),
                    int(ended_s <= end_s),
                    round(p, 1),
                )
                for began, w, within, ended_s, p in waits
                if from_s <= began < to_s
            ]
            for until, waits in watch.waits.items()
        },
        "worked_gpu_h": _by_level((w, (to - since) * w.gpus) for w, since, to in watch.worked),
        "worked_measured_gpu_h": sum(
            w.gpus * max(0.0, min(to, to_s) - max(since, from_s)) for w, since, to in watch.worked
        )
        / 3600,
        "finished_gpu_h": _by_level((w, w.duration_s * w.gpus) for at_s, w in watch.finished if from_s <= at_s < to_s),
        "machines": {name: report["run"].get(name) for name in MACHINES},
        "hourly_gpu_h": {name: report["hourly"].get(name) for name in ("available_gpu_hours", "held_gpu_hours")},
        "preemptions": sum(from_s <= at_s < to_s for at_s in watch.evictions),
        "lost_gpu_h": sum(gpu_s for at_s, gpu_s in watch.lost if from_s <= at_s < to_s) / 3600,
    }


def _by_level(amounts: Any) -> dict[str, float]:
    out: dict[str, float] = defaultdict(float)
    for w, gpu_s in amounts:
        out[str(w.level)] += gpu_s / 3600
    return dict(sorted(out.items()))
