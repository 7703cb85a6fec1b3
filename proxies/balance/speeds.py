"""How fast replicas of different kinds answer, and which share of the usual requests they get. Pure.

A kind is a GPU type in a region. Every few seconds the share of a kind whose answers take less time than the mean grows
a little, and that of a slower kind shrinks, until they take about as long or the slowest has the least share. So faster
machines get more requests, but only while they are faster under their load. Replicas of one kind have equal shares.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from proxies.balance.outliers import ServerCounts

LEAST_SHARE = 0.25
"""The minimum share of a kind of replicas, relative to the kind with the largest share."""
STEP_S = 10.0
"""The time between two changes of the shares. It must not be much shorter than `_HALF_LIFE_S`, or shares oscillate."""
_HALF_LIFE_S = 15.0
_GAIN, _MOST_CHANGE, _TOLERANCE = 0.25, 1.25, 1.1
_LEAST_ANSWERS, _LEAST_BUSY_S = 20.0, 20.0
"""Minimum data for an estimate of the time of an answer: number of answers, and busy time."""
_PERCENT_STEP = 5


@dataclass
class _Speed:
    busy_s: float = 0.0
    """The sum of the times of requests in progress; older ones count less."""
    answers: float = 0.0
    share: float = 1.0

    @property
    def is_measured(self) -> bool:
        return self.answers >= _LEAST_ANSWERS and self.busy_s >= _LEAST_BUSY_S


class Speeds:
    """The speeds of one service's replicas. Times are seconds of any clock that only runs forward."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Speed] = {}
        self._answered: dict[str, int] = {}
        self._seen_s: float | None = None
        self._changed_s = 0.0

    def restarted(self) -> None:
        """Resets the counts, because those of another HAProxy process begin at zero. Shares stay."""
        self._answered.clear()
        self._seen_s = None

    def observe(self, kinds: Mapping[str, str], counts: Mapping[str, ServerCounts], now_s: float) -> dict[str, int]:
        """Returns the share of each replica in percent, by name; that of the fastest kind is 100.

        Args:
            kinds: the kind of each replica.
            counts: the current counts of the same replicas.
            now_s: the current time.
        """
        known = set(kinds.values())
        self._kinds = {kind: self._kinds.get(kind, _Speed()) for kind in known}
        if self._seen_s is None:
            self._changed_s = now_s
        else:
            self._measure(kinds, counts, now_s - self._seen_s)
        self._seen_s = now_s
        self._answered = {name: one.answered for name, one in counts.items()}
        if now_s - self._changed_s >= STEP_S:
            self._changed_s = now_s
            self._change()
        percents = {
            kind: max(_PERCENT_STEP, round(100 * one.share / _PERCENT_STEP) * _PERCENT_STEP)
            for kind, one in self._kinds.items()
        }
        return {name: percents[kind] for name, kind in kinds.items()}

    def _measure(self, kinds: Mapping[str, str], counts: Mapping[str, ServerCounts], passed_s: float) -> None:
        kept = math.pow(0.5, passed_s / _HALF_LIFE_S)
        for one in self._kinds.values():
            one.busy_s, one.answers = one.busy_s * kept, one.answers * kept
        for name, counted in counts.items():
            speed = self._kinds[kinds[name]]
            speed.busy_s += counted.active * passed_s
            speed.answers += max(0, counted.answered - self._answered.get(name, counted.answered))

    def _change(self) -> None:
        measured = [one for one in self._kinds.values() if one.is_measured]
        if len(measured) < 2:
            return
        mean_s = sum(one.busy_s for one in measured) / sum(one.answers for one in measured)
        for one in measured:
            ratio = mean_s * one.answers / one.busy_s
            if not 1 / _TOLERANCE < ratio < _TOLERANCE:
                one.share *= min(_MOST_CHANGE, max(1 / _MOST_CHANGE, ratio**_GAIN))
        largest = max(one.share for one in self._kinds.values())
        for one in self._kinds.values():
            one.share = max(LEAST_SHARE, one.share / largest)
