"""What passes look at of every workload, as columns by its number: a pass touches thousands and changes few."""

import numpy as np
import numpy.typing as npt


class Board:
    """The columns. A workload's rank and checkpoints are those that the regions know of."""

    def __init__(self, workloads: int) -> None:
        self.rank: npt.NDArray[np.int64] = np.full(workloads, 8, np.int64)
        self.over_quota: npt.NDArray[np.bool_] = np.zeros(workloads, np.bool_)
        """By the last scan in which it was queued."""
        self.holds_all: npt.NDArray[np.bool_] = np.zeros(workloads, np.bool_)
        """Whether it holds all its slots, and is not on its way out."""
        self.started_at_s: npt.NDArray[np.float64] = np.full(workloads, np.nan)
        """When this attempt began to work; not a number: it has not."""
        self.checkpoints: npt.NDArray[np.int64] = np.zeros(workloads, np.int64)
        """Periodic ones of this attempt."""
        self.places: npt.NDArray[np.int64] = np.zeros(workloads, np.int64)
        """The number of the set of places that may have it, and of how long it may run."""
        self._sets: dict[tuple[frozenset[str] | None, float], int] = {}

    def checkpoints_at(self, numbers: npt.NDArray[np.int64], now_s: float, interval_s: float) -> npt.NDArray[np.int64]:
        """How many periodic checkpoints the attempts have made."""
        made = np.floor((now_s - self.started_at_s[numbers]) / interval_s)
        return np.where(np.isnan(made), 0, made).astype(np.int64)

    def may_be_in(self, number: int, places: frozenset[str] | None, at_most_s: float) -> None:
        """Where a workload may be (None: anywhere), and how long."""
        self.places[number] = self._sets.setdefault((places, at_most_s), len(self._sets))

    def begin(self, number: int, rank: int) -> None:
        """A workload was awarded."""
        self.rank[number], self.checkpoints[number] = rank, 0
        self.holds_all[number], self.started_at_s[number] = False, np.nan
