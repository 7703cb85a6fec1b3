"""Turns a forecast into an interval by past errors, so that four of five starts lie within it.

The ends are quantiles of the errors `log((waited + FLOOR_S) / (forecast + FLOOR_S))` in groups of similar forecasts.
Workloads that still wait count with the time that they have waited, as censored observations (Kaplan and Meier 1958);
otherwise short waits would be known first. A group's quantiles are shrunk towards those of its parent group, because
the errors of one burst are similar. After misses at an end, its quantile moves outwards (adaptive conformal inference,
Gibbs and Candes 2021).
"""

from collections import deque
from collections.abc import Iterable, Mapping
from math import exp, log
from typing import Any

import numpy as np
import numpy.typing as npt

FLOOR_S = 1800.0
"""Added to both times in the ratio, in seconds, so that errors far below it have little effect."""
KEPT = 1000
"""Maximum number of errors kept for a group; the oldest is dropped first. A burst of workloads has similar errors."""
SHRINK = 200.0
"""Number of errors with which a group has the same weight as its parent group."""
FEWEST = 20
"""With fewer errors a group has no weight. Without any errors, the interval allows a factor of four."""
RATE = 0.02
"""How much one miss changes the level of its end."""
MISSES = 0.1
"""The share of starts that may be before the interval, and of those that may be after it."""
_LEAST = 0.005
_LARGEST = log(10.0)
_UNKNOWN = (-log(4.0), log(4.0))
Key = tuple[int, ...]
"""The groups of a forecast, the most general first."""
Interval = tuple[float, float]


class Calibration:
    """The past errors by group, and the levels of both ends."""

    def __init__(self) -> None:
        self._errors: dict[Key, deque[float]] = {}
        self._open: dict[Key, list[float]] = {}
        self._corrections: dict[Key, Interval] = {}
        self.levels = [MISSES, MISSES]

    def set_open(self, forecasts: Iterable[tuple[Key, float, float]]) -> None:
        """Replaces the forecasts whose workloads still wait: (key, forecast, seconds since the forecast)."""
        self._open, self._corrections = {}, {}
        for key, forecast_s, waited_s in forecasts:
            for k in range(len(key) + 1):
                self._open.setdefault(key[:k], []).append(_error(forecast_s, waited_s))

    def interval(self, key: Key, forecast_s: float) -> Interval:
        """Returns the interval around a forecast, both in seconds from now."""
        low_s, high_s = ((forecast_s + FLOOR_S) * exp(by) - FLOOR_S for by in self._correction(key))
        return max(0.0, low_s), max(0.0, low_s, high_s)

    def _correction(self, key: Key) -> Interval:
        if key not in self._corrections:
            errors = self._errors.get(key, ())
            low, high = self._correction(key[:-1]) if key else _UNKNOWN
            if len(errors) >= FEWEST:
                values = np.array([*errors, *self._open.get(key, ())])
                own = _quantiles(values, len(errors), (self.levels[0], 1 - self.levels[1]))
                above = SHRINK / (len(errors) + SHRINK) if key else 0.0
                low += (1 - above) * (max(own[0], -_LARGEST) - low)
                high += (1 - above) * (min(own[1], _LARGEST) - high)
            self._corrections[key] = low, high
        return self._corrections[key]

    def learn(self, key: Key, forecast_s: float, waited_s: float) -> None:
        """Adds the error of a forecast whose workload has started after `waited_s`."""
        for k in range(len(key) + 1):
            self._errors.setdefault(key[:k], deque(maxlen=KEPT)).append(round(_error(forecast_s, waited_s), 2))

    def judge(self, end: int, missed: bool) -> None:
        """Moves the level of an end (0: low, 1: high) after a start within the interval, or a miss."""
        self.levels[end] = min(MISSES, max(_LEAST, self.levels[end] + RATE * (MISSES - missed)))

    def to_json(self) -> dict[str, Any]:
        """Returns the errors and levels, to store them."""
        return {"levels": self.levels, "errors": [[list(key), list(kept)] for key, kept in self._errors.items()]}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> "Calibration":
        """Parses the result of `to_json`."""
        found = cls()
        found.levels = list(body["levels"])
        found._errors = {tuple(key): deque(kept, KEPT) for key, kept in body["errors"]}
        return found


def _error(forecast_s: float, waited_s: float) -> float:
    return log((waited_s + FLOOR_S) / (forecast_s + FLOOR_S))


def _quantiles(values: npt.NDArray[np.float64], known: int, levels: tuple[float, float]) -> Interval:
    """Returns Kaplan-Meier estimates of quantiles; the largest value for a level that the estimate does not reach.

    The first `known` values are observed, the others censored.
    """
    order = np.argsort(values, kind="stable")
    at_risk = len(values) - np.arange(len(values))
    below = 1 - np.cumprod(np.where(order < known, 1 - 1 / at_risk, 1.0))
    places = np.minimum(np.searchsorted(below, levels), len(values) - 1)
    low, high = values[order][places].tolist()
    return low, high
