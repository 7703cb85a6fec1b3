"""Detects that departures have become more or less frequent than the model expects: two CUSUM statistics.

Each statistic sums the log likelihood ratio of counted departures between a rate that has changed by the factor
`ratio`, or by 1 / `ratio`, and the expected rate, and starts again from 0 whenever the sum is negative. An alarm is
raised when a statistic exceeds the threshold. The statistics depend on counts and expected counts only, so a delay in
expected events is the same for each site, and the delay in hours is this number divided by the site's rate.

For counts of equal periods, no other detector with the same rate of false alarms has a shorter worst-case delay if the
rate changes by exactly `ratio` (Moustakides, 1986).
"""

from dataclasses import asdict, dataclass, field, replace
from math import log
from typing import Any


@dataclass(frozen=True)
class DriftSettings:
    """The parameters of the detector."""

    ratio: float = 1.5
    """The factor of change for which the detector is optimal, in both directions."""
    threshold: float = 5.0
    """The log likelihood ratio that raises an alarm. docs/reclaim.md has its delays and false alarms."""

    def __post_init__(self) -> None:
        if not self.ratio > 1:
            raise ValueError(f"ratio: {self.ratio}: must be above 1")
        if not self.threshold > 0:
            raise ValueError(f"threshold: {self.threshold}: must be above 0")


@dataclass(frozen=True)
class Side:
    """The statistic of one direction, with the counts since it was last 0."""

    score: float = 0.0
    since_s: float = 0.0
    """When the statistic was last 0. After an alarm this estimates when the rate changed."""
    events: int = 0
    expected: float = 0.0

    def following(self, ratio: float, events: int, expected: float, until_s: float, dispersion: float) -> "Side":
        """Returns the statistic after another period, which ends at `until_s`."""
        score = self.score + (events * log(ratio) - (ratio - 1) * expected) / dispersion
        if score <= 0:
            return Side(since_s=until_s)
        return Side(score, self.since_s, self.events + events, self.expected + expected)


@dataclass(frozen=True)
class Alarm:
    """The rate has changed."""

    at_s: float
    since_s: float
    """The estimated time of the change."""
    events: int
    """The departures since the change..."""
    expected: float
    """...and how many the model expected without the change."""


@dataclass(frozen=True)
class DriftState:
    """The state of the detector, which can be stored as JSON."""

    more: Side = field(default_factory=Side)
    fewer: Side = field(default_factory=Side)

    @classmethod
    def start(cls, at_s: float) -> "DriftState":
        """Returns the state of a detector that starts now."""
        return cls(Side(since_s=at_s), Side(since_s=at_s))

    def to_json(self) -> dict[str, Any]:
        """Returns the state as values of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "DriftState":
        """Returns the state from the result of `to_json`."""
        return cls(Side(**body["more"]), Side(**body["fewer"]))


def watch(
    state: DriftState, settings: DriftSettings, events: int, expected: float, until_s: float, dispersion: float = 1.0
) -> tuple[DriftState, Alarm | None]:
    """Returns the state after a period, and an alarm if the rate has changed. After an alarm the detector starts again.

    Args:
        state: the state at the start of the period.
        settings: the threshold.
        events: the departures in the period.
        expected: the departures that the model expected in it.
        until_s: the end of the period.
        dispersion: the variance of counts divided by their mean, 1 for a Poisson process. Machines that leave together
            are no independent evidence, so the log likelihood ratio is divided by it.
    """
    more = state.more.following(settings.ratio, events, expected, until_s, dispersion)
    fewer = state.fewer.following(1 / settings.ratio, events, expected, until_s, dispersion)
    side = more if more.score >= fewer.score else fewer
    if side.score < settings.threshold:
        return replace(state, more=more, fewer=fewer), None
    return DriftState.start(until_s), Alarm(until_s, side.since_s, side.events, side.expected)
