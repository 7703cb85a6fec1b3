"""Large neighbourhoods: a dozen tables that share jobs are placed anew as a whole by CP-SAT, all others staying.

CP-SAT's model is near the objective but not it (`tetris.homes_model`): what it finds is taken only if the exact
objective says that it is better.
"""

import math
from collections.abc import Sequence

import numpy as np

from tetris.columns import Ints
from tetris.homes_model import JOBS, HomesModel
from tetris.problem import Problem

_TABLES = 6, 16
"""How many, from and to: small ones are solved at once, large ones see more."""
_EFFORT_S = 0.1
"""Deterministic seconds of CP-SAT for each neighbourhood; most are proved in half of that."""
_SAME = 1e-9
"""Relative excesses over limits that differ by less are the same."""
_EVALUATIONS_OF_MODEL = 1e6
_EVALUATIONS_PER_S = 3e7
"""What a neighbourhood costs, in evaluations: its model, and each of CP-SAT's deterministic seconds."""


class Neighbourhood:
    """Improves plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def improve(self, draw: np.random.Generator, most_s: float = math.inf) -> float:
        """Place one neighbourhood of the problem's plan anew, if that is better; returns the evaluations spent.

        CP-SAT gets no more than `most_s` seconds: where that ends it, its answer is not reproducible.
        """
        tables = self.choose(draw)
        before = self.problem.home[tables].tolist()
        found, effort_s = HomesModel(self.problem, tables).solve(int(draw.integers(1 << 30)), _EFFORT_S, most_s)
        # The last one is the model's best, and so the most likely.
        for homes in reversed(found):
            if self._is_better(tables, homes):
                break
            self._move(tables, before)
        return _EVALUATIONS_OF_MODEL + _EVALUATIONS_PER_S * effort_s

    def _is_better(self, tables: Ints, homes: Sequence[int]) -> bool:
        """Move the tables there, and say whether the plan is better by the exact objective."""
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
        """Tables that are near each other: they share jobs with one that is drawn, or with one of those."""
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
