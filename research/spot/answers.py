"""When and how a provider answers launches: late, in any order, and with refusals although a zone has capacity."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol


class Answers(Protocol):
    """The answers of one run.

    They are a function of zone and time: two runs that ask alike are answered alike. If they depended on the number of
    the launch, one launch more in one of the runs would change all later answers.
    """

    def next(self, zone: str | None, tick: int, *, has_room: bool) -> tuple[bool, float]:
        """Returns whether a launch is granted, and the time in seconds until this answer.

        Args:
            zone: the zone; None: on-demand.
            tick: the tick of the launch.
            has_room: whether the zone has capacity.
        """
        ...

    def cold_start_s(self, zone: str | None, tick: int) -> float | None:
        """Returns the seconds from a grant in this tick until the replica is ready; None: as in the settings."""
        ...


@dataclass(frozen=True)
class AnswerSettings:
    """The answers to launches. By default, each launch is answered at once, and refused only without capacity."""

    refused_s: float = 0.0
    """The mean time in seconds from a launch until its refusal. Times are drawn from an exponential distribution."""
    granted_s: float = 0.0
    """The same until the grant, also of on-demand replicas."""
    refused_share: float = 0.0
    """The probability that a zone refuses a launch although it has capacity."""
    seed: str = ""
    """The draws depend on it, on the zone, on the tick, and on the number of launches there in this tick."""

    def begin(self) -> "DrawnAnswers":
        """Returns the answers of a run that begins."""
        return DrawnAnswers(self)


@dataclass
class DrawnAnswers:
    """The answers of one run, drawn for each zone, tick and number of the launch in both."""

    settings: AnswerSettings
    asked: Counter[tuple[str | None, int]] = field(default_factory=Counter)
    """The number of launches so far, by zone and tick."""

    def next(self, zone: str | None, tick: int, *, has_room: bool) -> tuple[bool, float]:
        """See `Answers.next`."""
        launch = f"{zone} {tick} {self.asked[zone, tick]}"
        self.asked[zone, tick] += 1
        share = self.settings.refused_share if zone is not None else 0.0
        granted = has_room and not (share > 0 and self._draw("refuses", launch).random() < share)
        mean_s = self.settings.granted_s if granted else self.settings.refused_s
        return granted, self._draw("answer", launch).expovariate(1 / mean_s) if mean_s > 0 else 0.0

    def cold_start_s(self, zone: str | None, tick: int) -> float | None:
        """See `Answers.cold_start_s`."""
        return None

    def _draw(self, what: str, launch: str) -> random.Random:
        return random.Random(f"{self.settings.seed} {what} {launch}")


AT_ONCE = AnswerSettings()
