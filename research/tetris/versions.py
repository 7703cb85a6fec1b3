"""The first version of Tetris, for comparison (MAST 5.6): V1 has a simpler objective."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from domain.instance import Weights
from tetris.climb import Climbed, Listener, climb
from tetris.columns import Columns


def v1(
    columns: Columns,
    *,
    time_s: float,
    seed: int = 0,
    listener: Listener | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Climbed:
    """Returns the best plan for V1's objective, and its total in that objective. The arguments are those of `climb`.

    V1 has no overload penalty and no storage balance term (only the capacity limit), and all jobs have the same weight.
    The other constraints are those of V2, because MAST 5.6 mentions no difference.

    Raises:
        ValueError: `time_s` is negative.
    """
    first = replace(
        columns,
        weights=Weights(columns.weights.read, columns.weights.gpu, storage=0.0, overload=0.0),
        weight=np.ones_like(columns.weight),
    )
    return climb(first, time_s=time_s, seed=seed, listener=listener, stop=stop)
