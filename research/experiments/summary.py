"""Aggregates outcomes over the seeds of one trace, variant, load and policy: misses, waits and GPU hours."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from research.experiments.cases import HIGH_LEVELS, ExperimentCase
from simulation.settings import SimulationSettings

OBJECTIVE_S = SimulationSettings().objective_s
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Wait:
    """A wait that began in the measured span; see `research.experiments.replay.COLUMNS`."""

    level: int
    gpus: int
    within_quota: bool
    wait_s: float
    ended: bool
    provisioning_s: float

    @property
    def missed(self) -> bool | None:
        """Whether the wait exceeded its level's objective; None: there is no objective, or the run ended before it."""
        objective_s = OBJECTIVE_S.get(self.level)
        if objective_s is None or (not self.ended and self.wait_s <= objective_s):
            return None
        return self.wait_s > objective_s

    @property
    def avoidable(self) -> bool:
        """Whether the objective was missed, although provisioning alone did not take longer than the objective."""
        return bool(self.missed) and not (self.ended and self.provisioning_s > OBJECTIVE_S[self.level])


@dataclass(frozen=True)
class Misses:
    """Numbers of missed and of judged waits."""

    missed: int
    judged: int

    @property
    def percent(self) -> float:
        """Percentage of missed waits among the judged ones; NaN if there are none."""
        return 100 * self.missed / self.judged if self.judged else float("nan")


@dataclass(frozen=True)
class PolicyResult:
    """The outcome of one policy on one case."""

    case: ExperimentCase
    policy: str
    body: dict[str, Any]

    def waits(self, until: str) -> list[Wait]:
        """Returns the waits until `award` or `start`."""
        return [
            Wait(level, gpus, bool(within), wait_s, bool(ended), provisioning_s)
            for level, gpus, within, wait_s, ended, provisioning_s in self.body["waits"][until]
        ]

    def worked_gpu_h(self, levels: Iterable[int] = range(1, 8)) -> float:
        """Returns the GPU hours that workloads of these levels ran over the whole time, saved or not."""
        return float(sum(self.body["worked_gpu_h"].get(str(level), 0.0) for level in levels))


def load(out: Path, cases: Iterable[ExperimentCase], policies: Sequence[str]) -> list[PolicyResult]:
    """Returns the outcomes of the cases and policies that were run."""
    found = []
    for case in cases:
        for policy in policies:
            path = case.folder(out) / f"{policy}.json"
            if path.exists():
                found.append(PolicyResult(case, policy, json.loads(path.read_text())))
    return found


def misses(
    outcomes: Iterable[PolicyResult], until: str, levels: Sequence[int] = HIGH_LEVELS, *, within: bool = False,
    avoidable: bool = False,
) -> Misses:  # fmt: skip
    """Counts the misses of some levels; `within`: only waits within quota; `avoidable`: only avoidable misses."""
    judged = [
        wait
        for outcome in outcomes
        for wait in outcome.waits(until)
        if wait.level in levels and wait.missed is not None and (wait.within_quota or not within)
    ]
    return Misses(sum(bool(wait.avoidable if avoidable else wait.missed) for wait in judged), len(judged))


def wait_figures(
    outcomes: Iterable[PolicyResult], until: str, levels: Sequence[int], gpus: Sequence[int]
) -> list[float] | None:
    """Returns mean, P50, P95 and P99 in seconds; None: no waits. Unfinished waits count up to the end of the run."""
    waits = [
        wait.wait_s
        for outcome in outcomes
        for wait in outcome.waits(until)
        if wait.level in levels and wait.gpus in gpus
    ]
    if not waits:
        return None
    return [float(np.mean(waits)), *map(float, np.percentile(waits, PERCENTILES, method="inverted_cdf"))]


def bound_gpu_h(out: Path, case: ExperimentCase, levels: Sequence[int]) -> float:
    """Returns the fluid bound in GPU hours for levels 1 to the largest of `levels`; NaN: it was not computed."""
    path = case.folder(out) / "bound.json"
    if not path.exists():
        return float("nan")
    most = json.loads(path.read_text())
    return float(max((gpu_h for level, gpu_h in most.items() if int(level) <= max(levels)), default=0.0))
