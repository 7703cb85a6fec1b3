"""Token buckets: so many things per second on average, and some at once after a pause."""

from dataclasses import dataclass


@dataclass
class TokenBucket:
    """A token bucket: `rate` tokens per second, at most `size` of them kept."""

    rate: float
    size: float
    tokens: float
    at_s: float

    def wait_s(self, now_s: float) -> float:
        """Seconds until there is a token; 0 if there is one."""
        self.tokens = min(self.size, self.tokens + (now_s - self.at_s) * self.rate)
        self.at_s = now_s
        return 0.0 if self.tokens >= 1 else (1 - self.tokens) / self.rate
