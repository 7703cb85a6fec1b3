"""Rate limit of failed logins for each client address. Successful logins do not count."""

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.types import Scope

from domain.addresses import network_of
from domain.token_bucket import TokenBucket

ADDRESSES = 10_000
"""Maximum number of stored addresses; beyond it, the address with the least recent failure is removed."""
_MAX_TEXT = 64


def address_of(scope: Scope) -> str:
    """Returns the client's address; for IPv6 its /64 network, within which a client can choose its address.

    If the client is a proxy in `api.trusted_proxies`, uvicorn has replaced the address in `scope` with the one from
    `X-Forwarded-For`.
    """
    client = scope.get("client")
    return network_of_text(str(client[0]) if client else "unknown")


def network_of_text(text: str) -> str:
    """Returns `domain.addresses.network_of` of an address; of another text its beginning."""
    try:
        return network_of(ipaddress.ip_address(text.partition("%")[0]))
    except ValueError:
        return text[:_MAX_TEXT]


class FailedLogins:
    """Counts failed logins by address and allows `rate` per second with bursts of `burst`.

    Must be used from one event loop only.
    """

    def __init__(
        self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic, addresses: int = ADDRESSES
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._most = addresses
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of stored addresses."""
        return len(self._buckets)

    def is_over(self, address: str) -> bool:
        """Returns whether the address has exceeded its limit of failed logins."""
        bucket = self._buckets.get(address)
        return bucket is not None and bucket.wait_s(self._clock()) > 0

    def count(self, address: str) -> float:
        """Counts a failed login. Returns 0 if it is within the limit, else the seconds until the next one would be."""
        now_s = self._clock()
        bucket = self._buckets.setdefault(address, TokenBucket(self._rate, self._burst, self._burst, now_s))
        self._buckets.move_to_end(address)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        wait_s = bucket.wait_s(now_s)
        if wait_s == 0:
            bucket.tokens -= 1
        return wait_s
