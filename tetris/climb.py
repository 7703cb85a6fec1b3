"""The search method `climb`: greedy passes (MAST 3.4), then simulated annealing and other methods, within a budget.

A greedy pass (`one_pass`) finds the best region of each table on its own, sorts the tables by gain, and moves each
table if the move still improves the objective at its turn, within the quota of moved bytes. Passes are repeated until a
pass gains nothing, or too little for its cost. The plan is then close to a local optimum for moves of single tables.

Next comes a long simulated annealing walk from the plan of the start. Its steps move a single table, all tables of an
ML job, or a cluster of tables that share jobs, or they swap two tables (`tetris.budget` has the temperatures). The
rest of the budget is used for:

- shorter walks from the best plan,
- more long walks, if the budget suffices, because the result of a walk is partly random,
- large neighbourhood search with CP-SAT (`tetris.neighbourhood`),
- for small instances the exact method, which ends the search if it proves that the plan is optimal.

Effort is counted in evaluations (of one job or one region), so the same seed and budget give the same plan, unless the
limit of CPU time ends the search first (`tetris.budget`).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from domain.instance import InstanceRegion, PlacedTable, RecurringJob, TetrisInstance
from tetris.budget import Budget, Cooling
from tetris.columns import Columns, Floats, Ints
from tetris.exact.branch import Branching, TooLarge
from tetris.kernels import search
from tetris.kernels.layout import StepScratch
from tetris.problem import PlacementProblem

if TYPE_CHECKING:
    from tetris.neighbourhood import Neighbourhood

LACKING = 1e3
"""Penalty of the relative excess over limits in greedy passes, in multiples of the objective's magnitude. It is large,
so that the excess is minimised before the objective."""
_PENALTIES = (0.3, 3.0, 30.0)
"""Penalties of the excess on walks, in multiples of the objective. Short walks use them cyclically, long walks use the
second."""
_SAMPLES, _SAMPLES_OF_LONG_WALK = 200, 2000
"""Number of sampled tables for the temperature scale of a short walk and of a long walk."""
_LONG_WALKS = 0.93
"""Maximum fraction of the budget that long walks use."""
_LEAST_PASSES = 200
"""Minimum length of a long walk, in passes. A shorter walk ends with a worse plan than greedy passes."""
_PASSES_OF_TABLE = 150
"""Approximate maximum length of a long walk, in passes per table. A larger budget is split into several walks, which
makes the result less random. For 300 dense tables this is 12 s: one walk of 14 s found a plan 7% better than the best
of four walks of 3.5 s, but one of 56 s found a worse plan than one of 9 s.
"""
_SHORTEST_WALK, _LONGEST_WALK = 2e5, 0.25
"""Minimum length of a short walk in evaluations, and maximum length as a fraction of the budget."""
_PASSES_OF_WALK = 200, 40, 40, 200
"""Lengths of short walks in passes, used cyclically: longer ones for many tables, shorter ones to alternate with
neighbourhoods."""
_NEIGHBOURHOODS = 0.25
"""Effort for neighbourhoods after a walk, as a fraction of the length of the walk."""
_SMALL = 1e-3
"""Passes end when a pass improves the objective by less than this fraction and costs more than this fraction of the
budget."""
_WALKS_BEFORE_PROOF = 4
"""Number of short walks before the exact method is tried."""
_BRANCHED = 32
"""Maximum number of tables for the exact method."""
_EVALUATIONS_OF_NODE = 40
"""Cost of one node of the branch and bound, in evaluations."""
_EVALUATIONS_OF_IMPORT = 20e6
"""Cost of importing CP-SAT, in evaluations. Neighbourhoods are used only if twice this budget is left."""
_CHUNK = 20_000
"""Tables of a pass between two checks of the clock."""
_PIECE = 2e6
"""Evaluations of a walk between two checks of the clock."""
_MOST_TABLES = 64
"""Maximum number of tables of a job or cluster that is moved as a whole."""


@dataclass(frozen=True, slots=True)
class SearchStep:
    """Progress of a search."""

    phase: str
    part: float
    """Used fraction of the budget, 0 to 1."""
    total: float
    """Objective of the best plan so far."""
    lack: float
    """Relative excess of the best plan over the limits."""
    time_s: float
    """Seconds of CPU time since the search began."""


@dataclass(frozen=True, slots=True)
class Climbed:
    """Result of a search: the best plan that was found."""

    home: Ints
    """[T] home regions."""
    total: float
    lack: float
    proved: bool
    """Whether it is proved that no allowed plan is better."""
    moves: int
    evaluations: int
    steps: tuple[SearchStep, ...] = field(repr=False)
    """One step for each improvement."""


Listener = Callable[[SearchStep], None]


@dataclass(frozen=True, slots=True)
class _Walk:
    """Parameters of one simulated annealing walk."""

    heats: Cooling
    length: float
    """Length in evaluations."""
    penalty: float
    """Penalty of the relative excess over limits."""


def climb(
    columns: Columns,
    *,
    time_s: float,
    seed: int = 0,
    listener: Listener | None = None,
    stop: Callable[[], bool] = lambda: False,
    proves: bool = True,
    clock: Callable[[], float] = time.process_time,
    ends_s: float | None = None,
) -> Climbed:
    """Returns the best plan found within a budget of about `time_s` seconds of CPU time; 0 runs greedy passes only.

    `listener` is called at each improvement and regularly with the progress. The search ends when `stop` returns true.
    If `proves` is false, the exact method is not used. `clock` returns seconds of CPU time, and `ends_s` is a deadline
    on it. Loading compiled code does not count against the budget.

    Raises:
        ValueError: `time_s` is negative.
    """
    if time_s < 0:
        raise ValueError(f"time_s: {time_s}: must be 0 or more seconds")
    load(proves and may_prove(columns))
    return _Climb(columns, time_s, seed, listener, stop, proves, clock, ends_s).run()


def may_prove(columns: Columns) -> bool:
    """Returns whether the instance is small enough for the exact method."""
    return len(columns.home) <= _BRANCHED


@cache
def load(exact: bool = True, search: bool = True) -> None:
    """Loads or compiles the compiled code before a search starts its clock.

    `exact` includes the exact method, `search` the local search.
    """
    regions = tuple(InstanceRegion(name, 2.0, {"g": 1.0}) for name in "ab")
    tables = PlacedTable("s", 1.0, "a"), PlacedTable("t", 1.0, "b")
    jobs = (
        RecurringJob("j", "ml", ("s", "t"), 1, gpu_type="g", gpu_hours=1.0),
        RecurringJob("k", "spark", ("s", "t"), 1),
    )
    columns = Columns.of(TetrisInstance(regions, tables, jobs))
    if exact:
        Branching(columns).go_on()
    if search:
        # A constant clock: the search ends by effort, because compilation would exceed any short time limit.
        _Climb(columns, 0.01, 0, None, lambda: False, False, lambda: 0.0).run()
        problem = PlacementProblem(columns)
        problem.weigh(0)
        problem.move(0, 1)


def one_pass(problem: PlacementProblem, spent: Floats, tick: Callable[[], bool] = lambda: True) -> int:
    """Runs one greedy pass (MAST 3.4) over all tables and returns the number of moved tables.

    `tick` is called regularly; the pass ends early if it returns false.
    """
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
    """The state of one search."""

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
        self.problem = PlacementProblem(columns)
        self.parts = self.problem.fixed, self.problem.state, self.problem.work
        self.tables = np.arange(len(columns.home), dtype=np.int32)
        self.best = columns.home.copy()
        self.proves, self.proved = proves, False
        self.spent = np.zeros(search.N_TALLY)
        lack, _ = self.problem.excess
        self.spent[search.BEST_LACK] = self.spent[search.LEAST_LACK] = lack
        self.spent[search.BEST_TOTAL] = self.problem.total
        self.steps: list[SearchStep] = []
        self._say("start")

    def run(self) -> Climbed:
        if not len(self.tables) or len(self.problem.columns.regions) == 1:
            # There is only one plan.
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
        self.room = StepScratch(
            np.zeros(_MOST_TABLES, np.int32), np.zeros(_MOST_TABLES, np.int32), np.zeros(len(self.tables) + 1, np.int32)
        )
        penalty = _PENALTIES[1] * float(self.spent[search.BEST_TOTAL])
        if search.spread(*self.parts, self.tables, _SAMPLES, penalty, self.spent) <= 0.0:
            # No move changes the objective or the excess, so a walk is useless.
            self._is_proved()
            return
        long = self.plan_long_walk(penalty)
        if long is not None:
            self._take(self.problem.columns.home)
            self._walk(long)
        neighbourhood = None
        if self.budget.left(float(self.spent[search.EVALUATIONS])) > 2 * _EVALUATIONS_OF_IMPORT and self._goes_on():
            # Imported late: importing CP-SAT takes seconds, and other users of this module do not need it.
            from tetris.neighbourhood import Neighbourhood

            neighbourhood = Neighbourhood(self.problem)
            self.spent[search.EVALUATIONS] += _EVALUATIONS_OF_IMPORT
        turn = 0
        while self._goes_on():
            # Every fourth walk restarts from the start's plan: a long walk if at least half of it fits into the budget,
            # else a short walk from the highest temperature.
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
        """Returns the parameters of a long walk; None if the budget is too small or no move changes the objective."""
        share, in_pass = _LONG_WALKS * self.budget.evaluations, self._evaluations_of_a_pass()
        if share < _LEAST_PASSES * in_pass or not self._goes_on():
            return None
        # Without penalty, because penalties do not reflect the scale of the objective.
        change = search.spread(*self.parts, self.tables, _SAMPLES_OF_LONG_WALK, 0.0, self.spent)
        if change <= 0.0:
            return None
        walks = max(1, round(share / (_PASSES_OF_TABLE * len(self.tables) * in_pass)))
        return _Walk(Cooling.of_long_walk(change), share / walks, penalty)

    def _plan_short_walk(self, turn: int, fresh: bool) -> _Walk:
        """Returns the parameters of a short walk; `fresh` walks start at the highest temperature."""
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
        """Runs a walk. If the time does not suffice for its evaluations, it cools faster."""
        spent, budget, heats = self.spent, self.budget, walk.heats
        length = max(1.0, min(walk.length, budget.evaluations - spent[search.EVALUATIONS]))
        began, began_time = spent[search.EVALUATIONS], budget.part_of_time
        # The walk gets the same fraction of the remaining time as of the remaining effort.
        time = max((1.0 - began_time) * length / max(budget.left(began), length), 1e-9)
        done, movable = 0.0, search.Movable(self.tables, self.jobs)
        # In pieces, so that progress is reported and interruptions are handled quickly.
        while done < 1.0:
            piece = min(_PIECE, length)
            annealing = search.Annealing(piece, heats.at(done), heats.at(min(1.0, done + piece / length)), walk.penalty)
            search.walk(*self.parts, movable, annealing, self.best, spent, self.room)
            done = max((spent[search.EVALUATIONS] - began) / length, (budget.part_of_time - began_time) / time)
            if not (self._tick("walks") and self._goes_on()):
                break
        self._descend("walks")

    def _improve(self, neighbourhood: "Neighbourhood", until: float) -> None:
        """Improves the best plan by neighbourhoods, at least one, until `until` evaluations are spent."""
        self._take(self.best)
        while self._goes_on():
            self.spent[search.EVALUATIONS] += neighbourhood.improve(self.draw, self.budget.left_s)
            self._keep("neighbourhoods")
            if self.spent[search.EVALUATIONS] >= until or not self._tick("neighbourhoods"):
                break
        self._descend("neighbourhoods")

    def _is_proved(self) -> bool:
        """Tries to prove optimality by branch and bound, with half of the remaining budget; returns success."""
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
        """Repeats greedy passes until a pass moves nothing or gains too little; keeps the result if it is better."""
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
        """Returns whether to continue: budget is left and `stop` is false. `always` ignores a budget of 0."""
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

    def _step(self, phase: str) -> SearchStep:
        part = min(1.0, self.budget.part(float(self.spent[search.EVALUATIONS]))) if self.time_s else 0.0
        total, lack = float(self.spent[search.BEST_TOTAL]), float(self.spent[search.BEST_LACK])
        return SearchStep(phase, part, total, lack, self.budget.elapsed_s)
