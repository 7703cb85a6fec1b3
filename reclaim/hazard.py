"""Estimates the hazard of emergency departures of each node, now and over a horizon (ReclaimNet II-A, F1, V-E).

The process is a non-homogeneous Poisson process. The hazard of a node is a product of three factors:

- the level of the node, from its departures and its lent hours in a sliding window. With little data it is close to the
  level of its building, and the building's to that of the site (shrinkage with fixed weights);
- the profile of the site over the time of day (`reclaim.profile`);
- the recent activity of the building: its departures of about the last hour, against the number that was expected.

Only time in which a node is lent counts as exposure, because only a lent node can depart. The upper bound is that of
the node's level: with the weight of its building counted as observed departures, it is the quantile of a gamma
distribution (`reclaim.gamma`).

Real departures are rarely independent: a whole room leaves at once. The dispersion of the site's counts is measured,
and the weight of all departures is divided by this factor.

If the site's rate has moved (`reclaim.drift`), the hours before the change are scaled to the new rate. Levels then
follow the data since the change, and the proportions between nodes keep the whole window.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from reclaim.arrays import Floats, Ints, column
from reclaim.drift import DriftSettings, DriftState, watch
from reclaim.gamma import quantiles
from reclaim.hazard_state import HazardState, RateChange
from reclaim.profile import DAY_S, ProfileSettings

_HOUR_S = 3600.0
_FORGOTTEN = 8
"""Recent activity is ignored after this number of its time constants."""


@dataclass(frozen=True)
class HazardSettings:
    """The constants of the estimator. docs/reclaim.md has their sensitivity."""

    window_days: int = 14
    """The number of days whose departures count for the levels."""
    confidence: float = 0.8
    """The probability with which a level is below its upper bound."""
    prior_per_h: float = 0.1
    """The hazard of a node of a site without data..."""
    site_events: float = 1.0
    """...and the weight of this value, as a number of departures."""
    building_events: float = 8.0
    """The weight of the site's level in a building's, as a number of departures."""
    node_events: float = 4.0
    """The weight of the building's level in a node's, as a number of departures."""
    recent_h: float = 1.0
    """The time constant in hours with which recent activity is forgotten."""
    recent_events: float = 2.0
    """The weight of no recent activity, as a number of departures."""
    change_events: float = 5.0
    """The weight of no change in the size of a change that was noticed, as a number of departures."""
    dispersion_events: float = 20.0
    """The weight of a Poisson process in the dispersion of counts, as a number of departures."""
    drift_from: int = 20
    """The number of departures from which on the detector looks for changes; with fewer, the model is too uncertain."""
    profile: ProfileSettings = field(default_factory=ProfileSettings)
    drift: DriftSettings = field(default_factory=DriftSettings)

    def __post_init__(self) -> None:
        if self.window_days < 1:
            raise ValueError(f"window_days: {self.window_days}: must be 1 or more")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence: {self.confidence}: must be between 0 and 1, without both")
        for name in (
            "prior_per_h", "site_events", "building_events", "node_events", "recent_h", "recent_events",
            "change_events", "dispersion_events",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)}: must be above 0")


class Hazards(NamedTuple):
    """The hazard of each node at one time, in departures for each hour in which the node is lent."""

    mean_per_h: Floats
    upper_per_h: Floats
    """The upper confidence bound, lambda^+ of Algorithm 1."""


class _Levels(NamedTuple):
    """The gamma distribution of each node's level."""

    shape: Floats
    hours: Floats

    @property
    def mean_per_h(self) -> Floats:
        return self.shape / self.hours


