"""One budget of bandwidth for all copies of a process over a link, and shares of it.

A token bucket fills at the budget. Whoever is first in the order may take as soon as the bucket owes nothing, and may
take more than there is: then it owes, and the next one waits until that is paid. The order is that of start-time fair
queueing: each share has a clock that a taking of `n` bytes moves on by `n / fraction`, and the clock that is furthest
behind goes first. So shares that all want bandwidth get it by their fractions, and what one does not use goes to the
others. A share that was idle starts at the clock of the one that took last: it saves up nothing.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_BURST_S = 1.0


@dataclass(frozen=True, order=True)
class _Place:
    """A place in the order: where the share's clock stands, and who came first."""

    starts: float
    number: int
    share: str = field(compare=False)
    size_bytes: int = field(compare=False)


class Order:
    """Who takes next, and when. Nothing here waits: time is an argument, in seconds on any one clock."""

    def __init__(self, budget_bytes_per_s: float, burst_s: float = _BURST_S) -> None:
        """After a pause up to `burst_s` of the budget can be taken at once."""
        if not budget_bytes_per_s > 0:
            raise ValueError(f"budget_bytes_per_s={budget_bytes_per_s!r}: must be greater than 0")
        self._budget = budget_bytes_per_s
        self._burst_s = burst_s
        self._fractions: dict[str, float] = {}
        self._clocks: dict[str, float] = {}
        self._now = 0.0
        """The clock of the share that took last."""
        self._paid_s = float("-inf")
        """From when on the bucket owes nothing."""
        self._waiting: set[_Place] = set()
        self._numbers = 0

    def add(self, share: str, fraction: float) -> None:
        """Give `share` a fraction of the budget; what is left over goes to whoever wants it.

        Raises:
            ValueError: it is not above 0 and at most 1, or all fractions together are more than 1.
        """
        others = sum(known for name, known in self._fractions.items() if name != share)
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction!r} of share {share!r}: must be above 0 and at most 1")
        if others + fraction > 1 + 1e-9:
            raise ValueError(f"fraction={fraction!r} of share {share!r}: at most {1 - others:g} is left by the others")
        self._fractions[share] = fraction

    def ask(self, share: str, size_bytes: int) -> _Place:
        """Queue for so many bytes. A share's own requests keep their order."""
        starts = max(self._now, self._clocks.get(share, 0.0))
        self._clocks[share] = starts + size_bytes / self._fractions[share]
        self._numbers += 1
        place = _Place(starts, self._numbers, share, size_bytes)
        self._waiting.add(place)
        return place

    def take(self, place: _Place, at_s: float) -> float | None:
        """Take what was asked for: 0.0. Else how long to wait, in seconds; None: until another one has taken."""
        if place != min(self._waiting):
            return None
        if at_s < self._paid_s:
            return self._paid_s - at_s
        self._waiting.remove(place)
        self._now = place.starts
        self._paid_s = max(self._paid_s, at_s - self._burst_s) + place.size_bytes / self._budget
        return 0.0

    def leave(self, place: _Place) -> None:
        """Give up a place that has not taken."""
        self._waiting.discard(place)


class Bandwidth:
    """A budget that threads draw on, through shares of it."""

    def __init__(
        self,
        budget_bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float | None], object] = threading.Condition.wait,
    ) -> None:
        """`wait` sleeps on a condition for at most so many seconds; `clock` tells the time that passes meanwhile.

        Raises:
            ValueError: the budget is not above 0.
        """
        self._order = Order(budget_bytes_per_s)
        self._changed = threading.Condition()
        self._clock = clock
        self._wait = wait

    def share(self, name: str, fraction: float) -> "Share":
        """The share of this name, with this fraction of the budget from now on.

        Raises:
            ValueError: see `Order.add`.
        """
        with self._changed:
            self._order.add(name, fraction)
        return Share(self, name)

    def draw(self, share: str, size_bytes: int) -> None:
        """Wait until so many bytes may be moved."""
        with self._changed:
            place = self._order.ask(share, size_bytes)
            try:
                while (delay_s := self._order.take(place, self._clock())) != 0.0:
                    self._wait(self._changed, delay_s)
            finally:
                self._order.leave(place)
                self._changed.notify_all()


@dataclass(frozen=True)
class Share:
    """A part of a budget."""

    bandwidth: Bandwidth
    name: str

    def draw(self, size_bytes: int) -> None:
        """Wait until so many bytes may be moved; they may be more than a second's worth."""
        self.bandwidth.draw(self.name, size_bytes)
