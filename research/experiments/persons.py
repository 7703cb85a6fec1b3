"""Plays a cell in which some persons follow a strategy, and measures what they get from it."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

from research.experiments.cases import OURS
from research.experiments.policies import policy_of
from research.experiments.strategies import GamingStrategy, RewrittenPiece, persons, rewritten
from simulation.run import Run
from simulation.scenario import Scenario
from simulation.simulator import Simulator
from simulation.transitions import Happened

FIGURES = ("wait_h", "delay_h", "worked_gpu_h")
TENANTS = 3


@dataclass
class PersonActions:
    """Observes a run and acts for the persons: submits, cancels, and lets slots wait for work."""

    strategy: GamingStrategy
    pieces: Sequence[RewrittenPiece]
    simulator: Simulator | None = None
    awarded_s: dict[str, float] = field(default_factory=dict)
    """By workload, its first award; of other people's workloads, too."""
    finished_s: dict[str, float] = field(default_factory=dict)
    runs: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    """By workload, the beginning and end of each time in which it worked."""

    def __post_init__(self) -> None:
        """Prepares the look-ups by workload."""
        self._piece_of = {w.id: piece for piece in self.pieces for w in piece.workloads}
        self._next = {a.id: b.id for piece in self.pieces for lane in piece.lanes for a, b in pairwise(lane)}
        self._winner: dict[str, str] = {}

    def __call__(self, event: Happened) -> None:
        """Processes one event of the run."""
        id_, at_s, simulator = event.workload, event.at_s, self.simulator
        if id_ not in self._piece_of:
            if event.what == "awarded":
                self.awarded_s.setdefault(id_, at_s)
            return
        assert simulator is not None
        if event.what == "submitted" and self.strategy.resubmit_after_s < inf:
            simulator.cancel(at_s + self.strategy.resubmit_after_s, id_)
        elif event.what == "cancelled" and self.strategy.resubmit_after_s < inf:
            simulator.submit(at_s, id_)
        elif event.what == "awarded" and id_ not in self.awarded_s:
            self.awarded_s[id_] = at_s
            if self.strategy.copies:
                self._cancel_copies(simulator, at_s, id_)
        elif event.what == "started":
            idle_s = max(0.0, self._piece_of[id_].origin.submit_s - at_s)
            if idle_s:
                simulator.prolong(at_s, id_, idle_s)
            self.runs[id_].append([at_s + idle_s, inf])
        elif event.what in ("evicted", "interrupted", "finished"):
            if self.runs[id_] and self.runs[id_][-1][1] == inf:
                self.runs[id_][-1][1] = max(at_s, self.runs[id_][-1][0])
            if event.what == "finished":
                self.finished_s[id_] = at_s
                if id_ in self._next:
                    simulator.submit(at_s, self._next[id_])

    def _cancel_copies(self, simulator: Simulator, at_s: float, id_: str) -> None:
        piece = self._piece_of[id_]
        winner = self._winner.setdefault(piece.origin.id, id_)
        # A second copy that is awarded in the same pass ends as soon as it has started.
        for copy in [w.id for w in piece.workloads] if winner == id_ else [id_]:
            if copy != winner:
                simulator.cancel(at_s, copy)

    def figures(self, piece: RewrittenPiece, end_s: float) -> dict[str, float]:
        """Returns the figures of a piece up to `end_s`: wait, delay of its end (hours), and worked GPU hours.

        The wait of a lane is the time from the need, which is the honest submission, to the award of its last workload,
        without the work of those before it. The delay is the time from the need to the end, without work. The longest
        lane counts, or of copies the one that was awarded first.
        """
        lanes = piece.lanes
        if piece.copies:
            lanes = tuple(lane for lane in lanes if lane[0].id == self._winner.get(piece.origin.id)) or lanes[:1]
        need_s, waits, delays, gpu_s = piece.origin.submit_s, [], [], 0.0
        for lane in lanes:
            worked = [sum(min(b, end_s) - a for a, b in self.runs[w.id] if a < end_s) for w in lane]
            before, work_s = sum(worked[:-1]), sum(worked)
            waits.append(max(0.0, min(end_s, self.awarded_s.get(lane[-1].id, inf)) - need_s - before))
            delays.append(min(end_s, self.finished_s.get(lane[-1].id, inf)) - need_s - work_s)
            gpu_s += work_s * lane[0].gpus
        return {"wait_h": max(waits) / 3600, "delay_h": max(delays) / 3600, "worked_gpu_h": gpu_s / 3600}


def play(scene: Scenario, strategy: GamingStrategy, who: set[tuple[str, str]], policy: str = OURS) -> PersonActions:
    """Runs a scenario in which some persons follow a strategy with everything that they submit in it."""
    best: dict[str, int] = {}
    for w in scene.workloads:
        best[w.tenant] = min(best.get(w.tenant, w.level), w.level)
    mine = {w.id: w for w in scene.workloads if (w.tenant, w.user) in who and w.submit_s >= 0}
    pieces = [rewritten(w, strategy, best[w.tenant]) for w in mine.values()]
    work = [w for w in scene.workloads if w.id not in mine] + [w for piece in pieces for w in piece.workloads]
    actions = PersonActions(strategy, pieces)
    run = Run(replace(scene, workloads=work), policy_of(policy), follow=actions)
    actions.simulator = run.simulator
    run.go()
    return actions


def outcome_of(facts: dict[str, Any], scene: Scenario, strategy: GamingStrategy, policy: str) -> dict[str, Any]:
    """Plays a strategy on a cell, and returns the sums of each person's figures over the measured span.

    `others_wait_h` is the sum of all other people's waits until the first award, in hours.
    """
    from_s, to_s, end_s = (facts[name] - facts["from_s"] for name in ("measure_from_s", "measure_to_s", "until_s"))
    began_s = time.process_time()
    who = persons(scene.workloads, from_s, to_s, TENANTS)
    actions = play(scene, strategy, who, policy)
    others = [w for w in scene.workloads if (w.tenant, w.user) not in who and from_s <= w.submit_s < to_s]
    waits_s = (min(end_s, actions.awarded_s.get(w.id, end_s)) - w.submit_s for w in others)
    out: dict[str, Any] = {"cpu_s": time.process_time() - began_s, "others_wait_h": sum(waits_s) / 3600}
    for tenant, user in sorted(who):
        own = [p for p in actions.pieces if (p.origin.tenant, p.origin.user) == (tenant, user)]
        found = [actions.figures(piece, end_s) for piece in own if from_s <= piece.origin.submit_s < to_s]
        sums = {name: sum(one[name] for one in found) for name in FIGURES}
        out[f"{tenant}/{user}"] = {"pieces": len(found), **sums}
    return out
