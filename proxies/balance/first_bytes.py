"""How long requests have waited for the first byte of their answers, from HAProxy's list of sessions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

SESSIONS = "show sess"
"""The command for the list of requests in progress."""
_SESSION = re.compile(
    r"(?P<id>0x[0-9a-f]+): .*? fe=service be=\S+ srv=(?P<server>\S+) .*? age=(?P<age>\S+) .*?"
    r" rp\[f=\w+,i=\d+,an=(?P<an>[0-9a-f]+)h"
)
_WAITS_FOR_ANSWER = 0x0040_0000
"""The bit of HAProxy's response analysers of a request that was sent and whose answer has no complete header."""
_UNITS_S = {"d": 86_400, "h": 3600, "m": 60, "s": 1}
_PART = re.compile(r"(\d+)([dhms])")
_ROUNDING_S = 1.5
"""HAProxy rounds the age of a request to seconds."""


@dataclass(frozen=True)
class UnansweredRequest:
    """A request that waits for the first byte of its answer."""

    server: str
    began_s: float
    """The estimated time at which HAProxy got it."""
    seen_s: float
    """The time at which it was first seen waiting for this server."""


class FirstByteWaits:
    """The requests of one HAProxy process that wait for the first byte. Times are monotonic."""

    def __init__(self) -> None:
        self._waiting: dict[str, UnansweredRequest] = {}

    def clear(self) -> None:
        """Removes all requests."""
        self._waiting.clear()

    def update(self, answer: str, now_s: float) -> None:
        """Takes the answer to `SESSIONS`."""
        before, self._waiting = self._waiting, {}
        for found in _SESSION.finditer(answer):
            if not int(found["an"], 16) & _WAITS_FOR_ANSWER:
                continue
            age_s = sum(int(count) * _UNITS_S[unit] for count, unit in _PART.findall(found["age"]))
            one = UnansweredRequest(found["server"], now_s - age_s, now_s)
            old = before.get(found["id"])  # HAProxy uses the id of a request that has ended again.
            if old is not None and old.server == one.server and abs(old.began_s - one.began_s) <= _ROUNDING_S:
                one = old
            self._waiting[found["id"]] = one

    def longest_s(self, now_s: float) -> Mapping[str, float]:
        """Returns the longest wait by the name of the server."""
        longest: dict[str, float] = {}
        for one in self._waiting.values():
            longest[one.server] = max(longest.get(one.server, 0.0), now_s - one.seen_s)
        return longest

    def overdue(self, limit_s: float, now_s: float) -> list[str]:
        """Returns the ids of the requests that have waited for at least `limit_s`."""
        return [id_ for id_, one in self._waiting.items() if now_s - one.seen_s >= limit_s]
