"""The information that systems have at each time: estimates of hazards and of bandwidth, from the past only.

Estimates depend on departures and links, which are the same for all systems, so they are computed once.
"""

from dataclasses import replace
from functools import cached_property
from math import log

import numpy as np

from reclaim.arrays import Floats
from reclaim.hazard import HazardModel, HazardSettings
from reclaim.hazard_state import HazardState
from research.reclaim.bandwidth import lower_bound_bytes_s
from research.reclaim.scenario import DAY_S, EPOCH_S, STEP_S, LendingScenario

_STEP_S = 1800.0
"""The time between two estimates of hazards."""
_GRID = 1.25
"""The ratio of successive horizons in the grid of `SiteKnowledge.expected`."""
_UNMEASURED = 0.5
"""The share of a link's mean bandwidth that counts as its lower bound before anything was measured."""


class SiteKnowledge:
    """The estimates of one scenario with one set of constants."""

    def __init__(
        self,
        scenario: LendingScenario,
        window_days: int = 14,
        hazard_confidence: float = 0.8,
        confidence: float = 0.9,
        budget_confidence: float = 0.5,
    ) -> None:
        """Computes all estimates of links; those of hazards are computed when first used.

        `confidence` is that of deadlines, `budget_confidence` that of the budget of periodic checkpoints.
        """
        self._scenario = scenario
        self._model = HazardModel(replace(HazardSettings(), window_days=window_days, confidence=hazard_confidence))
        self._expected: dict[tuple[int, float], tuple[Floats, Floats]] = {}
        self._bounds = self._lower_bounds(confidence)
        self._budgets = self._lower_bounds(budget_confidence)

    def _lower_bounds(self, confidence: float) -> Floats:
        links = self._scenario.links_bytes_s
        per_epoch = round(EPOCH_S / STEP_S)
        epochs = links.shape[1] // per_epoch
        blocks = links[:, : epochs * per_epoch].reshape(len(links) * epochs, per_epoch)
        found = lower_bound_bytes_s(blocks, np.zeros(len(blocks)), confidence).reshape(len(links), epochs)
        first = _UNMEASURED * links.mean(1, keepdims=True)
        return np.concatenate((first, found), axis=1)

    def links_bytes_s(self, at_s: float) -> Floats:
        """Returns the lower bound of each link's bandwidth, from the ten minutes before the current epoch."""
        return np.asarray(self._bounds[:, min(int(at_s // EPOCH_S), self._bounds.shape[1] - 1)])

    def budget_bytes_s(self, at_s: float) -> Floats:
        """Returns the bandwidth of each link that P1 divides."""
        return np.asarray(self._budgets[:, min(int(at_s // EPOCH_S), self._budgets.shape[1] - 1)])

    @cached_property
    def _states(self) -> tuple[list[HazardState], list[HazardState]]:
        """The states of the estimators of departures without and with notice, every `_STEP_S`."""
        scenario = self._scenario
        lending, start_s = scenario.lending, scenario.start_s
        names = list(scenario.machines.names)
        of = [scenario.buildings[n] for n in scenario.machines.building]
        found: tuple[list[HazardState], list[HazardState]] = ([], [])
        for states, chosen in zip(found, (lending.notice_s == 0, lending.notice_s > 0), strict=True):
            at = chosen & lending.departs
            gone, gone_s = lending.node[at], lending.to_s[at]
            order = np.argsort(gone_s, kind="stable")
            gone, gone_s = gone[order], gone_s[order]
            state = self._model.start(names, of, start_s)
            states.append(state)
            for step in range(1, int(scenario.length_s // _STEP_S) + 1):
                until_s, from_s = step * _STEP_S, (step - 1) * _STEP_S
                low, high = np.searchsorted(gone_s, (from_s, until_s), side="right")
                held = (lending.from_s < until_s) & (lending.to_s > from_s)
                # What ends later is not known yet.
                to_s = np.minimum(lending.to_s[held], until_s)
                state = self._model.observe(
                    state, start_s + until_s, gone[low:high], start_s + gone_s[low:high], lending.node[held],
                    start_s + lending.from_s[held], start_s + to_s,
                )  # fmt: skip
                states.append(state)
        return found

    def _at(self, at_s: float) -> int:
        return min(int(at_s // _STEP_S), len(self._states[0]) - 1)

    @cached_property
    def _hazards(self) -> tuple[Floats, Floats]:
        """The mean and the upper bound of the hazard of emergencies of each machine, one row for each step."""
        found = [self._model.hazards(state, state.now_s) for state in self._states[0]]
        return np.array([one.mean_per_h for one in found]), np.array([one.upper_per_h for one in found])

    def upper_per_h(self, at_s: float) -> Floats:
        """Returns the upper bound of each machine's hazard of departures without notice."""
        return np.asarray(self._hazards[1][self._at(at_s)])

    def mean_per_h(self, at_s: float) -> Floats:
        """Returns the estimate of each machine's hazard of departures without notice."""
        return np.asarray(self._hazards[0][self._at(at_s)])

    def day_upper_per_h(self, at_s: float) -> Floats:
        """Returns the mean of `upper_per_h` over the last day."""
        last = self._at(at_s) + 1
        return np.asarray(self._hazards[1][max(0, last - round(DAY_S / _STEP_S)) : last].mean(0))

    def day_budget_bytes_s(self, at_s: float) -> Floats:
        """Returns 1 / the mean of 1/B over the last day, of `budget_bytes_s`."""
        last = min(int(at_s // EPOCH_S), self._budgets.shape[1] - 1) + 1
        recent = self._budgets[:, max(0, last - round(DAY_S / EPOCH_S)) : last]
        return np.asarray(1 / (1 / np.maximum(recent, 1.0)).mean(1))

    def expected(self, at_s: float, horizon_s: float) -> tuple[Floats, Floats]:
        """Returns the expected departures of each machine within a horizon, without and with notice.

        Horizons are rounded to a grid, and the result is scaled to the horizon, so that jobs can share it.
        """
        rounded_s = _GRID ** round(log(max(horizon_s, 60.0), _GRID))
        key = (self._at(at_s), rounded_s)
        if key not in self._expected:
            if len(self._expected) > 5000:
                self._expected.clear()
            wall_s = self._scenario.start_s + at_s
            first, second = (self._model.expected(states[key[0]], wall_s, rounded_s) for states in self._states)
            self._expected[key] = first, second
        emergencies, notices = self._expected[key]
        return emergencies * (horizon_s / rounded_s), notices * (horizon_s / rounded_s)
