"""The method `climb`: MAST 3.4's algorithm, then what it left open, within a budget.

The plain algorithm, `one_pass`: find each table's best region by itself, queue the tables by what they gain, and move
each one if that still gains when its turn comes, within the quota of moved bytes. Passes are repeated until none gains,
or too little for what it costs: no single table's move helps much then.

From there: one long annealed walk from the start's plan, whose steps also move all tables of an ML job, a cluster of
tables that share jobs, or let two tables change places (`tetris.cooling` has its temperatures). What is left of the
budget goes to shorter walks from the best plan; to more long walks, where there is room for them, since where a walk
ends is partly chance; to neighbourhoods that CP-SAT solves again as a whole (`tetris.neighbourhood`); and for instances
small enough to the exact method, which ends the search when it has proved the plan.

Effort is counted in evaluations (a job or a region that was looked at), so the same seed and budget give the same plan,
unless the clock ends the search first (`tetris.budget`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from domain.instance import Instance, Job, Region, Table
from tetris.budget import Budget
from tetris.columns import Columns, Floats, Ints
from tetris.cooling import Cooling
from tetris.exact.answer import TooLarge
from tetris.exact.branch import Branching
from tetris.kernels import search
from tetris.kernels.layout import Room
from tetris.problem import Problem

if TYPE_CHECKING:
    from tetris.neighbourhood import Neighbourhood

LACKING = 1e3
"""What the relative excess over limits weighs where a plan is to be published, in magnitudes of the objective: it comes
before everything else."""
_PENALTIES = (0.3, 3.0, 30.0)
"""What it weighs on walks, in parts of the objective, in turns; the long walk takes the second."""
_SAMPLES, _SAMPLES_OF_LONG_WALK = 200, 2000
"""Tables whose moves are looked at for the scale of a walk's temperatures."""
_LONG_WALKS = 0.93
"""What long walks take of the budget at most."""
_LEAST_PASSES = 200
"""What a long walk takes at least: a shorter one ends above what greedy passes reach."""
_PASSES_OF_TABLE = 150
"""What it takes at most, about, in passes for each table: where the budget is several times that, several walks reduce
the part of chance. With 300 dense tables that is 12 s: one walk of 14 s found a plan 7% better than the best of four of
3.5 s, one of 56 s a plan worse than one of 9 s.
"""
_SHORTEST_WALK, _LONGEST_WALK = 2e5, 0.25
"""Of the other walks, in evaluations and in parts of the budget."""
_PASSES_OF_WALK = 200, 40, 40, 200
"""What walks look at, as many as so many passes, in turns: long ones for many tables, short ones for neighbourhoods
between them."""
_NEIGHBOURHOODS = 0.25
"""What is spent on them after a walk, in parts of what the walk was."""
_SMALL = 1e-3
"""A pass that gains a smaller part of the objective ends passes, where it costs a larger part of the budget."""
_WALKS_BEFORE_PROOF = 4
_BRANCHED = 32
"""Tables of an instance that the exact method may prove."""
_EVALUATIONS_OF_NODE = 40
_EVALUATIONS_OF_IMPORT = 20e6
"""What importing CP-SAT costs: where less is left after the long walk, there are no neighbourhoods."""
_CHUNK = 20_000
"""Tables between two looks at the clock."""
_PIECE = 2e6
"""Evaluations between two looks at the clock on a walk."""
_MOST_TABLES = 64
"""Jobs and clusters of more tables are not moved as a whole."""


@dataclass(frozen=True, slots=True)
class Step:
    """How far a search has come."""

    phase: str
    part: float
    """Of the budget, 0..1."""
    total: float
    """Of the best plan so far."""
    lack: float
    """Its relative excess over the limits."""
    time_s: float


@dataclass(frozen=True, slots=True)
class Climbed:
    """The best plan that was found."""

    home: Ints
    """[T]"""
    total: float
    lack: float
    proved: bool
    """No plan that may be chosen is better."""
    moves: int
    evaluations: int
    steps: tuple[Step, ...] = field(repr=False)
    """Each improvement."""


Listener = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class _Walk:
    """One annealed walk."""

    heats: Cooling
    length: float
    """In evaluations."""
    penalty: float
    """What the relative excess over limits weighs."""


