"""Sends the counts of a service's requests to the API, and keeps them while the API is away."""

import logging
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from proxies.balance.api_client import Api
from proxies.balance.counts import Second

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
        """Returns the newest second that has ended; None: it was returned before."""
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


KEPT = 3600
"""Seconds that are kept while the API is away; older ones are dropped."""
_SENT = 120
"""Maximum number of seconds in one report."""
_ALIVE_S = 10
"""A service without requests is reported at this interval, so that the API can tell silence from a lost balancer."""
_LOGGED_EVERY_S = 60.0
_NUMBER = re.compile(r"[0-9]+")
_log = logging.getLogger(__name__)


class Reports:
    """The counts of one service that are not sent yet."""

    def __init__(
        self, api: Api, service: str, balancer: str, now: Callable[[], Mapping[str, Any] | None] = lambda: None
    ) -> None:
        """`now` returns the balancer's present state, in the form of the API."""
        self._now = now
        self._api = api
        self._service = service
        self._balancer = balancer
        self._pending: deque[Second] = deque(maxlen=KEPT)
        self._failed = False
        self._refusal = ""
        """The last refusal of the API without its numbers; empty: the last counts were accepted."""
        self._logged_s = 0.0
        """The monotonic time at which the last refusal was logged."""

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, second: Second) -> None:
        """Adds the counts of a second. Most seconds without requests are left out; they count as zero."""
        while self._pending and self._pending[-1].second >= second.second:  # The clock was far ahead, and was set back.
            self._pending.pop()
        if not second.is_empty or second.second % _ALIVE_S == 0:
            self._pending.append(second)

    async def send(self, *, urgent: bool = False) -> None:
        """Sends the pending counts. After an error they stay for the next call.

        With `urgent`, the balancer's present state is sent even if there are no counts.
        """
        while self._pending or urgent:
            urgent = False
            batch = list(self._pending)[:_SENT]
            try:
                refusal = await self._api.report(self._service, self._balancer, batch, self._now())
            except httpx.HTTPError as error:
                if not self._failed:
                    _log.warning("%s: counts are kept until the API answers: %s", self._service, error)
                self._failed = True
                return
            self._failed = False
            self._log_refusal(refusal)
            # While the report was sent, seconds may have been added, and old ones dropped because the deque was full.
            for one in batch:
                if self._pending and self._pending[0] is one:
                    self._pending.popleft()

    def _log_refusal(self, refusal: str | None) -> None:
        """Logs why the API refuses counts: at first, when the reason changes, and once a minute."""
        if refusal is None:
            self._refusal = ""
            return
        reason = _NUMBER.sub("", refusal)  # The reason contains times, so it would change each second.
        if reason != self._refusal or time.monotonic() >= self._logged_s + _LOGGED_EVERY_S:
            _log.warning("%s: the API refused counts of requests: %s", self._service, refusal)
            self._refusal, self._logged_s = reason, time.monotonic()
