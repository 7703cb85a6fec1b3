"""Limits on client connections: their number, the time to receive a request head, and the time to send a response."""

import asyncio
import logging
import resource
from typing import Any, ClassVar

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.problems import Kind, LimitView, Problem
from infra.config import LimitSettings

_MESSAGE = b"no whole request came in time"
_SPARE = 64
"""Number of connections beyond the limit that still get health checks and an error response. Later ones are closed."""
_LINGER_S = 60.0
"""A client whose request was refused while it sends a body has this long to send the rest, at the minimum rate for
bodies. Such a client reads the response only afterwards; closing the connection earlier would lose the response."""
_OTHER_FILES = 512
"""File descriptors that a process needs besides connections: for Postgres, Temporal, object stores and archives."""
_HEALTH = frozenset({"/healthz", "/readyz"})
_FULL = b"too many connections"
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(_FULL), _FULL)
)
_log = logging.getLogger(__name__)


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol with timeouts: without them it waits forever for a request head and for a stalled client.

    The timeout for the head runs whenever no request is being answered; receiving data does not reset it. `api.bodies`
    limits the time for bodies.
    """

    most: ClassVar[int]
    header_timeout_s: ClassVar[float]
    write_stall_s: ClassVar[float]
    body_bytes_per_s: ClassVar[float]
    _timer: asyncio.TimerHandle | None = None
    _came_bytes = 0
    """Bytes received since the timer was set."""
    _refused_s = 0.0
    """When the last response was complete, on the event loop's clock."""
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > self.most + _SPARE:
            transport.write(_REFUSAL)
            transport.close()
            return
        if len(self.connections) > self.most:
            self.app = _full(self.app, self.most)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._came_bytes += len(data)
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        super().on_response_complete()
        self._refused_s = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self._stop()
        self.resume_writing()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client reads more slowly than the response is written."""
        super().pause_writing()
        # `close` would wait until the buffered data is sent.
        self._stalled = self.loop.call_later(self.write_stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
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


def _full(app: Any, most: int) -> ASGIApp:
    """Returns the application for a connection beyond the limit: health checks go to `app`, all else gets 503."""
    problem = Problem(
        Kind.BUSY,
        f"{most} connections are open, the maximum (limits.connections); retry when some of them are closed",
        headers={"Retry-After": "1", "Connection": "close"},
        limit=LimitView(name="limits.connections", value=most),
    )

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


def protocol(limits: LimitSettings) -> type[BoundedProtocol]:
    """Returns the protocol class for `uvicorn.Config(http=...)` with the given limits."""
    bounds = {
        "most": _allowed(limits.connections),
        "header_timeout_s": limits.header_timeout_s,
        "body_bytes_per_s": limits.body_bytes_per_s,
        "write_stall_s": limits.write_stall_s,
    }
    return type("Protocol", (BoundedProtocol,), bounds)
