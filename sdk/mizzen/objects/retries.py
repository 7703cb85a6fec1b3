"""Reading a body that may be cut midway: the next request begins at the first byte that is missing."""

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

TRIES = 5
"""Requests in a row that bring less than `_PROGRESS_BYTES`; the last one's error is the caller's."""
_PROGRESS_BYTES = 4096
"""Tries are counted anew after a request that brought so much. With less, a server that sends one byte for each request
would be asked 16 million times for a part."""
_PAUSE_S = 0.1
_LONGEST_S = 5.0

_own = random.Random()
"""Not the generator that a training shares."""


class CutBody(OSError):
    """A body ended before the length that its header promised, or had another length than was asked for."""


class Readable(Protocol):
    """A body on its way."""

    def readinto(self, into: memoryview, /) -> int:
        """Fill what has arrived; 0: the end."""


def fill(
    into: memoryview,
    request: Callable[[int], AbstractContextManager[Readable]],
    cuts: tuple[type[Exception], ...],
) -> int:
    """Fill `into` from the body of `request(0)`; where one is cut, from `request(n)` on after `n` bytes.

    `request` returns the body of the bytes from there on; a body without bytes ends the object. Errors of `request`
    itself are not retried here: its client does that. Returns the number of bytes: fewer at the object's end.

    Raises:
        Exception: one of `cuts`, when `TRIES` requests in a row brought (almost) nothing.
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
