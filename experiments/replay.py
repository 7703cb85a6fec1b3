"""Replays a case under policies, and writes down every wait as seen from outside: by what happened to workloads.

    python experiments/replay.py FOLDER POLICY...

Run as a file: `PYTHONPATH` says which checkout's simulator and scheduler it runs, also those of an earlier commit
(`--as NAME` names the outcome). Nothing of a policy's own accounts is used.
"""

import argparse
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulation.policies import POLICIES
from simulation.run import Run, Scenario
from simulation.scenario import Span, from_trace
from simulation.workloads import Hardware, Workload

if TYPE_CHECKING:
    from simulation.transitions import Happened  # Elsewhere in earlier commits.

MACHINES = ("usd", "usd_by", "pools", "interruptions", "available_gpu_hours", "lost_gpu_hours_by")
"""Of the simulator's own accounts, what machines cost and how they came and went; earlier commits say less."""
COLUMNS = ("level", "gpus", "within_quota", "wait_s", "ended", "provisioning_s")
"""Of a wait: of what workload; how long; whether it had ended; how long the provisioning was that ended it."""


class Watch:
    """Follows a run. Times are seconds on the simulation's clock.

    A wait until the award begins with the submission or the notice of an eviction; one until the start with the
    submission or the notice of the eviction that ended its last work. It is within quota if, when it begins, all that
    its tenant has unfinished at its level and above, itself included, is within the tenant's quota of the GPU type:
    a rule that is the same for all policies.
    """

    def __init__(self, workloads: list[Workload], quotas: dict[str, dict[str, int]]) -> None:
        self._of = {w.id: w for w in workloads}
        self._ids = [w.id for w in sorted(workloads, key=lambda w: (w.submit_s, w.id))]
        self._quotas = quotas
        self._unfinished: dict[tuple[str, str, int], int] = defaultdict(int)
        self._began: dict[str, dict[str, tuple[float, bool]]] = {"award": {}, "start": {}}
        self.waits: dict[str, list[tuple[float, Workload, bool, float, float]]] = {"award": [], "start": []}
        """(began, workload, within quota, ended, provisioning) until the award and until the start."""
        self._ready_s: dict[str, float] = {}
        self._owing: dict[str, str] = {}
        """By victim that still holds slots, its evictor."""
        self._works_since_s: dict[str, float] = {}
        self._awards: dict[str, int] = defaultdict(int)
        self._evicted_s: dict[str, float] = {}
        self.worked: list[tuple[Workload, float, float]] = []
        self.finished: list[tuple[float, Workload]] = []
        self.evictions: list[float] = []
        self.lost: list[tuple[float, float]] = []
        """(when, GPU-seconds held without work: through evictions, and through provisioning after the first)."""

    def __call__(self, event: "Happened") -> None:
        """One event of the run."""
        w, at_s = self._of[event.workload], event.at_s
        getattr(self, f"_{event.what}")(w, at_s, event.detail)

    def _submitted(self, w: Workload, at_s: float, _: Any) -> None:
        self._unfinished[self._key(w)] += w.gpus
        self._begin("award", w, at_s)
        self._begin("start", w, at_s)

    def _awarded(self, w: Workload, at_s: float, detail: Any) -> None:
        self._end("award", w, at_s, 0.0)
        self._ready_s[w.id] = at_s
        self._awards[w.id] += 1
        for victim in detail[1]:
            self._owing[self._ids[int(victim)]] = w.id

    def _started(self, w: Workload, at_s: float, _: Any) -> None:
        provisioning_s = at_s - self._ready_s[w.id]
        if w.id in self._began["start"]:
            self._end("start", w, at_s, provisioning_s)
        if self._awards[w.id] > 1:
            self.lost.append((at_s, provisioning_s * w.gpus))
        self._works_since_s[w.id] = at_s

    def _evicted(self, w: Workload, at_s: float, _: Any) -> None:
        self.evictions.append(at_s)
        self._evicted_s[w.id] = at_s
        self._begin("award", w, at_s)
        since_s = self._works_since_s.pop(w.id, None)
        if since_s is not None:
            self.worked.append((w, since_s, at_s))
            self._begin("start", w, at_s)

    _interrupted = _evicted
    """A machine of its own goes."""

    def _left(self, w: Workload, at_s: float, _: Any) -> None:
        self.lost.append((at_s, (at_s - self._evicted_s[w.id]) * w.gpus))
        evictor = self._owing.pop(w.id, None)
        if evictor is not None:
            self._ready_s[evictor] = at_s

    def _finished(self, w: Workload, at_s: float, _: Any) -> None:
        self._unfinished[self._key(w)] -= w.gpus
        self.worked.append((w, self._works_since_s.pop(w.id), at_s))
        self.finished.append((at_s, w))

    def close(self, at_s: float) -> None:
        """The end: what waits has waited so long, and what works has worked."""
        for until, began in self._began.items():
            for id_, (began_s, within) in began.items():
                self.waits[until].append((began_s, self._of[id_], within, float("inf"), 0.0))
        for id_, since_s in self._works_since_s.items():
            self.worked.append((self._of[id_], since_s, at_s))

    def _begin(self, until: str, w: Workload, at_s: float) -> None:
        self._began[until].setdefault(w.id, (at_s, self._is_within(w)))

    def _end(self, until: str, w: Workload, at_s: float, provisioning_s: float) -> None:
        began_s, within = self._began[until].pop(w.id)
        self.waits[until].append((began_s, w, within, at_s, provisioning_s))

    def _key(self, w: Workload) -> tuple[str, str, int]:
        return w.tenant, _type(w), w.level

    def _is_within(self, w: Workload) -> bool:
        if not w.gpus:
            return True
        asked = sum(self._unfinished[w.tenant, _type(w), level] for level in range(1, w.level + 1))
        return asked <= self._quotas.get(w.tenant, {}).get(_type(w), 0)


