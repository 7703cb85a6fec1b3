"""A token bucket for rate limits: a constant average rate, with bursts after a pause."""

from dataclasses import dataclass


@dataclass
class TokenBucket:
    """A token bucket that gains `rate` tokens per second and holds at most `size`."""

    rate: float
    size: float
    tokens: float
    at_s: float

    def wait_s(self, now_s: float) -> float:
        """Returns the seconds until a token is available; 0 if one is available now."""
        self.tokens = min(self.size, self.tokens + (now_s - self.at_s) * self.rate)
        self.at_s = now_s
        return 0.0 if self.tokens >= 1 else (1 - self.tokens) / self.rate
