"""Sends at most at a rate: the research traffic of the suite `shaping`."""

import time

from domain.token_bucket import TokenBucket

_BURST_S = 0.1


class PacingRun:
    """A rate in bytes per second; None: as fast as possible."""

    def __init__(self, rate_bytes_s: float | None) -> None:
        self._bucket: TokenBucket | None = None
        if rate_bytes_s is not None:
            self._bucket = TokenBucket(rate_bytes_s, max(1.0, rate_bytes_s * _BURST_S), 0.0, time.monotonic())

    def draw(self, size_bytes: int) -> None:
        """Waits until `size_bytes` may be sent. They may exceed the burst; later calls then wait longer."""
        if self._bucket is not None:
            while (delay_s := self._bucket.wait_s(time.monotonic())) > 0:
                time.sleep(max(delay_s, 1e-6))
            self._bucket.tokens -= size_bytes
