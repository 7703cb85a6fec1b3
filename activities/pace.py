"""Rate limiting: bursts at a minimum interval, then a steady rate."""

from domain.token_bucket import TokenBucket

BURST = 10


class Pace:
    """A token bucket of `BURST` tokens, with a minimum interval between two."""

    def __init__(self, interval_s: float, per_s: float) -> None:
        """`interval_s`: the minimum; `per_s`: tokens that are added each second."""
        self._interval_s = interval_s
        self._bucket = TokenBucket(per_s, BURST, BURST, 0.0)

    def take(self, now_s: float) -> float:
        """Takes a token at `now_s` (monotonic), and returns when the next one may be taken."""
        self._bucket.wait_s(now_s)
        self._bucket.tokens = max(0.0, self._bucket.tokens - 1)
        return now_s + max(self._interval_s, self._bucket.wait_s(now_s))
