"""`solve`: the engines in turn, within one deadline."""

import time
from collections.abc import Callable

from tetris.columns import Columns, Ints
from tetris.exact.answer import ExactAnswer, ExactProgress
from tetris.exact.branch import Branching
from tetris.excess import allowed, limits

_BRANCHING = 0.7
"""The part of the time after which the relaxation may try."""
_WORKERS = 2
_PROVED = 1e-9
"""A bound that is this part of the total below it proves it."""


def solve(
    columns: Columns,
    *,
    time_s: float,
    seed: int,
    upper: Ints | None = None,
    progress: Callable[[ExactProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ExactAnswer:
    """The best plan among those that break no constraint that the start keeps, and none by more than the start does.

    Best is first the least sum of relative excess over the limits (`tetris.excess`), then the least total. `upper` is a
    plan ([T]) to begin with: a good one saves time. `progress` is told, and `stop` asked, some times a second. Only
    `clock` (seconds) tells how much of `time_s` is left: a search that ends before does the same again.

    Raises:
        TooLarge: see there.
    """
    begin = clock()
    branching = Branching(columns)
    if upper is not None:
        branching.offer(upper)
    relaxed = 0.0

    def ended_by(share: float) -> str:
        if progress is not None:
            best, bound = branching.best, max(relaxed, branching.bound)
            progress(ExactProgress(clock() - begin, best.excess, best.total, bound, branching.nodes))
        if stop is not None and stop():
            return "stopped"
        return "time" if clock() - begin >= time_s * share else ""

    def relaxation_ends(found: float) -> bool:
        nonlocal relaxed
        relaxed = max(relaxed, min(found, branching.best.total))
        return ended_by(1.0) != ""

    limit = _branch(branching, lambda: ended_by(_BRANCHING))
    if limit == "time" and branching.is_least_excess and clock() - begin < time_s:
        # CP-SAT takes a second to import, and small instances are proved without it.
        from tetris.exact.relaxation import lower_bound

        may_use = limits(columns) if branching.best.excess == 0 else allowed(columns)
        found = lower_bound(
            columns, branching.home, branching.best.total, may_use, seed=seed, workers=_WORKERS, is_over=relaxation_ends
        )
        relaxed = max(relaxed, found)
    if limit == "time":
        limit = _branch(branching, lambda: ended_by(1.0))
    best, bound = branching.best, max(relaxed, branching.bound)
    proved = branching.is_least_excess and best.total - bound <= _PROVED * best.total
    return ExactAnswer(
        home=branching.home,
        total=best.total,
        excess=best.excess,
        bound=bound,
        proved=proved,
        limit="" if proved else limit,
        nodes=branching.nodes,
    )


def _branch(branching: Branching, ended_by: Callable[[], str]) -> str:
    """Search until the end or until something else ends it; returns what."""
    while not branching.done:
        if limit := ended_by():
            return limit
        branching.go_on()
    return ""
