"""Large neighbourhood search: CP-SAT chooses new homes for about a dozen tables that share jobs; all others stay.

The CP-SAT model approximates the objective (`tetris.homes_model`). A solution is accepted only if it improves the exact
objective.
"""

import math
from collections.abc import Sequence

import numpy as np

from tetris.columns import Ints
from tetris.homes_model import JOBS, HomesModel
from tetris.problem import PlacementProblem

_TABLES = 6, 16
"""Minimum and maximum number of tables. Small neighbourhoods are solved faster, large ones allow more changes."""
_EFFORT_S = 0.1
"""CP-SAT's limit for each neighbourhood, in deterministic seconds. Most are solved to optimality in half of it."""
_SAME = 1e-9
"""Tolerance for comparing relative excesses over limits."""
_EVALUATIONS_OF_MODEL = 1e6
_EVALUATIONS_PER_S = 3e7
"""Cost of a neighbourhood in evaluations: for building the model, and per deterministic second of CP-SAT."""


class Neighbourhood:
    """Large neighbourhood search for the plan of one problem."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem

    def improve(self, draw: np.random.Generator, most_s: float = math.inf) -> float:
        """Optimises one neighbourhood of the problem's plan and keeps the result if it is better.

        Returns the evaluations spent. CP-SAT's time limit is `most_s`; if it is reached, the result is not
        reproducible.
        """
        tables = self.choose(draw)
        before = self.problem.home[tables].tolist()
        found, effort_s = HomesModel(self.problem, tables).solve(int(draw.integers(1 << 30)), _EFFORT_S, most_s)
        # The last solution is the best one in the model, so it is the most likely improvement.
        for homes in reversed(found):
            if self._is_better(tables, homes):
                break
            self._move(tables, before)
        return _EVALUATIONS_OF_MODEL + _EVALUATIONS_PER_S * effort_s

    def _is_better(self, tables: Ints, homes: Sequence[int]) -> bool:
        """Moves the tables to `homes` and returns whether the plan is better in the exact objective."""
        lack_before, total_before = self.problem.excess[0], self.problem.total
        self._move(tables, homes)
        lack, broken = self.problem.excess
        if broken > _SAME or lack > lack_before + _SAME:
            return False
        return lack < lack_before - _SAME or self.problem.total < total_before

    def _move(self, tables: Ints, homes: Sequence[int]) -> None:
        for table, region in zip(tables.tolist(), homes, strict=True):
            self.problem.move(table, region)

    def choose(self, draw: np.random.Generator) -> Ints:
        """Chooses tables that are connected by shared jobs, from a random table; fills up with random tables."""
        fixed = self.problem.fixed
        most = int(draw.integers(*_TABLES, endpoint=True))
        chosen = [int(draw.integers(len(self.problem.home)))]
        known = set(chosen)
        for table in chosen:
            if len(chosen) >= most:
                break
            jobs = fixed.table_job[fixed.table_start[table] : fixed.table_start[table + 1]]
            for job in draw.permutation(jobs)[:JOBS]:
                others = fixed.job_table[fixed.job_start[job] : fixed.job_start[job + 1]]
                for other in draw.permutation(others)[:most]:
                    if int(other) not in known and len(chosen) < most:
                        known.add(int(other))
                        chosen.append(int(other))
        while len(chosen) < min(most, len(self.problem.home)):
            other = int(draw.integers(len(self.problem.home)))
            if other not in known:
                known.add(other)
                chosen.append(other)
        return np.array(chosen, dtype=np.int32)
