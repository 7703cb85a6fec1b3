"""`solve`: the branch and bound, for as long as there is time."""

import time
from collections.abc import Callable

from tetris.columns import Columns, Ints
from tetris.exact.answer import ExactAnswer, ExactProgress
from tetris.exact.branch import Branching

_PROVED = 1e-9
"""A bound that is this part of the total below it proves it."""


def solve(
    columns: Columns,
    *,
    time_s: float,
    upper: Ints | None = None,
    progress: Callable[[ExactProgress], None] | None = None,
    stop: Callable[[], bool] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ExactAnswer:
    """The best plan among those that break no constraint that the start keeps, and none by more than the start does.

    Best is first the least sum of relative excess over the limits (`Problem.excess`), then the least total. `upper` is
    a plan ([T]) to begin with: a good one saves time. `progress` is told, and `stop` asked, some times a second. Only
    `clock` (seconds) tells how much of `time_s` is left: a search that ends before does the same again.

    Raises:
        TooLarge: see there.
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
