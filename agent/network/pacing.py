"""Paces the agent's own transfers where the kernel does not shape them. Other traffic is not affected."""

import threading
import time
from collections.abc import Callable

from domain.token_bucket import TokenBucket

_BURST_S = 0.1
_SHORTEST_S = 1e-6
"""A wait that every clock shows, so that rounding cannot make `Pace.draw` loop."""


class Pace:
    """The rate of one flow in bytes of payload per second; None: as fast as possible. Thread-safe."""

    def __init__(
        self,
        rate_bytes_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._changing = threading.Lock()
        self._clock = clock
        self._sleep = sleep
        self._bucket: TokenBucket | None = None
        self.change(rate_bytes_s)

    @property
    def rate_bytes_s(self) -> float | None:
        """The rate; None: as fast as possible."""
        with self._changing:
            return None if self._bucket is None else self._bucket.rate

    def change(self, rate_bytes_s: float | None) -> None:
        """Changes the rate. A transfer that waits continues at the new rate after its wait."""
        with self._changing:
            if rate_bytes_s is None:
                self._bucket = None
                return
            tokens = self._bucket.tokens if self._bucket is not None else 0.0
            size = max(1.0, rate_bytes_s * _BURST_S)
            self._bucket = TokenBucket(rate_bytes_s, size, min(size, tokens), self._clock())

    def draw(self, size_bytes: int) -> None:
        """Waits until `size_bytes` may be sent. They may exceed the burst; later calls then wait longer."""
        while (delay_s := self._take(size_bytes)) > 0:
            self._sleep(max(delay_s, _SHORTEST_S))

    def _take(self, size_bytes: int) -> float:
        with self._changing:
            if self._bucket is None:
                return 0.0
            delay_s = self._bucket.wait_s(self._clock())
            if delay_s == 0:
                self._bucket.tokens -= size_bytes
            return delay_s
