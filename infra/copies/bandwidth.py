"""Divides one bandwidth budget among the copies of a process: a token bucket with start-time fair queueing.

The token bucket fills at the rate of the budget. The first request in the queue is served as soon as the bucket has no
debt, even if it needs more tokens than there are; the bucket is then in debt, and the next request waits until the debt
is paid. Requests are ordered by start-time fair queueing: each share has a virtual clock, which a request of `n` bytes
advances by `n / fraction`, and the share with the smallest clock goes first. So busy shares get bandwidth in proportion
to their fractions, and unused bandwidth goes to the other shares. A share that was idle starts at the clock of the last
request that was served, so it does not accumulate credit.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_BURST_S = 1.0


@dataclass(frozen=True, order=True)
class _Place:
    """A queued request, ordered by the share's virtual clock and then by arrival."""

    starts: float
    number: int
    share: str = field(compare=False)
    size_bytes: int = field(compare=False)


class Order:
    """The queue of requests and the token bucket. It never sleeps: time is an argument, in seconds of any one clock."""

    def __init__(self, budget_bytes_per_s: float, burst_s: float = _BURST_S) -> None:
        """Create an empty queue. After an idle period, up to `burst_s` seconds of the budget can be used at once."""
        if not budget_bytes_per_s > 0:
            raise ValueError(f"budget_bytes_per_s={budget_bytes_per_s!r}: must be greater than 0")
        self._budget = budget_bytes_per_s
        self._burst_s = burst_s
        self._fractions: dict[str, float] = {}
        self._clocks: dict[str, float] = {}
        self._now = 0.0
        """Virtual clock of the request that was served last."""
        self._paid_s = float("-inf")
        """Time at which the bucket's debt is paid."""
        self._waiting: set[_Place] = set()
        self._numbers = 0

    def add(self, share: str, fraction: float) -> None:
        """Give `share` a fraction of the budget. Bandwidth that no share has reserved or uses goes to the busy shares.

        Raises:
            ValueError: the fraction is not above 0 and at most 1, or the sum of all fractions exceeds 1.
        """
        others = sum(known for name, known in self._fractions.items() if name != share)
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction={fraction!r} of share {share!r}: must be above 0 and at most 1")
        if others + fraction > 1 + 1e-9:
            raise ValueError(f"fraction={fraction!r} of share {share!r}: only {1 - others:g} of the budget is free")
        self._fractions[share] = fraction

    def ask(self, share: str, size_bytes: int) -> _Place:
        """Queue a request for `size_bytes`. Requests of one share keep their order."""
        starts = max(self._now, self._clocks.get(share, 0.0))
        self._clocks[share] = starts + size_bytes / self._fractions[share]
        self._numbers += 1
        place = _Place(starts, self._numbers, share, size_bytes)
        self._waiting.add(place)
        return place

    def take(self, place: _Place, at_s: float) -> float | None:
        """Serve the request if it is its turn, and return 0.0.

        Otherwise return the seconds to wait for the bucket, or None if another request goes first.
        """
        if place != min(self._waiting):
            return None
        if at_s < self._paid_s:
            return self._paid_s - at_s
        self._waiting.remove(place)
        self._now = place.starts
        self._paid_s = max(self._paid_s, at_s - self._burst_s) + place.size_bytes / self._budget
        return 0.0

    def leave(self, place: _Place) -> None:
        """Remove a request that was not served."""
        self._waiting.discard(place)


class Bandwidth:
    """A bandwidth budget that threads use through its shares. Thread-safe."""

    def __init__(
        self,
        budget_bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float | None], object] = threading.Condition.wait,
    ) -> None:
        """Create a budget. Tests replace `clock` and `wait`, which sleeps on a condition with a timeout.

        Raises:
            ValueError: the budget is not above 0.
        """
        self._order = Order(budget_bytes_per_s)
        self._changed = threading.Condition()
        self._clock = clock
        self._wait = wait

    def share(self, name: str, fraction: float) -> "BandwidthShare":
        """Return the share of this name, and set its fraction of the budget.

        Raises:
            ValueError: see `Order.add`.
        """
        with self._changed:
            self._order.add(name, fraction)
        return BandwidthShare(self, name)

    def draw(self, share: str, size_bytes: int) -> None:
        """Wait until the share may transfer `size_bytes`."""
        with self._changed:
            place = self._order.ask(share, size_bytes)
            try:
                while (delay_s := self._order.take(place, self._clock())) != 0.0:
                    self._wait(self._changed, delay_s)
            finally:
                self._order.leave(place)
                self._changed.notify_all()


@dataclass(frozen=True)
class BandwidthShare:
    """A share of a bandwidth budget."""

    bandwidth: Bandwidth
    name: str

    def draw(self, size_bytes: int) -> None:
        """Wait until `size_bytes` may be transferred. They may exceed one second's worth of the budget."""
        self.bandwidth.draw(self.name, size_bytes)
