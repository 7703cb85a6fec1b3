"""`solve`: runs the branch and bound up to a time limit."""

import time
from collections.abc import Callable

from tetris.columns import Columns, Ints
from tetris.exact.answer import ExactAnswer, ExactProgress
from tetris.exact.branch import Branching

_PROVED = 1e-9
"""Relative gap between total and bound at which the total counts as proved."""


def solve(
    columns: Columns,
    *,
    time_s: float,
    upper: Ints | None = None,
    progress: Callable[[ExactProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.process_time,
) -> ExactAnswer:
    """Returns the best allowed plan: no constraint is violated by more than at the start.

    The relative excess over the limits (`Problem.excess`) is minimised first, then the total. `upper` is an initial
    plan [T]; a good one saves time. `progress` and `stop` are called several times per second. A search that ends
    before `time_s` (on `clock`, in seconds of CPU time) is reproducible.

    Raises:
        TooLarge: the instance is too large for the exact method.
    """
    begin = clock()
    branching = Branching(columns)
    if upper is not None:
        branching.offer(upper)
    limit = ""
    while not branching.done and not limit:
        best = branching.best
        if progress is not None:
            progress(ExactProgress(clock() - begin, best.excess, best.total, branching.bound, branching.nodes))
        if stop is not None and stop():
            limit = "stopped"
        elif clock() - begin >= time_s:
            limit = "time"
        else:
            branching.go_on()
    best, bound = branching.best, branching.bound
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
