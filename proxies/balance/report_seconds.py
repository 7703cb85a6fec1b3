"""The seconds of the clock for which counts are reported."""

import math

_AHEAD_S = 60
"""The API refuses counts of seconds that are further than this in the future."""


class Seconds:
    """Returns each second at most once, because the API keeps the first counts of a second.

    If the clock is set back a little, counts are those of a later second. If it is set back by more than `_AHEAD_S`, it
    was wrong before, so the API has refused what was reported then, and the seconds start again from the new time.
    """

    def __init__(self, now_s: float) -> None:
        """Times are seconds since 1970."""
        self._last = math.floor(now_s)

    def over(self, now_s: float) -> int | None:
        """Returns the newest second that is over; None: it was returned before."""
        second = math.floor(now_s) - 1
        if self._last - second > _AHEAD_S:
            self._last = second - 1
        if second <= self._last:
            return None
        self._last = second
        return second

    def last(self, now_s: float) -> int:
        """Returns the second that has not ended yet, or a later one if it was returned before."""
        self._last = max(math.floor(now_s), self._last + 1)
        return self._last
