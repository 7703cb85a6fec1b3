"""Limits on the calls and bytes of each machine, and on lookups of unknown keys from each address.

`proxies.gateway.connections` limits the connections of each address.
"""

import ipaddress
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from domain.addresses import network_of
from domain.token_bucket import TokenBucket
from proxies.gateway.methods import METHODS, Method
from proxies.gateway.refusals import Refused

MAX_REQUEST_BYTES = max(method.most_bytes for method in METHODS.values())
"""The transport ends calls with larger requests while it reads them."""
MAX_METADATA_BYTES = 16 << 10
MAX_CALLS = 20_000
"""Maximum number of calls in progress at one gateway, most of which are polls. Further calls are refused."""
CONNECTIONS_PER_ADDRESS = 1000
"""Usual limit on the connections of one address. Each agent has one or two, and many can be behind one address."""
MAX_STREAMS = 100
"""Maximum number of concurrent calls of one connection."""
_CALLS_PER_S, _CALLS_BURST = 50.0, 500.0
_SIGNALS_PER_S, _SIGNALS_BURST = 1.0, 60.0
"""A signal adds events to the history of the machine's workflow, and each hello is written to Postgres."""
_BYTES_PER_S, _BYTES_BURST = float(256 << 10), float(8 << 20)
"""The heartbeats of hundreds of tasks on one machine have about 100 kB every few seconds."""
_CONCURRENT_POLLS = 4
"""An agent polls once at a time. A poll of an earlier connection may be left over."""
_CONCURRENT_CALLS = 32
_LOOKUPS_PER_S, _LOOKUPS_BURST = 5.0, 50.0
_ADDRESSES = 10_000
_MAX_TEXT = 64
_PEER = re.compile(r"ipv[46]:\[?([0-9a-fA-F.:]+?)\]?:\d+")


class Buckets:
    """Token buckets by name; beyond `most`, the least recently used one is removed."""

    def __init__(
        self, rate: float, size: float, most: int = _ADDRESSES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate, self._size, self._most, self._clock = rate, size, most, clock
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def take(self, name: str, tokens: float = 1) -> bool:
        """Takes tokens from the bucket of `name`; returns False, and takes none, if it has too few."""
        now_s = self._clock()
        bucket = self._buckets.pop(name, None) or TokenBucket(self._rate, self._size, self._size, now_s)
        self._buckets[name] = bucket
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        bucket.wait_s(now_s)  # Adds the tokens gained since the last call.
        if bucket.tokens < tokens:
            return False
        bucket.tokens -= tokens
        return True

    def give_back(self, name: str) -> None:
        """Returns a token that was taken from the bucket of `name`."""
        if (bucket := self._buckets.get(name)) is not None:
            bucket.tokens += 1


class MachineLimits:
    """Counts the calls of each machine. Its agents back off and repeat a call that was refused."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls = Buckets(_CALLS_PER_S, _CALLS_BURST, clock=clock)
        self._signals = Buckets(_SIGNALS_PER_S, _SIGNALS_BURST, clock=clock)
        self._bytes = Buckets(_BYTES_PER_S, _BYTES_BURST, clock=clock)
        self._open: Counter[tuple[str, bool]] = Counter()

    @contextmanager
    def admitted(self, machine: str, method: Method) -> Iterator[None]:
        """Counts a call as in progress while the body of the `with` statement runs.

        Raises:
            Refused: the machine is over a limit.
        """
        kind = (machine, method.is_poll)
        most = _CONCURRENT_POLLS if method.is_poll else _CONCURRENT_CALLS
        if self._open[kind] >= most:
            raise _over(machine, f"{most} concurrent {'polls' if method.is_poll else 'calls'}")
        if not self._calls.take(machine):
            raise _over(machine, f"{_CALLS_PER_S:g} calls per second")
        if method.is_signal and not self._signals.take(machine):
            raise _over(machine, f"{_SIGNALS_PER_S:g} signals per second")
        self._open[kind] += 1
        try:
            yield
        finally:
            self._open[kind] -= 1
            if not self._open[kind]:
                del self._open[kind]

    def in_progress(self) -> tuple[int, int]:
        """Returns the numbers of polls and of other calls in progress."""
        polls = sum(count for (_, is_poll), count in list(self._open.items()) if is_poll)
        return polls, sum(list(self._open.values())) - polls

    def check_size(self, machine: str, method: Method, size_bytes: int) -> None:
        """Counts the bytes of a request.

        Raises:
            Refused: the request is too large for its method, or the machine is over its limit.
        """
        if size_bytes > method.most_bytes:
            name = method.request.DESCRIPTOR.name
            message = f"{name}: has {size_bytes} bytes; must have at most {method.most_bytes}"
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        if not self._bytes.take(machine, size_bytes):
            raise _over(machine, f"{_BYTES_PER_S:.0f} bytes per second")


def lookups(clock: Callable[[], float] = time.monotonic) -> Buckets:
    """Returns the limits on lookups of unknown keys by address."""
    return Buckets(_LOOKUPS_PER_S, _LOOKUPS_BURST, clock=clock)


def address_of(peer: str) -> str:
    """Returns the address in gRPC's name of a peer; for IPv6 its /64 network, within which a client can choose."""
    found = _PEER.fullmatch(peer.replace("%5B", "[").replace("%5D", "]"))
    if found is None:
        return peer[:_MAX_TEXT]
    return network_of(ipaddress.ip_address(found.group(1)))


def _over(machine: str, limit: str) -> Refused:
    return Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"machine {machine}: over the limit of {limit}; retry later")
