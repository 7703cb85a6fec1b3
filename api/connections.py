"""Connections whose client neither sends nor reads: each has a bounded time for a request's head, and for an answer."""

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from infra.config import LimitSettings

_MESSAGE = b"no whole request came in time"


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol, which by itself waits for ever for the rest of a request's head and for a client that stalls.

    The time for the head counts while no request is being answered, whatever trickles in. Bodies are bounded elsewhere
    (`api.bodies`).
    """

    header_timeout_s: ClassVar[float]
    write_stall_s: ClassVar[float]
    _timer: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """See `H11Protocol`."""
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        super().connection_lost(exc)
        self._stop()
        self.resume_writing()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`: the client reads slower than the answer comes."""
        super().pause_writing()
        # Closing would wait for what is not sent yet.
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

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
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


def protocol(limits: LimitSettings) -> type[BoundedProtocol]:
    """The protocol for `uvicorn.Config(http=...)`, with the times of `limits`."""
    times = {"header_timeout_s": limits.header_timeout_s, "write_stall_s": limits.write_stall_s}
    return type("Protocol", (BoundedProtocol,), times)