def _type(w: Workload) -> str:
    return w.jobs[0].gpu_types[0] if w.gpus else ""


def scene_of(folder: Path, fleet: str = "fleet.yaml") -> tuple[dict[str, Any], Scenario]:
    """What is known of a case, and its scenario on one of its fleets."""
    facts = json.loads((folder / "case.json").read_text())
    scene = from_trace(
        folder / fleet, str(folder / "trace.csv"), seed=facts["seed"], until_s=facts["until_s"],
        span=Span(facts["from_s"], facts["until_s"]), measured=Span(facts["measure_from_s"], facts["measure_to_s"]),
    )  # fmt: skip
    return facts, scene


def fitting(scene: Scenario) -> Scenario:
    """The scenario without the workloads that its machines could not hold if they were empty."""
    hardware = Hardware(scene.machines)
    return replace(scene, workloads=[w for w in scene.workloads if all(map(hardware.regions_for, w.jobs))])


def replay(folder: Path, policy: str) -> dict[str, Any]:
    """Runs one policy on a case, without the workloads that would fit nowhere; see `outcome`."""
    facts, scene = scene_of(folder)
    return outcome(facts, fitting(scene), policy)


def outcome(facts: dict[str, Any], scene: Scenario, policy: str) -> dict[str, Any]:
    """Runs one policy, and says what came of it: waits that began in the measured span, work over the whole time."""
    watch = Watch(list(scene.workloads), facts["quotas"])
    began_s = time.perf_counter()
    run = Run(scene, POLICIES[policy], follow=watch).go()
    wall_s = time.perf_counter() - began_s
    from_s, to_s, end_s = (facts[name] - facts["from_s"] for name in ("measure_from_s", "measure_to_s", "until_s"))
    watch.close(end_s)
    report = run.to_json()
    return {
        "policy": policy,
        "case": facts["name"],
        "wall_s": wall_s,
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


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("policies", nargs="+")
    parser.add_argument("--as", dest="name", help="what the outcome is called, instead of the policy's name")
    args = parser.parse_args()
    for policy in args.policies:
        path = args.folder / f"{args.name or policy}.json"
        if path.exists():
            continue
        new = path.with_suffix(".new")
        new.write_text(json.dumps(replay(args.folder, policy)))
        new.replace(path)
        print(f"{args.folder.name} {path.stem}", flush=True)


if __name__ == "__main__":
    main()
