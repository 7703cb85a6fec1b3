"""What passes look at of every workload, as columns by its number: a pass touches thousands and changes few."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from domain.compiled import compiled
from domain.scheduling import JobRequest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class WorkloadColumns:
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
        self._demand: Ints = np.zeros((workloads, 5), np.int64)
        """Of a gang of one job: tasks, what each of them needs, and whether they must be in one cluster."""
        self._kind: Ints = np.full(workloads, -1, np.int64)
        """The number of the GPU types and kinds of capacity that the job accepts, the places that may have it, and how
        long it may run.
        """
        self._kinds: dict[tuple[tuple[str, ...], tuple[str, ...], frozenset[str] | None, float], int] = {}

    def asks(self, number: int, jobs: Sequence[JobRequest], places: frozenset[str] | None, at_most_s: float) -> None:
        """What a workload asks for, where it may be (None: anywhere), and how long. Not for several jobs."""
        if len(jobs) == 1:
            (job,) = jobs
            self._demand[number] = (
                job.tasks, job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task, not job.span_clusters,
            )  # fmt: skip
            self._kind[number] = self._kinds.setdefault(
                (job.gpu_types, job.capacity, places, at_most_s), len(self._kinds)
            )

    def ask_no_less(
        self, numbers: Ints, ranks: Ints, waited_s: Floats, of: Ints, of_ranks: Ints, of_waited_s: Floats
    ) -> npt.NDArray[np.bool_]:
        """Which of `numbers` ask for at least as much as one of `of`, at no better rank, and have waited for no longer.

        Both may run in the same places, on the same GPU types, for the same time. If one of `of` had no room in a pass,
        they have none either: awards only make it less. Always False for gangs of several jobs.
        """
        return _no_less(self._kind, self._demand, numbers, ranks, waited_s, of, of_ranks, of_waited_s)

    def checkpoints_at(self, numbers: npt.NDArray[np.int64], now_s: float, interval_s: float) -> npt.NDArray[np.int64]:
        """How many periodic checkpoints the attempts have made."""
        made = np.floor((now_s - self.started_at_s[numbers]) / interval_s)
        return np.where(np.isnan(made), 0, made).astype(np.int64)

    def begin(self, number: int, rank: int) -> None:
        """A workload was awarded."""
        self.rank[number], self.checkpoints[number] = rank, 0
        self.holds_all[number], self.started_at_s[number] = False, np.nan


@compiled
def _no_less(
    kind: Ints,
    demand: Ints,
    numbers: Ints,
    ranks: Ints,
    waited_s: Floats,
    of: Ints,
    of_ranks: Ints,
    of_waited_s: Floats,
) -> npt.NDArray[np.bool_]:
    out = np.zeros(numbers.size, np.bool_)
    for i in range(numbers.size):
        one = numbers[i]
        for j in range(of.size):
            other = of[j]
            if kind[one] != kind[other] or kind[one] < 0 or ranks[i] < of_ranks[j] or waited_s[i] > of_waited_s[j]:
                continue
            less = False
            for k in range(demand.shape[1]):
                less |= demand[one, k] < demand[other, k]
            if not less:
                out[i] = True
                break
    return out
