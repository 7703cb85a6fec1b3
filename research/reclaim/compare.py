"""Compares systems on the same scenarios: one run for each system and seed, and figures over seeds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from research.reclaim.engine import simulate
from research.reclaim.estimates import SiteKnowledge
from research.reclaim.scenario import LendingScenario
from research.reclaim.scenario_files import ScenarioDocument, build
from research.reclaim.systems import System


@dataclass(frozen=True)
class Runner:
    """Runs systems on the scenarios of a document, one scenario for each seed."""

    document: ScenarioDocument
    folder: Path
    data: Path | None = None

    def scenario(self, seed: int) -> LendingScenario:
        """Returns the scenario of a seed."""
        return build(self.document, self.folder, self.data, seed)

    def rows(
        self, seeds: Sequence[int], systems: Sequence[System], said: Callable[[str], None] = lambda _: None
    ) -> Iterator[dict[str, Any]]:
        """Yields the result of each system for each seed."""
        for seed in seeds:
            scenario = self.scenario(seed)
            known: dict[tuple[float, ...], SiteKnowledge] = {}
            for system in systems:
                said(f"{system.name}, seed {seed}")
                p = system.parameters
                key = (p.window_days, p.hazard_confidence, p.bandwidth_confidence, p.budget_confidence)
                if key not in known:
                    known[key] = SiteKnowledge(
                        scenario, p.window_days, p.hazard_confidence, p.bandwidth_confidence, p.budget_confidence
                    )
                yield simulate(scenario, system, known[key]).as_json()


@dataclass(frozen=True)
class Figures:
    """The values of one system over seeds."""

    system: str
    rows: tuple[dict[str, Any], ...]

    def values(self, name: str) -> list[float]:
        """Returns the value of each seed that has one."""
        return [float(row[name]) for row in self.rows if row.get(name) is not None]

    def mean(self, name: str) -> float:
        """Returns the mean over seeds; nan if no seed has a value."""
        found = self.values(name)
        return float(np.mean(found)) if found else nan

    def median(self, name: str) -> float:
        """Returns the median over seeds."""
        found = self.values(name)
        return float(np.median(found)) if found else nan


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Figures]:
    """Returns the figures of each system, in the order of first occurrence."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["system"], []).append(row)
    return {name: Figures(name, tuple(of)) for name, of in found.items()}


def ratio(first: Figures, second: Figures, name: str, draws: int = 2000) -> tuple[float, float, float]:
    """Returns the mean of one system over that of another, with a 95 % bootstrap interval over seeds.

    Both systems are resampled together, because they share the scenarios of the seeds.
    """
    by_seed = {row["seed"]: row[name] for row in second.rows if row.get(name) is not None}
    pairs = [(row[name], by_seed[row["seed"]]) for row in first.rows
             if row.get(name) is not None and row["seed"] in by_seed]  # fmt: skip
    if not pairs or not sum(pair[1] for pair in pairs):
        return nan, nan, nan
    table = np.array(pairs, np.float64)
    picks = np.random.default_rng(0).integers(len(table), size=(draws, len(table)))
    sums = table[picks].sum(1)
    drawn = sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], np.nan)
    low, high = np.nanpercentile(drawn, (2.5, 97.5))
    return float(table[:, 0].sum() / table[:, 1].sum()), float(low), float(high)
