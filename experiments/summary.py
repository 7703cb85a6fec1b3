"""Figures of outcomes: misses, waits, GPU hours, over the seeds of one trace, variant, load and policy."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cases import HIGH_LEVELS, Case
from simulation.settings import Settings

OBJECTIVE_S = Settings().objective_s
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Wait:
    """A wait that began in the measured span; see `experiments.replay.COLUMNS`."""

    level: int
    gpus: int
    within_quota: bool
    wait_s: float
    ended: bool
    provisioning_s: float

    @property
    def missed(self) -> bool | None:
        """Whether it was longer than its level's objective; None: there is none, or the run ended before."""
        objective_s = OBJECTIVE_S.get(self.level)
        if objective_s is None or (not self.ended and self.wait_s <= objective_s):
            return None
        return self.wait_s > objective_s

    @property
    def avoidable(self) -> bool:
        """It was missed, and not because provisioning alone took longer than the objective."""
        return bool(self.missed) and not (self.ended and self.provisioning_s > OBJECTIVE_S[self.level])


@dataclass(frozen=True)
class Misses:
    """Missed and judged waits."""

    missed: int
    judged: int

    @property
    def percent(self) -> float:
        """Of the judged; not a number where there are none."""
        return 100 * self.missed / self.judged if self.judged else float("nan")


@dataclass(frozen=True)
class Outcome:
    """What came of one policy on one case."""

    case: Case
    policy: str
    body: dict[str, Any]

    def waits(self, until: str) -> list[Wait]:
        """Until `award` or `start`."""
        return [
            Wait(level, gpus, bool(within), wait_s, bool(ended), provisioning_s)
            for level, gpus, within, wait_s, ended, provisioning_s in self.body["waits"][until]
        ]

    def worked_gpu_h(self, levels: Iterable[int] = range(1, 8)) -> float:
        """GPU hours of work that levels did over the whole time, saved or not."""
        return float(sum(self.body["worked_gpu_h"].get(str(level), 0.0) for level in levels))


def load(out: Path, cases: Iterable[Case], policies: Sequence[str]) -> list[Outcome]:
    """The outcomes that there are."""
    found = []
    for case in cases:
        for policy in policies:
            path = case.folder(out) / f"{policy}.json"
            if path.exists():
                found.append(Outcome(case, policy, json.loads(path.read_text())))
    return found


def misses(
    outcomes: Iterable[Outcome], until: str, levels: Sequence[int] = HIGH_LEVELS, *, within: bool = False,
    avoidable: bool = False,
) -> Misses:  # fmt: skip
    """Of some levels; `within`: only waits within quota; `avoidable`: no misses by provisioning alone."""
    judged = [
        wait
        for outcome in outcomes
        for wait in outcome.waits(until)
        if wait.level in levels and wait.missed is not None and (wait.within_quota or not within)
    ]
    return Misses(sum(bool(wait.avoidable if avoidable else wait.missed) for wait in judged), len(judged))


def wait_figures(
    outcomes: Iterable[Outcome], until: str, levels: Sequence[int], gpus: Sequence[int]
) -> list[float] | None:
    """Mean, P50, P95 and P99 in seconds, unfinished waits as long as they were at the end; None: no waits."""
    waits = [
        wait.wait_s
        for outcome in outcomes
        for wait in outcome.waits(until)
        if wait.level in levels and wait.gpus in gpus
    ]
    if not waits:
        return None
    return [float(np.mean(waits)), *map(float, np.percentile(waits, PERCENTILES, method="inverted_cdf"))]


def bound_gpu_h(out: Path, case: Case, levels: Sequence[int]) -> float:
    """The fluid bound of a case for all levels from the first to the last of `levels`; nan: it was not computed."""
    path = case.folder(out) / "bound.json"
    if not path.exists():
        return float("nan")
    most = json.loads(path.read_text())
    return float(max((gpu_h for level, gpu_h in most.items() if int(level) <= max(levels)), default=0.0))
