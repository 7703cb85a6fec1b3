"""Reads response bodies that may be truncated: the next request starts at the first missing byte."""

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

TRIES = 5
"""Consecutive requests with less than `_PROGRESS_BYTES` each before the last one's error is raised."""
_PROGRESS_BYTES = 4096
"""A request that returns at least this much resets the count of tries. Without this minimum, a server that sends one
byte per request would receive 16 million requests for a part."""
_PAUSE_S = 0.1
_LONGEST_S = 5.0

_own = random.Random()
"""A generator of its own: the global one belongs to the training."""


class CutBody(OSError):
    """A response body was shorter than its header stated, or had another length than was requested."""


class Readable(Protocol):
    """A response body that is being received."""

    def readinto(self, into: memoryview, /) -> int:
        """Read received bytes into a buffer, and return their number; 0 at the end of the body."""


def fill(
    into: memoryview,
    request: Callable[[int], AbstractContextManager[Readable]],
    cuts: tuple[type[Exception], ...],
) -> int:
    """Fill `into` from the body of `request(0)`; after a truncation at `n` bytes in total, continue with `request(n)`.

    `request` returns the body that starts at an offset; an empty body means the end of the object. Errors of `request`
    itself are not retried here, because its client does that. Returns the number of bytes: fewer at the object's end.

    Raises:
        Exception: one of `cuts`, after `TRIES` consecutive requests that returned almost nothing.
    """
    done = failures = 0
    while True:
        began = done
        with request(done) as body:
            try:
                while done < len(into) and (count := body.readinto(into[done:])):
                    done += count
                return done
            except cuts:
                failures = 1 if done - began >= _PROGRESS_BYTES else failures + 1
                if failures >= TRIES:
                    raise
        if done == len(into):
            return done
        time.sleep(min(_LONGEST_S, _PAUSE_S * 2 ** (failures - 1)) * _own.uniform(0.5, 1.0))
