"""Limits on client connections: their number, in total and by address, the time to receive a request head, and the
time to send a response.
"""

import asyncio
import ipaddress
import logging
import resource
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from api.logins import network_of_text
from api.problems import HttpProblem, LimitView, ProblemType, over_limit
from infra.config.services import LimitSettings

_MESSAGE = b"no whole request came in time"
_SPARE = 64
"""Number of connections beyond the limit that still get health checks and an error response. Later ones are closed."""
_SPARE_PER_ADDRESS = 8
"""The same for connections beyond the limit of their address."""
_LINGER_S = 60.0
"""A client whose request was refused while it sends a body has this long to send the rest, at the minimum rate for
bodies. Such a client reads the response only afterwards; closing the connection earlier would lose the response."""
_OTHER_FILES = 512
"""File descriptors that a process needs besides connections: for Postgres, Temporal, object stores and archives."""
_HEALTH = frozenset({"/healthz", "/readyz"})
_FULL = b"too many connections"  # `infra.stack.probes` takes this answer as a sign of life.
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(_FULL), _FULL)
)
_log = logging.getLogger(__name__)


class _StallTimeout(asyncio.Protocol):
    """Mixin that closes the connection of a client that does not read. List it before uvicorn's protocol class."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    write_stall_s: ClassVar[float]
    """Seconds after which a connection is closed if the client reads nothing."""
    _stalled: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client reads more slowly than the data is written."""
        super().pause_writing()
        # `close` would wait until the buffered data is sent.
        self._stalled = self.loop.call_later(self.write_stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class BoundedProtocol(_StallTimeout, H11Protocol):
    """Uvicorn's protocol with timeouts: without them it waits forever for a request head and for a stalled client.

    The timeout for the head runs whenever no request is being answered; receiving data does not reset it. `api.bodies`
    limits the time for bodies.
    """

    most: ClassVar[int]
    most_per_address: ClassVar[int]
    trusted: ClassVar[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]]
    """Proxies, whose connections are not limited by address."""
    by_address: ClassVar[Counter[str]]
    """The number of open connections of each address."""
    _address: str | None = None
    """The address to whose limit the connection counts."""
    header_timeout_s: ClassVar[float]
    body_bytes_per_s: ClassVar[float]
    _timer: asyncio.TimerHandle | None = None
    _came_bytes = 0
    """Bytes received since the timer was set."""
    _refused_s = 0.0
    """When the last response was complete, on the event loop's clock."""
    is_refused = False
    """Whether the connection is beyond a limit."""
    _is_upgraded = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        own = self._count(transport)
        if len(self.connections) > self.most + _SPARE or own > self.most_per_address + _SPARE_PER_ADDRESS:
            self._uncount()
            transport.write(_REFUSAL)
            transport.close()
            return
        self.is_refused = own > self.most_per_address or len(self.connections) > self.most
        if own > self.most_per_address:
            self.app = _full(self.app, _too_many(self._address or "", self.most_per_address))
        elif len(self.connections) > self.most:
            self.app = _full(self.app, _too_many_in_total(self.most))
        self._watch()

    def _count(self, transport: asyncio.Transport) -> int:
        """Counts the connection for its address; returns the number of connections of that address, 0 for a proxy."""
        peer = transport.get_extra_info("peername")
        text = str(peer[0]) if isinstance(peer, tuple) and peer else "unknown"
        try:
            address = ipaddress.ip_address(text.partition("%")[0])
        except ValueError:
            address = None
        if address is not None and any(address in network for network in self.trusted):
            return 0
        self._address = network_of_text(text)
        self.by_address[self._address] += 1
        return self.by_address[self._address]

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._came_bytes += len(data)
        super().data_received(data)
        self._watch()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """See `H11Protocol`. The connection still counts; its timeouts are those of `BoundedWebSocket`."""
        if self.is_refused:
            self.transport.write(_REFUSAL)
            self.transport.close()
            return
        super().handle_websocket_upgrade(event)
        upgraded = self.transport.get_protocol()
        assert isinstance(upgraded, BoundedWebSocket)
        upgraded.on_lost = self._uncount
        self._is_upgraded = True

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        super().on_response_complete()
        self._refused_s = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self._uncount()
        self._stop()
        self.resume_writing()

    def _uncount(self) -> None:
        """Stops counting the connection. A refused one is uncounted before it is closed, which may take a while."""
        self.connections.discard(self)
        if self._address is not None:
            self.by_address[self._address] -= 1
            if not self.by_address[self._address]:
                del self.by_address[self._address]
            self._address = None

    def _watch(self) -> None:
        if self._is_upgraded or (self.cycle is not None and not self.cycle.response_complete):
            self._stop()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.header_timeout_s, self._late)
            self._came_bytes = 0

    @property
    def _is_sending(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def timeout_keep_alive_handler(self) -> None:
        """See `H11Protocol`: a connection that is receiving the rest of a body is not idle."""
        if not self._is_sending:
            super().timeout_keep_alive_handler()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        quick = self._came_bytes >= self.body_bytes_per_s * self.header_timeout_s
        if self._is_sending and quick and self.loop.time() - self._refused_s < _LINGER_S:
            self._watch()
            return
        if self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
            answer: list[Any] = [
                h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"),
                h11.Data(data=_MESSAGE),
                h11.EndOfMessage(),
            ]
            for event in answer:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class BoundedWebSocket(_StallTimeout, WebSocketsSansIOProtocol):
    """Uvicorn's WebSocket protocol with a timeout for peers that do not read. Pings detect lost peers."""

    on_lost: Callable[[], None] | None = None
    """Called when the connection is closed."""

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.resume_writing()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()


def websocket_protocol(limits: LimitSettings) -> type[BoundedWebSocket]:
    """Returns the protocol class for `uvicorn.Config(ws=...)` with the given limits."""
    return type("WebSocketProtocol", (BoundedWebSocket,), {"write_stall_s": limits.write_stall_s})


def _too_many_in_total(most: int) -> HttpProblem:
    return HttpProblem(
        ProblemType.BUSY,
        f"{most} connections are open, the maximum (limits.connections); retry when some of them are closed",
        headers={"Retry-After": "1", "Connection": "close"},
        limit=LimitView(name="limits.connections", value=most),
    )


def _too_many(address: str, most: int) -> HttpProblem:
    problem = over_limit(
        "connections_per_address", most, f"{address} has {most} connections; close some of them, or reuse them", 1
    )
    problem.headers = {**(problem.headers or {}), "Connection": "close"}
    return problem


def _full(app: Any, problem: HttpProblem) -> ASGIApp:
    """Returns the application for a connection beyond a limit: health checks go to `app`, all else gets `problem`."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _HEALTH:
            await app(scope, receive, send)
        else:
            await problem.response()(scope, receive, send)

    return answer


def _allowed(wanted: int) -> int:
    """Returns the number of connections, at most `wanted`, for which the process has enough file descriptors.

    Raises the process's soft limit of open files if necessary.
    """
    needed = wanted + _SPARE + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            found = max(1, soft - _SPARE - _OTHER_FILES)
            _log.warning(
                "limits.connections is %d, but the process can open %d files (ulimit -n): it serves %d connections",
                wanted, soft, found,
            )  # fmt: skip
            return found
    return wanted


def protocol(limits: LimitSettings, trusted_proxies: Iterable[str] = ()) -> type[BoundedProtocol]:
    """Returns the protocol class for `uvicorn.Config(http=...)` with the given limits.

    `trusted_proxies`: addresses and networks whose connections are not limited by address.
    """
    bounds = {
        "most": _allowed(limits.connections),
        "most_per_address": limits.connections_per_address,
        "trusted": tuple(ipaddress.ip_network(proxy) for proxy in trusted_proxies),
        "by_address": Counter[str](),
        "header_timeout_s": limits.header_timeout_s,
        "body_bytes_per_s": limits.body_bytes_per_s,
        "write_stall_s": limits.write_stall_s,
    }
    return type("Protocol", (BoundedProtocol,), bounds)