def climb(
    columns: Columns,
    *,
    time_s: float,
    seed: int = 0,
    listener: Listener | None = None,
    stop: Callable[[], bool] = lambda: False,
    proves: bool = True,
    clock: Callable[[], float] = time.monotonic,
    ends_s: float | None = None,
) -> Climbed:
    """The best plan found within the budget: about `time_s` seconds, 0 for the greedy passes alone.

    `listener` hears of each improvement and, now and then, how far the search is; the search ends where `stop` says so.
    Without `proves` it does not try to prove small plans. `ends_s`: when to end at the latest, on `clock`; compiled
    code is loaded before the budget begins, but not before `ends_s` counts.

    Raises:
        ValueError: `time_s` is negative.
    """
    if time_s < 0:
        raise ValueError(f"time_s: {time_s}: must be 0 or more seconds")
    load(proves and may_prove(columns))
    return _Climb(columns, time_s, seed, listener, stop, proves, clock, ends_s).run()


def may_prove(columns: Columns) -> bool:
    """Whether the instance is small enough that a search may prove its plan by the exact method."""
    return len(columns.home) <= _BRANCHED


@cache
def load(exact: bool = True) -> None:
    """Have the compiled code loaded, or compiled, before the clock runs; that of the exact method too if `exact`."""
    regions = tuple(Region(name, 2.0, {"g": 1.0}) for name in "ab")
    tables = Table("s", 1.0, "a"), Table("t", 1.0, "b")
    jobs = (Job("j", "ml", ("s", "t"), 1, gpu_type="g", gpu_hours=1.0), Job("k", "spark", ("s", "t"), 1))
    columns = Columns.of(Instance(regions, tables, jobs))
    # By effort alone: compiling takes longer than any time that would do.
    _Climb(columns, 0.01, 0, None, lambda: False, False, lambda: 0.0).run()
    if exact:
        Branching(columns).go_on()
    problem = Problem(columns)
    problem.weigh(0)
    problem.move(0, 1)


def one_pass(problem: Problem, spent: Floats, tick: Callable[[], bool] = lambda: True) -> int:
    """One pass of MAST 3.4 over all tables; how many moved. `tick` is asked now and then whether to go on."""
    parts = problem.fixed, problem.state, problem.work
    penalty = LACKING * problem.magnitude
    tables = np.arange(len(problem.home), dtype=np.int32)
    gain = np.zeros(len(tables))
    for begin in range(0, len(tables), _CHUNK):
        end = begin + _CHUNK
        search.rank(*parts, tables[begin:end], penalty, spent, gain[begin:end])
        if not tick():
            return 0
    order = np.argsort(-gain, kind="stable")
    queue = tables[order[gain[order] > 0]]
    moved = 0
    for begin in range(0, len(queue), _CHUNK):
        moved += search.take(*parts, queue[begin : begin + _CHUNK], penalty, spent)
        if not tick():
            break
    return moved


