"""Sends the counts of a service's requests to the API, and keeps them while the API is away."""

import logging
from collections import deque

import httpx

from balance.counts import Second
from balance.following import Api

KEPT = 3600
"""Seconds that are kept while the API is away; older ones are dropped."""
_SENT = 120
"""Most seconds in one report."""
_ALIVE_S = 10
"""A service without requests is reported at this interval, so that the API can tell silence from a lost balancer."""
_log = logging.getLogger(__name__)


class Reports:
    """The counts of one service that are not sent yet."""

    def __init__(self, api: Api, service: str, balancer: str) -> None:
        self._api = api
        self._service = service
        self._balancer = balancer
        self._pending: deque[Second] = deque(maxlen=KEPT)
        self._failed = False

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, second: Second) -> None:
        """Adds the counts of a second. Most seconds without requests are left out; they count as zero."""
        if not second.is_empty or second.second % _ALIVE_S == 0:
            self._pending.append(second)

    async def send(self) -> None:
        """Sends the pending counts. After an error they stay for the next call."""
        while self._pending:
            batch = list(self._pending)[:_SENT]
            try:
                await self._api.report(self._service, self._balancer, batch)
            except httpx.HTTPError as error:
                if not self._failed:
                    _log.warning("%s: counts are kept until the API answers: %s", self._service, error)
                self._failed = True
                return
            self._failed = False
            # While the report was sent, seconds may have been added, and old ones dropped because the deque was full.
            while self._pending and self._pending[0].second <= batch[-1].second:
                self._pending.popleft()
