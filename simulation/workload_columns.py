"""The attributes of all workloads that a pass reads, as columns indexed by workload number.

A pass reads thousands of workloads and changes few of them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from domain.compiled import compiled
from domain.priority import LOWEST_RANK
from domain.scheduling import JobRequest

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class WorkloadColumns:
    """The columns. `rank` and `checkpoints` are the values that were last sent to the regions."""

    def __init__(self, workloads: int) -> None:
        self.rank: npt.NDArray[np.int64] = np.full(workloads, LOWEST_RANK, np.int64)
        self.over_quota: npt.NDArray[np.bool_] = np.zeros(workloads, np.bool_)
        """Whether the workload was over quota in the last scan in which it was queued."""
        self.holds_all: npt.NDArray[np.bool_] = np.zeros(workloads, np.bool_)
        """Whether the workload holds all its slots, and was not told to leave."""
        self.started_at_s: npt.NDArray[np.float64] = np.full(workloads, np.nan)
        """When the present attempt began to work; NaN: it has not started."""
        self.checkpoints: npt.NDArray[np.int64] = np.zeros(workloads, np.int64)
        """Number of periodic checkpoints of the present attempt."""
        self._demand: Ints = np.zeros((workloads, 5), np.int64)
        """For a gang of one job: tasks, GPUs, CPUs and memory per task, and whether one cluster must hold all tasks."""
        self._kind: Ints = np.full(workloads, -1, np.int64)
        """Number of the combination of GPU types, capacity kinds, topology, allowed places and maximum runtime.

        -1: the gang has several jobs.
        """
        self._kinds: dict[tuple[object, ...], int] = {}

    def asks(self, number: int, jobs: Sequence[JobRequest], places: frozenset[str] | None, at_most_s: float) -> None:
        """Stores a workload's request, allowed places (None: all) and maximum runtime. Skips gangs of several jobs."""
        if len(jobs) == 1:
            (job,) = jobs
            self._demand[number] = (
                job.tasks, job.gpus_per_task, job.cpus_milli_per_task, job.memory_bytes_per_task, not job.span_clusters,
            )  # fmt: skip
            self._kind[number] = self._kinds.setdefault(
                (job.gpu_types, job.capacity, job.topology, places, at_most_s), len(self._kinds)
            )

    def ask_no_less(
        self, numbers: Ints, ranks: Ints, waited_s: Floats, of: Ints, of_ranks: Ints, of_waited_s: Floats
    ) -> npt.NDArray[np.bool_]:
        """Returns which of `numbers` request at least as much as one of `of`, without an advantage over that one.

        They have the same allowed places, GPU types and maximum runtime as that workload, an equal or worse rank, and
        have not waited longer. If that workload was refused in a pass, they would be refused too, because awards only
        reduce the free capacity. Always False for gangs of several jobs.
        """
        return _no_less(self._kind, self._demand, numbers, ranks, waited_s, of, of_ranks, of_waited_s)

    def checkpoints_at(self, numbers: npt.NDArray[np.int64], now_s: float, interval_s: float) -> npt.NDArray[np.int64]:
        """Returns the number of periodic checkpoints that each attempt has made by `now_s`."""
        made = np.floor((now_s - self.started_at_s[numbers]) / interval_s)
        return np.where(np.isnan(made), 0, made).astype(np.int64)

    def begin(self, number: int, rank: int) -> None:
        """Resets the columns of a workload at its award."""
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
