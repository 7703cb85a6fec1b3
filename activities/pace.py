"""Rate limiting: bursts at a minimum interval, then a steady rate."""

BURST = 10


class Pace:
    """A token bucket of `BURST` tokens, with a least interval between two."""

    def __init__(self, interval_s: float, per_s: float) -> None:
        """`interval_s`: between any two; `per_s`: tokens that come back."""
        self._interval_s = interval_s
        self._per_s = per_s
        self._tokens = float(BURST)
        self._counted_s: float | None = None

    def take(self, now_s: float) -> float:
        """Takes a token at `now_s` (monotonic); when the next one may be taken."""
        if self._counted_s is not None:
            self._tokens = min(BURST, self._tokens + (now_s - self._counted_s) * self._per_s)
        self._counted_s = now_s
        self._tokens = max(0.0, self._tokens - 1)
        return now_s + max(self._interval_s, (1 - self._tokens) / self._per_s)
