"""The requests of a window: when each one arrives, and how long a replica needs to answer it."""

from dataclasses import dataclass
from hashlib import blake2b
from statistics import fmean
from typing import Protocol

import numpy as np
import numpy.typing as npt

F8 = npt.NDArray[np.float64]
_MINUTE_S = 60.0


@dataclass(frozen=True)
class Requests:
    """The requests of a window, sorted by arrival."""

    arrival_s: F8
    """The time of each arrival in seconds since the start of the window."""
    service_s: F8
    """For each request, the time in seconds from its start on a replica to the end of its answer."""


class RequestSource(Protocol):
    """Draws the requests of windows. Equal arguments give equal requests."""

    def draw(self, start_s: float, length_s: float, seed: str) -> Requests:
        """Returns the requests of the seconds [start_s, start_s + length_s) of the trace of capacity."""
        ...

    def expected(self, length_s: float) -> float:
        """Returns the mean number of requests in windows of this length."""
        ...


@dataclass(frozen=True)
class PoissonRequests:
    """Requests that arrive independently of each other with a constant rate."""

    rate_per_s: float
    """The mean number of requests in a second; above 0."""
    service_s: float
    """The mean of the service times, which are distributed exponentially."""

    def draw(self, start_s: float, length_s: float, seed: str) -> Requests:
        """See `RequestSource.draw`. The requests do not depend on `start_s`."""
        random = _generator(seed)
        arrival_s = random.uniform(0.0, length_s, random.poisson(self.rate_per_s * length_s))
        return _exponential(np.sort(arrival_s), self.service_s, random)

    def expected(self, length_s: float) -> float:
        """See `RequestSource.expected`."""
        return self.rate_per_s * length_s


@dataclass(frozen=True)
class RateRequests:
    """Requests by their number in each minute. The minutes repeat, so second 0 follows the last one.

    If the number of a minute is not whole, it is rounded up or down at random, so that its mean is right. The arrivals
    are uniform within the minute.
    """

    per_minute: tuple[float, ...]
    """The number of requests of each minute; at least one minute."""
    service_s: float
    """The mean of the service times, which are distributed exponentially."""

    def draw(self, start_s: float, length_s: float, seed: str) -> Requests:
        """See `RequestSource.draw`."""
        random = _generator(seed)
        first, last = int(start_s // _MINUTE_S), int((start_s + length_s) // _MINUTE_S)
        minutes = np.arange(first, last + 1)
        wanted = np.asarray(self.per_minute)[minutes % len(self.per_minute)]
        counts = np.floor(wanted + random.random(minutes.size)).astype(np.int64)
        at_s = (np.repeat(minutes, counts) + random.random(int(counts.sum()))) * _MINUTE_S - start_s
        # The window may start and end within a minute.
        return _exponential(np.sort(at_s[(at_s >= 0) & (at_s < length_s)]), self.service_s, random)

    def expected(self, length_s: float) -> float:
        """See `RequestSource.expected`."""
        return fmean(self.per_minute) * length_s / _MINUTE_S


@dataclass(frozen=True)
class TokenRequests:
    """Requests with an arrival and a service time each. The trace repeats, so its start follows its end."""

    arrival_s: F8
    """The times of the arrivals in seconds since the first one, sorted."""
    service_s: F8
    """The service times in seconds."""
    length_s: float
    """The length of the trace in seconds; above the last arrival."""
    share: float = 1.0
    """The probability with which a request is kept, above 0 and at most 1."""

    def draw(self, start_s: float, length_s: float, seed: str) -> Requests:
        """See `RequestSource.draw`."""
        first, last = int(start_s // self.length_s), int((start_s + length_s) // self.length_s)
        rounds = np.arange(first, last + 1)
        at_s = (self.arrival_s[None, :] + rounds[:, None] * self.length_s).ravel() - start_s
        service_s = np.tile(self.service_s, rounds.size)
        kept = (at_s >= 0) & (at_s < length_s)
        if self.share < 1:
            kept &= _generator(seed).random(at_s.size) < self.share
        return Requests(at_s[kept], service_s[kept])

    def expected(self, length_s: float) -> float:
        """See `RequestSource.expected`."""
        return self.share * self.arrival_s.size * length_s / self.length_s


def _exponential(arrival_s: F8, mean_s: float, random: np.random.Generator) -> Requests:
    return Requests(arrival_s, random.exponential(mean_s, arrival_s.size))


def _generator(seed: str) -> np.random.Generator:
    # A hash, because the seeds of numpy are not negative.
    return np.random.Generator(np.random.PCG64(int.from_bytes(blake2b(seed.encode(), digest_size=16).digest(), "big")))
