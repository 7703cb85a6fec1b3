"""How long workloads run: bounded samples of past run times, by tenant, size and other groups."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gms.starts.kernels import F8, I4, draw_remaining

SAMPLES = 64
"""Maximum number of run times kept for a group; the oldest is dropped first."""
MOST_GROUPS = 2000
"""Maximum number of groups. The group whose last run ended earliest is dropped first."""
SHRINK = 8.0
"""Number of run times with which a group has the same weight as its parent group."""
UNKNOWN_S = 3600.0
"""The median run time while none is known."""
Groups = tuple[str, ...]
"""The groups of a workload, the most specific first. The group of all workloads, the last, is not named."""


class _Table(NamedTuple):
    samples: F8
    counts: I4
    parents: I4
    numbers: Mapping[Groups, int]


class RunHistory:
    """The last run times of each group. Times are seconds."""

    def __init__(self) -> None:
        self._of: dict[Groups, deque[float]] = {(): deque(maxlen=SAMPLES)}
        self._sorted: dict[Groups, list[float]] = {}

    def add(self, groups: Groups, ran_s: float) -> None:
        """Adds the run time of a workload that has ended by itself, to its groups and to those above them."""
        for k in range(len(groups) + 1):
            key = groups[k:]
            runs = self._of.pop(key, None) or deque(maxlen=SAMPLES)
            runs.append(round(ran_s, 1))
            self._of[key] = runs  # At the end: the dictionary is in the order of the last runs.
            self._sorted.pop(key, None)
        while len(self._of) > MOST_GROUPS:
            oldest = next(iter(self._of))
            del self._of[oldest]
            self._sorted.pop(oldest, None)

    def draw(self, groups: Sequence[Groups], ages_s: F8, random: np.random.Generator, futures: int) -> F8:
        """Returns the drawn remaining run times of workloads of these ages, shape (futures, workloads)."""
        table = self._table(set(groups))
        numbers = np.array([table.numbers[group] for group in groups], np.int32)
        chances = random.random((futures, len(groups), 2))
        # The futures of one workload draw from different parts of the distribution, so that few futures cover it.
        parts = random.permuted(np.tile(np.arange(futures), (len(groups), 1)), axis=1).T
        chances[:, :, 1] = (parts + chances[:, :, 1]) / futures
        return np.array(
            [
                draw_remaining(table.samples, table.counts, table.parents, numbers, ages_s, one, SHRINK, UNKNOWN_S)
                for one in chances
            ]
        ).reshape(futures, len(groups))

    def _table(self, wanted: Iterable[Groups]) -> _Table:
        keys: dict[Groups, int] = {(): 0}
        for groups in sorted(wanted):
            for k in range(len(groups), -1, -1):
                keys.setdefault(groups[k:], len(keys))
        samples = np.full((len(keys), SAMPLES), np.inf)
        counts, parents = np.zeros(len(keys), np.int32), np.zeros(len(keys), np.int32)
        for key, number in keys.items():
            runs = self._sorted.get(key)
            if runs is None:
                runs = self._sorted[key] = sorted(self._of.get(key, ()))
            samples[number, : len(runs)], counts[number], parents[number] = runs, len(runs), keys[key[1:]]
        return _Table(samples, counts, parents, keys)

    def to_json(self) -> list[Any]:
        """Returns the run times, to store them."""
        return [[list(key), list(runs)] for key, runs in self._of.items()]

    @classmethod
    def from_json(cls, body: Iterable[Any]) -> "RunHistory":
        """Parses the result of `to_json`."""
        history = cls()
        history._of |= {tuple(key): deque(map(float, runs), SAMPLES) for key, runs in body}
        return history
