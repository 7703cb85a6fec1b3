"""Earlier versions of Tetris, to be compared with (MAST 5.6): V0 moves nothing; V1 is the first objective."""

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
    ends_s: float | None = None,
) -> Climbed:
    """The best plan for V1's objective; its total is that objective's. The arguments are those of `climb`.

    No penalty for overload, for storage the hard limit only and no balance of it, and all jobs count alike. The other
    constraints are V2's: 5.6 names them no difference.

    Raises:
        ValueError: `time_s` is negative.
    """
    first = replace(
        columns,
        weights=Weights(columns.weights.read, columns.weights.gpu, storage=0.0, overload=0.0),
        weight=np.ones_like(columns.weight),
    )
    return climb(first, time_s=time_s, seed=seed, listener=listener, stop=stop, ends_s=ends_s)
