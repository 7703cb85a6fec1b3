"""How the hazard of a site depends on the time of day: a factor with the mean 1 for each part of the day (F1).

Departures follow the habits of people, so all nodes of a site share one profile. Weekends have another level than
workdays, with the same profile. The counts are forgotten exponentially, with a longer memory than the window of the
levels, because habits change more slowly than the number of departures.
"""

from dataclasses import dataclass, replace
from math import exp
from typing import Any

import numpy as np

from reclaim.arrays import Floats, Ints

DAY_S = 86400.0
_MONDAY = 3
"""The number of days from the epoch, a Thursday, back to a Monday."""


@dataclass(frozen=True)
class ProfileSettings:
    """The parts of the day, and how fast the profile follows the counts."""

    bin_s: float = 1800.0
    """The length of a part of the day in seconds; it divides a day."""
    utc_offset_s: float = 0.0
    """Local time minus UTC in seconds."""
    weekend: tuple[int, ...] = (5, 6)
    """The days of the weekend; Monday is 0. Empty: all days have the same level."""
    memory_days: float = 28.0
    """The time constant in days with which counts are forgotten."""
    bin_events: float = 1.0
    """The weight of 1 in the factor of each part of the day, as a number of departures."""
    weekend_events: float = 4.0
    """The weight of 1 in the factors of workdays and of weekends, as a number of departures."""

    def __post_init__(self) -> None:
        if not (self.bin_s > 0 and DAY_S % self.bin_s == 0):
            raise ValueError(f"bin_s: {self.bin_s}: must divide the {DAY_S:g} seconds of a day")
        for name in ("memory_days", "bin_events", "weekend_events"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)}: must be above 0")
        if not set(self.weekend) <= set(range(7)):
            raise ValueError(f"weekend: {self.weekend}: must be numbers of days, 0 for Monday to 6 for Sunday")

    @property
    def bins(self) -> int:
        """The number of parts of a day."""
        return round(DAY_S / self.bin_s)

    @property
    def kinds(self) -> Ints:
        """The kind of each day of the week, from Monday: 0 for workdays, 1 for weekends."""
        return np.isin(np.arange(7), self.weekend).astype(np.int64)

    def week_bin(self, at_s: float) -> int:
        """Returns the number of the part of the week, from Monday 0:00 local time, that contains a time."""
        return int((at_s + self.utc_offset_s + _MONDAY * DAY_S) // self.bin_s) % (7 * self.bins)

    def end_of_bin_s(self, at_s: float) -> float:
        """Returns the end of the part of the day that contains a time."""
        return ((at_s + self.utc_offset_s) // self.bin_s + 1) * self.bin_s - self.utc_offset_s


@dataclass(frozen=True)
class Profile:
    """The counts from which the factors are estimated, for each kind of day and part of the day."""

    settings: ProfileSettings
    events: Floats
    """The departures, with decay."""
    expected: Floats
    """The departures that levels without a profile expected, with the same decay."""

    @classmethod
    def start(cls, settings: ProfileSettings) -> "Profile":
        """Returns the profile of a site without observations: all factors are 1."""
        empty = np.zeros((2, settings.bins))
        return cls(settings, empty, empty)

    def counted(self, at_s: float, events: int, expected: float) -> "Profile":
        """Returns the profile after a period within one part of the day, which begins at `at_s`."""
        day, part = divmod(self.settings.week_bin(at_s), self.settings.bins)
        kind = self.settings.kinds[day]
        counts, means = self.events.copy(), self.expected.copy()
        counts[kind, part] += events
        means[kind, part] += expected
        return replace(self, events=counts, expected=means)

    def aged(self, passed_s: float) -> "Profile":
        """Returns the profile after some time, in which counts are forgotten."""
        kept = exp(-passed_s / DAY_S / self.settings.memory_days)
        return replace(self, events=self.events * kept, expected=self.expected * kept)

    def week(self, dispersion: float = 1.0) -> Floats:
        """Returns the factor of each part of the week, from Monday 0:00 local time.

        `dispersion` is the variance of counts divided by their mean. Counts weigh less by this factor.

        A factor is the product of two: that of the part of the day, from all days and averaged with its neighbours, and
        that of the kind of day. Both are shrunk to 1, and scaled so that the mean over the observed exposure is 1: the
        level is estimated elsewhere.
        """
        settings = self.settings
        bin_events, weekend_events = settings.bin_events * dispersion, settings.weekend_events * dispersion
        total = self.expected.sum()
        if not total > 0:
            return np.ones(7 * settings.bins)
        expected = self.expected * (self.events.sum() / total)
        part = (_smooth(self.events.sum(0)) + bin_events) / (_smooth(expected.sum(0)) + bin_events)
        explained = (expected * part).sum(1)
        kind = (self.events.sum(1) + weekend_events) / (explained + weekend_events)
        factors = kind[:, None] * part
        mean = (factors * self.expected).sum() / total
        return np.asarray((factors / mean)[settings.kinds].ravel())

    def to_json(self) -> dict[str, Any]:
        """Returns the counts as values of JSON. The settings are not part of them."""
        return {"events": self.events.tolist(), "expected": self.expected.tolist()}

    @classmethod
    def from_json(cls, body: dict[str, Any], settings: ProfileSettings) -> "Profile":
        """Returns the profile from the result of `to_json`.

        Raises:
            ValueError: the body has another number of parts of the day than the settings.
        """
        events, expected = np.array(body["events"], float), np.array(body["expected"], float)
        if events.shape != (2, settings.bins):
            raise ValueError(f"events: has the shape {events.shape}: must be (2, {settings.bins}) for these settings")
        return cls(settings, events, expected)


def _smooth(parts: Floats) -> Floats:
    """Returns the weighted mean of each part of the day and its two neighbours, around the clock."""
    return np.asarray(parts / 2 + (np.roll(parts, 1) + np.roll(parts, -1)) / 4)