@dataclass(frozen=True)
class HazardModel:
    """The estimator. All methods are pure."""

    settings: HazardSettings = HazardSettings()

    def start(self, nodes: list[str], buildings: list[str], at_s: float) -> HazardState:
        """Returns the state without observations; see `HazardState.start`."""
        return HazardState.start(nodes, buildings, at_s, self.settings.profile)

    def from_json(self, body: dict[str, Any]) -> HazardState:
        """Returns a state from the result of its `to_json`."""
        return HazardState.from_json(body, self.settings.profile)

    def observe(
        self,
        state: HazardState,
        until_s: float,
        departed: ArrayLike = (),
        departed_at_s: ArrayLike = (),
        lent: ArrayLike = (),
        lent_from_s: ArrayLike = (),
        lent_to_s: ArrayLike = (),
    ) -> HazardState:
        """Returns the state after the observations from `state.now_s` up to `until_s`. Earlier parts are ignored.

        Args:
            state: the state so far.
            until_s: the end of the observed period.
            departed: the number of the node of each emergency departure.
            departed_at_s: the time of each departure. It is counted if it is after `state.now_s` and up to `until_s`.
            lent: the number of the node of each interval in which a node was lent.
            lent_from_s: the start of each interval.
            lent_to_s: the end of each interval; infinite: it is still lent.

        Raises:
            ValueError: `until_s` is before `state.now_s`, or a number of a node is wrong.
        """
        if not (until_s >= state.now_s and np.isfinite(until_s)):
            raise ValueError(f"until_s: {until_s}: must be {state.now_s} or later")
        size = len(state.nodes)
        gone, at_s = _numbers("departed", departed, size), np.asarray(departed_at_s, np.float64)
        held, from_s = _numbers("lent", lent, size), np.asarray(lent_from_s, np.float64)
        to_s = np.asarray(lent_to_s, np.float64)
        for name, found, wanted in (
            ("departed_at_s", at_s, gone), ("lent_from_s", from_s, held), ("lent_to_s", to_s, held),
        ):  # fmt: skip
            if found.shape != wanted.shape or np.isnan(found).any():
                raise ValueError(f"{name}: has the shape {found.shape}: must be {wanted.size} times, none missing")
        while state.now_s < until_s:
            if state.now_s >= state.row_from_s + DAY_S:
                state = self._next_row(state)
            start_s = state.now_s
            end_s = min(until_s, self.settings.profile.end_of_bin_s(start_s), state.row_from_s + DAY_S)
            shared_s = np.clip(np.minimum(to_s, end_s) - np.maximum(from_s, start_s), 0, None)
            hours = np.bincount(held, shared_s, minlength=size) / _HOUR_S
            inside = (at_s > start_s) & (at_s <= end_s)
            state = self._counted(state, end_s, np.bincount(gone[inside], minlength=size), hours)
        return state

    def hazards(self, state: HazardState, at_s: float) -> Hazards:
        """Returns the hazard of each node at a time, which is usually the end of the observations."""
        levels = self._levels(state)
        factor = self._activity(state, at_s)[state.building] * self._factor(state, at_s)
        upper = quantiles(levels.shape, self.settings.confidence) / levels.hours
        return Hazards(levels.mean_per_h * factor, upper * factor)

    def expected(self, state: HazardState, at_s: float, horizon_s: ArrayLike) -> Floats:
        """Returns the integral of each node's mean hazard over a horizon: the expected departures if it stays lent.

        exp(-integral) is the probability that the node survives the horizon (S_d of equation 11).

        Args:
            state: the state so far.
            at_s: the start of the horizon.
            horizon_s: its length, one number or one for each node.

        Raises:
            ValueError: a horizon is negative or infinite.
        """
        horizon = column("horizon_s", horizon_s, len(state.nodes))
        profile = self.settings.profile
        week = state.profile.week(self.dispersion(state))
        # The integral of the profile from Monday 0:00, at the edges of its parts.
        edges = np.concatenate(([0.0], np.cumsum(week))) * profile.bin_s
        part = profile.week_bin(at_s)
        within_s = profile.bin_s - (profile.end_of_bin_s(at_s) - at_s)
        start_s = part * profile.bin_s + within_s
        end_s = start_s + horizon
        length_s = len(week) * profile.bin_s
        grid = np.arange(len(edges)) * profile.bin_s
        usual = (
            (end_s // length_s) * edges[-1] + np.interp(end_s % length_s, grid, edges) - np.interp(start_s, grid, edges)
        )
        excess = self._activity(state, at_s)[state.building] - 1
        usual += excess * self._fading(week, start_s, horizon)
        return np.asarray(self._levels(state).mean_per_h * usual / _HOUR_S)

    def _fading(self, week: Floats, start_s: float, horizon: Floats) -> Floats:
        """Returns the integral of the profile times the decay of recent activity."""
        bin_s, constant_s = self.settings.profile.bin_s, self.settings.recent_h * _HOUR_S
        last = int((start_s + _FORGOTTEN * constant_s) // bin_s)
        found = np.zeros(len(horizon))
        for part in range(int(start_s // bin_s), last + 1):
            low = max(0.0, part * bin_s - start_s)
            high = np.clip((part + 1) * bin_s - start_s, low, np.maximum(horizon, low))
            found += week[part % len(week)] * constant_s * (np.exp(-low / constant_s) - np.exp(-high / constant_s))
        return found

    def _counted(self, state: HazardState, end_s: float, events: Ints, hours: Floats) -> HazardState:
        """Returns the state after a period within one part of the day and within one row."""
        settings = self.settings
        factor = self._factor(state, state.now_s)
        level_events = self._levels(state).mean_per_h * hours
        expected = level_events * factor
        count, mean = int(events.sum()), float(expected.sum())
        passed_s = end_s - state.now_s
        kept = np.exp(-passed_s / _HOUR_S / settings.recent_h)
        size = len(state.building_names)
        table, weighted = state.events.copy(), state.hours.copy()
        table[-1] += events
        weighted[-1] += hours * factor
        change = state.change
        if change is not None:
            change = RateChange(change.since_s, change.events + count, change.expected + mean / self._shift(state))
        found = replace(
            state,
            now_s=end_s,
            events=table,
            hours=weighted,
            profile=state.profile.aged(passed_s).counted(state.now_s, count, float(level_events.sum())),
            recent_events=state.recent_events * kept + np.bincount(state.building, events, minlength=size),
            recent_expected=state.recent_expected * kept + np.bincount(state.building, expected, minlength=size),
            change=change,
            departures=state.departures + count,
            part_events=state.part_events + count,
            part_expected=state.part_expected + mean,
        )
        return self._part_ended(found) if end_s == settings.profile.end_of_bin_s(state.now_s) else found

    def _part_ended(self, state: HazardState) -> HazardState:
        """Returns the state at the end of a part of the day, after which changes of the rate are looked for."""
        settings = self.settings
        kept = np.exp(-settings.profile.bin_s / DAY_S / settings.profile.memory_days)
        count, mean = state.part_events, state.part_expected
        found = replace(
            state,
            part_events=0,
            part_expected=0.0,
            squares=float(state.squares * kept + (count - mean) ** 2),
            means=float(state.means * kept + mean),
        )
        if found.departures < settings.drift_from * self.dispersion(found):
            return replace(found, drift=DriftState.start(found.now_s))
        drift, alarm = watch(found.drift, settings.drift, count, mean, found.now_s, self.dispersion(found))
        if alarm is None:
            return replace(found, drift=drift)
        # Hours before an earlier change stay scaled to the rate after it.
        scaled = found.hours * self._scales(found)[:, None]
        return replace(found, drift=drift, hours=scaled, change=RateChange(alarm.since_s, alarm.events, alarm.expected))

    def dispersion(self, state: HazardState) -> float:
        """Returns the variance of the site's counts divided by their mean: 1 for independent departures, more if nodes
        leave together. Weights of estimates for the whole site are multiplied by it.
        """
        weight = self.settings.dispersion_events
        return max(1.0, (state.squares + weight) / (state.means + weight))

    def _next_row(self, state: HazardState) -> HazardState:
        """Returns the state with a row for a new day, without the rows that have left the window."""
        kept = slice(max(0, len(state.events) + 1 - self.settings.window_days), None)
        none = np.zeros((1, len(state.nodes)))
        moved = replace(
            state,
            row_from_s=state.row_from_s + DAY_S,
            events=np.concatenate((state.events[kept], none.astype(np.int64))),
            hours=np.concatenate((state.hours[kept], none)),
        )
        is_over = moved.change is not None and moved.change.since_s <= moved.row_starts_s[0]
        return replace(moved, change=None) if is_over else moved

    def _shift(self, state: HazardState) -> float:
        """Returns the rate after the last change divided by the rate before, shrunk to 1."""
        change = state.change
        if change is None:
            return 1.0
        weight = self.settings.change_events * self.dispersion(state)
        return (change.events + weight) / (change.expected + weight)

    def _scales(self, state: HazardState) -> Floats:
        """Returns the factor for the hours of each row that makes earlier departures fit the rate after the change."""
        if state.change is None:
            return np.ones(len(state.events))
        before = np.clip((state.change.since_s - state.row_starts_s) / DAY_S, 0, 1)
        return 1 - before + before / self._shift(state)

    def _levels(self, state: HazardState) -> _Levels:
        settings = self.settings
        events = state.events.sum(0).astype(np.float64)
        hours = self._scales(state) @ state.hours
        site = (settings.site_events + events.sum()) / (settings.site_events / settings.prior_per_h + hours.sum())
        size, weight = len(state.building_names), settings.building_events * self.dispersion(state)
        of_building = np.bincount(state.building, events, minlength=size)
        held = np.bincount(state.building, hours, minlength=size)
        building = (weight + of_building) / (weight / site + held)
        return _Levels(settings.node_events + events, settings.node_events / building[state.building] + hours)

    def _factor(self, state: HazardState, at_s: float) -> float:
        return float(state.profile.week(self.dispersion(state))[self.settings.profile.week_bin(at_s)])

    def _activity(self, state: HazardState, at_s: float) -> Floats:
        """Returns the factor of recent activity of each building."""
        kept = np.exp(-max(0.0, at_s - state.now_s) / _HOUR_S / self.settings.recent_h)
        weight = self.settings.recent_events * self.dispersion(state)
        return np.asarray((weight + state.recent_events * kept) / (weight + state.recent_expected * kept))


def _numbers(name: str, values: ArrayLike, size: int) -> Ints:
    found = np.asarray(values, dtype=np.int64)
    if found.size and not ((found >= 0) & (found < size)).all():
        bad = int(found[(found < 0) | (found >= size)][0])
        raise ValueError(f"{name}: {bad}: must be the number of a node, 0 to {size - 1}")
    return found
