"""When and how a provider answers launches: late, in any order, and with refusals although a zone has capacity."""

import random
from dataclasses import dataclass


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
    """The draws depend on it and on the number of the launch only."""

    def refuses(self, number: int) -> bool:
        """Returns whether launch `number` is refused although its zone has capacity."""
        return self.refused_share > 0 and self._draw("refuses", number).random() < self.refused_share

    def after_s(self, number: int, *, granted: bool) -> float:
        """Returns the time in seconds from launch `number` until its answer."""
        mean_s = self.granted_s if granted else self.refused_s
        return self._draw("answer", number).expovariate(1 / mean_s) if mean_s > 0 else 0.0

    def _draw(self, what: str, number: int) -> random.Random:
        return random.Random(f"{self.seed} {what} {number}")


AT_ONCE = AnswerSettings()