class _Climb:
    def __init__(
        self,
        columns: Columns,
        time_s: float,
        seed: int,
        listener: Listener | None,
        stop: Callable[[], bool],
        proves: bool,
        clock: Callable[[], float],
        ends_s: float | None = None,
    ) -> None:
        self.time_s = time_s
        self.budget = Budget(time_s, clock, ends_s)
        self.listener = listener
        self.stop = stop
        self.seed = seed
        self.draw = np.random.default_rng(seed)
        self.problem = Problem(columns)
        self.parts = self.problem.fixed, self.problem.state, self.problem.work
        self.tables = np.arange(len(columns.home), dtype=np.int32)
        self.best = columns.home.copy()
        self.proves, self.proved = proves, False
        self.spent = np.zeros(search.N_TALLY)
        lack, _ = self.problem.excess
        self.spent[search.BEST_LACK] = self.spent[search.LEAST_LACK] = lack
        self.spent[search.BEST_TOTAL] = self.problem.total
        self.steps: list[Step] = []
        self._say("start")

    def run(self) -> Climbed:
        if not len(self.tables) or len(self.problem.columns.regions) == 1:
            # The start is the only plan.
            self.proved = True
        else:
            search.seed(self.seed & 0xFFFFFFFF)
            self._descend("passes")
            if self.time_s:
                self._search()
        spent = self.spent
        return Climbed(
            self.best, float(spent[search.BEST_TOTAL]), float(spent[search.BEST_LACK]), self.proved,
            int(spent[search.MOVES]), int(spent[search.EVALUATIONS]), tuple(self.steps),
        )  # fmt: skip

    def _search(self) -> None:
        self.jobs = search.joined_jobs(self.problem.fixed, _MOST_TABLES)
        self.room = Room(
            np.zeros(_MOST_TABLES, np.int32), np.zeros(_MOST_TABLES, np.int32), np.zeros(len(self.tables) + 1, np.int32)
        )
        penalty = _PENALTIES[1] * float(self.spent[search.BEST_TOTAL])
        if search.spread(*self.parts, self.tables, _SAMPLES, penalty, self.spent) <= 0.0:
            # Whatever moves, nothing changes: there is nothing to walk for.
            self._is_proved()
            return
        long = self.plan_long_walk(penalty)
        if long is not None:
            self._take(self.problem.columns.home)
            self._walk(long)
        neighbourhood = None
        if self.budget.left(float(self.spent[search.EVALUATIONS])) > 2 * _EVALUATIONS_OF_IMPORT and self._goes_on():
            # CP-SAT takes seconds to import; who only places or explains tables has no use for it.
            from tetris.neighbourhood import Neighbourhood

            neighbourhood = Neighbourhood(self.problem)
            self.spent[search.EVALUATIONS] += _EVALUATIONS_OF_IMPORT
        turn = 0
        while self._goes_on():
            # Each fourth walk starts over: a long one where there is room for most of it, else one that is hot, so that
            # what moves cost is no obstacle.
            fresh = turn % 4 == 3
            self._take(self.problem.columns.home if fresh else self.best)
            if fresh and long is not None and self.budget.left(float(self.spent[search.EVALUATIONS])) > long.length / 2:
                walk = long
            else:
                walk = self._plan_short_walk(turn, fresh)
            if walk.heats.hot > 0.0:
                self._walk(walk)
            if neighbourhood is not None and turn % 2:
                self._improve(neighbourhood, self.spent[search.EVALUATIONS] + _NEIGHBOURHOODS * walk.length)
            turn += 1
            if turn == _WALKS_BEFORE_PROOF and self._is_proved():
                return

    def plan_long_walk(self, penalty: float) -> _Walk | None:
        """A walk of those that share most of the budget; None if the budget is too small for one."""
        share, in_pass = _LONG_WALKS * self.budget.evaluations, self._evaluations_of_a_pass()
        if share < _LEAST_PASSES * in_pass or not self._goes_on():
            return None
        # Without the penalty: what limits cost says nothing of the objective's scale.
        change = search.spread(*self.parts, self.tables, _SAMPLES_OF_LONG_WALK, 0.0, self.spent)
        if change <= 0.0:
            return None
        walks = max(1, round(share / (_PASSES_OF_TABLE * len(self.tables) * in_pass)))
        return _Walk(Cooling.of_long_walk(change), share / walks, penalty)

    def _plan_short_walk(self, turn: int, fresh: bool) -> _Walk:
        """One from the plan as it is; the hottest if it starts over."""
        passes = _PASSES_OF_WALK[turn % 4]
        longest = self.budget.evaluations * _LONGEST_WALK
        length = max(_SHORTEST_WALK, min(longest, passes * self._evaluations_of_a_pass()))
        penalty = _PENALTIES[turn % 3] * float(self.spent[search.BEST_TOTAL])
        if self.spent[search.BEST_LACK] > 0 and turn % 2:
            penalty = LACKING * self.problem.magnitude
        hot = search.spread(*self.parts, self.tables, _SAMPLES, penalty, self.spent)
        cold = hot * 1e-4
        if not fresh:
            hot *= 10.0 ** self.draw.uniform(-2.5, 0.0)
        return _Walk(Cooling(hot, cold), length, penalty)

    def _walk(self, walk: _Walk) -> None:
        """Anneal for so many evaluations, or as many as there is time for: where time is short, it cools faster."""
        spent, budget, heats = self.spent, self.budget, walk.heats
        length = max(1.0, min(walk.length, budget.evaluations - spent[search.EVALUATIONS]))
        began, began_time = spent[search.EVALUATIONS], budget.part_of_time
        # The part of the time that the walk may take: as much of what is left as its effort is of the effort left.
        time = max((1.0 - began_time) * length / max(budget.left(began), length), 1e-9)
        done = 0.0
        # In pieces, of which none keeps anybody waiting who interrupts it or watches.
        while done < 1.0:
            piece = min(_PIECE, length)
            search.walk(
                *self.parts, self.tables, self.jobs, piece, heats.at(done), heats.at(min(1.0, done + piece / length)),
                walk.penalty, self.best, spent, self.room,
            )  # fmt: skip
            done = max((spent[search.EVALUATIONS] - began) / length, (budget.part_of_time - began_time) / time)
            if not (self._tick("walks") and self._goes_on()):
                break
        self._descend("walks")

    def _improve(self, neighbourhood: "Neighbourhood", until: float) -> None:
        """Neighbourhoods of the best plan, one at least, until so many evaluations are spent."""
        self._take(self.best)
        while self._goes_on():
            self.spent[search.EVALUATIONS] += neighbourhood.improve(self.draw, self.budget.left_s)
            self._keep("neighbourhoods")
            if self.spent[search.EVALUATIONS] >= until or not self._tick("neighbourhoods"):
                break
        self._descend("neighbourhoods")

    def _is_proved(self) -> bool:
        """Whether the exact method's branch and bound shows, within half of what is left, that no plan is better."""
        if not self.proves or not may_prove(self.problem.columns):
            return False
        try:
            branching = Branching(self.problem.columns)
        except TooLarge:
            return False
        branching.offer(self.best)
        share = self.spent[search.EVALUATIONS] + (self.budget.evaluations - self.spent[search.EVALUATIONS]) / 2
        while not branching.done and self.spent[search.EVALUATIONS] < share and self._goes_on():
            nodes = branching.nodes
            branching.go_on()
            self.spent[search.EVALUATIONS] += _EVALUATIONS_OF_NODE * (branching.nodes - nodes + 1)
            self._tick("proof")
        self._take(branching.home)
        self._keep("proof")
        self.proved = branching.done
        return self.proved

    def _descend(self, phase: str) -> None:
        """Passes until none moves anything, or too little; what is reached is kept if it is better."""
        gains = True
        while gains:
            lack, total, evaluations = self.problem.excess[0], self.problem.total, self.spent[search.EVALUATIONS]
            moved = one_pass(self.problem, self.spent, lambda: self._tick(phase) and self._in_time())
            self._keep(phase)
            cheap = self.spent[search.EVALUATIONS] - evaluations <= _SMALL * self.budget.evaluations or not self.time_s
            better = self.problem.excess[0] < lack or total - self.problem.total > _SMALL * total
            gains = moved > 0 and (cheap or better) and self._goes_on(phase == "passes")

    def _keep(self, phase: str) -> None:
        before = self.spent[search.BEST_LACK], self.spent[search.BEST_TOTAL]
        search.keep(self.problem.fixed, self.problem.state, self.best, self.spent)
        if (self.spent[search.BEST_LACK], self.spent[search.BEST_TOTAL]) != before or len(self.steps) == 1:
            self._say(phase)

    def _take(self, home: Ints) -> None:
        search.refresh(*self.parts, home)

    def _evaluations_of_a_pass(self) -> float:
        return float(2 * len(self.problem.fixed.table_job) + len(self.tables) * len(self.problem.columns.regions))

    def _goes_on(self, always: bool = False) -> bool:
        """Whether there is budget left; the first passes of a search without any are made all the same."""
        if always and not self.time_s:
            return not self.stop()
        return self.budget.part(float(self.spent[search.EVALUATIONS])) < 1.0 and not self.stop()

    def _in_time(self) -> bool:
        return not self.time_s or self.budget.part_of_time < 1.0

    def _tick(self, phase: str) -> bool:
        if self.listener is not None:
            self.listener(self._step(phase))
        return not self.stop()

    def _say(self, phase: str) -> None:
        self.steps.append(self._step(phase))
        if self.listener is not None:
            self.listener(self.steps[-1])

    def _step(self, phase: str) -> Step:
        part = min(1.0, self.budget.part(float(self.spent[search.EVALUATIONS]))) if self.time_s else 0.0
        total, lack = float(self.spent[search.BEST_TOTAL]), float(self.spent[search.BEST_LACK])
        return Step(phase, part, total, lack, self.budget.elapsed_s)
