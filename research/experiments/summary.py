"""The figures of one policy on one cell, and their comparison with the goals."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from research.experiments.cases import HIGH_LEVELS
from simulation.settings import SimulationSettings

OBJECTIVE_S = SimulationSettings().objective_s
GROUPS: Mapping[str, tuple[int, ...]] = {"1-2": (1, 2), "3-4": (3, 4), "5-7": (5, 6, 7), "all": (1, 2, 3, 4, 5, 6, 7)}
"""Levels whose waits are evaluated together."""
NOISE_S = 10.0
"""Mean waits that differ by less count as equal: passes are 60 s apart, and their times depend on the policy."""
_LEVEL, _WITHIN, _WAIT_S, _ENDED = 0, 2, 3, 4
"""Indexes of the columns of a wait (`research.experiments.replay.COLUMNS`)."""


@dataclass(frozen=True)
class CellFigures:
    """The figures of one policy on one cell. Waits are those until the award that began in the measured span."""

    missed: int
    """Waits of levels 1 and 2 that were longer than the objective."""
    judged: int
    """Waits of levels 1 and 2 that ended, or were longer than the objective when the run ended."""
    missed_within: int
    """Of these waits, those within quota: when the wait begins, all unfinished work of the tenant, of the same level or
    a better one, fits into its quota."""
    judged_within: int
    waits_s: dict[str, list[float]]
    """Mean, P50 and P99 by group of levels; waits that are unfinished count up to the end of the run."""
    worked_gpu_h: float
    """GPU hours in which workloads worked, over the whole run."""
    worked_high_gpu_h: float
    """GPU hours in which workloads of levels 1 and 2 worked, over the whole run."""
    worked_measured_gpu_h: float
    """The same of all levels, in the measured span; 0: unknown (the baseline)."""
    lost_gpu_h: float
    """GPU hours held without work because of evictions, in the measured span."""
    preemptions: int
    cpu_s: float
    """CPU time of the run; wall time for the baseline."""

    @property
    def missed_percent(self) -> float:
        """Percentage of missed waits among the judged ones of levels 1 and 2."""
        return 100 * self.missed / self.judged if self.judged else 0.0

    def mean_s(self, group: str) -> float | None:
        """Returns the mean wait in seconds of a group of priority levels; None: no workload of the group has waited."""
        return self.waits_s[group][0] if group in self.waits_s else None


def figures(body: Mapping[str, Any]) -> CellFigures:
    """Returns the figures of an outcome (`research.experiments.replay.outcome`)."""
    waits = body["waits"]["award"]
    high = [(wait[_WAIT_S] > OBJECTIVE_S[wait[_LEVEL]], wait) for wait in waits if wait[_LEVEL] in HIGH_LEVELS]
    judged = [(late, wait) for late, wait in high if late or wait[_ENDED]]
    within = [late for late, wait in judged if wait[_WITHIN]]
    by_group = {group: [wait[_WAIT_S] for wait in waits if wait[_LEVEL] in levels] for group, levels in GROUPS.items()}
    worked = body["worked_gpu_h"]
    return CellFigures(
        sum(late for late, _ in judged),
        len(judged),
        sum(within),
        len(within),
        {
            group: [float(np.mean(here)), *map(float, np.percentile(here, (50, 99), method="inverted_cdf"))]
            for group, here in by_group.items()
            if here
        },
        sum(worked.values()),
        sum(worked.get(str(level), 0.0) for level in HIGH_LEVELS),
        body.get("worked_measured_gpu_h", 0.0),
        body["lost_gpu_h"],
        body["preemptions"],
        body.get("cpu_s") or body["wall_s"],
    )


@dataclass(frozen=True)
class CellVerdict:
    """Whether a cell meets one goal."""

    goal: str
    met: bool
    says: str
    """The value that was compared: a ratio, or percentages."""


def against_baseline(new: CellFigures, old: CellFigures, *, drawn: bool) -> Iterator[CellVerdict]:
    """Yields for each goal whether a policy meets it in one cell of the experiment, relative to the baseline.

    `drawn`: the cell's levels are drawn, so that the goals on lost GPU hours apply, too.
    """
    now, was = new.missed_percent, old.missed_percent
    met = now <= 0.3 if was < 0.6 else now <= 0.5 * was
    yield CellVerdict("misses 1-2", met, _misses(new, old))
    yield from _mean("1-2", new, old, 0.5, above_s=600.0)
    yield from _mean("3-4", new, old, 1.1)
    yield from _mean("all", new, old, 1.05)
    yield from _mean("5-7", new, old, 1.8)
    if drawn:
        part = new.lost_gpu_h / new.worked_measured_gpu_h if new.worked_measured_gpu_h else 0.0
        met = new.lost_gpu_h <= 2.2 * old.lost_gpu_h and part <= 0.015
        yield CellVerdict("lost", met, f"{_ratio(new.lost_gpu_h, old.lost_gpu_h)}, {100 * part:.1f} %")
    worked = new.worked_gpu_h / old.worked_gpu_h
    yield CellVerdict("worked", worked >= 0.98, f"{worked:.3f}")


def _mean(group: str, new: CellFigures, old: CellFigures, most: float, above_s: float = 0.0) -> Iterator[CellVerdict]:
    """Yields the verdict on a group's mean wait, if the group has waits and its baseline is above `above_s`."""
    now, was = new.mean_s(group), old.mean_s(group)
    if now is not None and was is not None and was > above_s:
        yield CellVerdict(f"wait {group}", now <= most * was + NOISE_S, _ratio(now, was))


def against_rival(ours: CellFigures, theirs: CellFigures) -> Iterator[CellVerdict]:
    """Yields the verdicts on a cell against another scheduler: its misses and mean waits must not be better."""
    mine, their = ours.missed_percent, theirs.missed_percent
    yield CellVerdict("misses", mine <= their, _misses(ours, theirs))
    for group in GROUPS:
        now, was = ours.mean_s(group), theirs.mean_s(group)
        if now is not None and was is not None:
            yield CellVerdict(group, now <= was + NOISE_S, _ratio(now, was))


def _misses(new: CellFigures, old: CellFigures) -> str:
    return f"{old.missed} of {old.judged} to {new.missed} of {new.judged}"


def _ratio(new: float, old: float) -> str:
    return f"{new / old:.2f}" if old else ("1" if not new else "more")
