"""Rate limiting: a token bucket with a minimum interval, and a limit on the share of time that work may use."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from domain.token_bucket import TokenBucket

BURST = 10


class LoopPace:
    """A token bucket of `BURST` tokens, with a minimum interval between two tokens."""

    def __init__(self, interval_s: float, per_s: float) -> None:
        """`interval_s`: the minimum interval; `per_s`: tokens that are added each second."""
        self._interval_s = interval_s
        self._bucket = TokenBucket(per_s, BURST, BURST, 0.0)

    def take(self, now_s: float) -> float:
        """Takes a token at `now_s` (monotonic); returns the time at which the next one may be taken."""
        self._bucket.wait_s(now_s)
        self._bucket.tokens = max(0.0, self._bucket.tokens - 1)
        return now_s + max(self._interval_s, self._bucket.wait_s(now_s))


class TimeShare:
    """Keeps rounds of work within a share of the time: after a long round, the next one waits."""

    def __init__(
        self,
        share: float,
        longest_s: float,
        free_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`share`: the fraction of time that rounds may take; 1 means no waits. `longest_s`: the maximum wait.

        `free_s`: the part of each round that does not count.
        """
        self._rest_per_s = 1.0 / share - 1.0
        self._longest_s = longest_s
        self._free_s = free_s
        self._clock, self._sleep = clock, sleep
        self._spent_s = 0.0
        self._ended_s = 0.0

    def begin(self) -> None:
        """Waits until a new round may begin."""
        rest_s = min(max(0.0, self._spent_s - self._free_s) * self._rest_per_s, self._longest_s)
        wait_s = self._ended_s + rest_s - self._clock()
        if wait_s > 0:
            self._sleep(wait_s)
        self._spent_s = 0.0

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Counts the time of the block as work of the current round."""
        began_s = self._clock()
        try:
            yield
        finally:
            self._ended_s = self._clock()
            self._spent_s += self._ended_s - began_s
