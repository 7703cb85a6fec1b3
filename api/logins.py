"""Failed logins by client address: a limit for each address, which keys that are right do not count towards."""

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.types import Scope

from domain.token_bucket import TokenBucket

ADDRESSES = 10_000
"""Addresses that are remembered at most; beyond, the one that failed least recently is forgotten."""
_MAX_TEXT = 64
_IPV6_PREFIX = 64


def address_of(scope: Scope) -> str:
    """The client's address. For IPv6 its network of 64 bits, within which a client may choose addresses.

    A proxy's `X-Forwarded-For` counts where `api.trusted_proxies` names the proxy; then the server has put that address
    into `scope`.
    """
    client = scope.get("client")
    text = str(client[0]) if client else "unknown"
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return text[:_MAX_TEXT]
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((int(found), _IPV6_PREFIX), strict=False))
    return str(found)


class FailedLogins:
    """Counts failed logins by address: `rate` per second on average, `burst` at once. Used from one event loop."""

    def __init__(
        self, rate: float, burst: int, clock: Callable[[], float] = time.monotonic, addresses: int = ADDRESSES
    ) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._most = addresses
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        """How many addresses are remembered."""
        return len(self._buckets)

    def is_over(self, address: str) -> bool:
        """Whether the address has used up what it may fail."""
        bucket = self._buckets.get(address)
        return bucket is not None and bucket.wait_s(self._clock()) > 0

    def count(self, address: str) -> float:
        """Counts a failed login; seconds until the next one is within the limit, 0 if this one is."""
        now_s = self._clock()
        bucket = self._buckets.setdefault(address, TokenBucket(self._rate, self._burst, self._burst, now_s))
        self._buckets.move_to_end(address)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        wait_s = bucket.wait_s(now_s)
        if wait_s == 0:
            bucket.tokens -= 1
        return wait_s
