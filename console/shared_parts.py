"""Concurrent requests for the same part of a page, with the same rights, share one response.

After a change, every open page requests its part. The first request is answered at once. Requests that arrive meanwhile
share the next response, whose computation begins after their arrival, so it is as new as a response of their own.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import caller_of, is_below
from console.pages import PART, TOP

Key = tuple[object, ...]


@dataclass
class PartAnswer:
    """A response that was collected."""

    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""


class Rounds:
    """Computes a response once for concurrent callers with the same key. Not thread-safe: for one event loop."""

    def __init__(self) -> None:
        self._running: dict[Key, asyncio.Task[PartAnswer]] = {}
        self._following: dict[Key, asyncio.Task[PartAnswer]] = {}

    async def answer(self, key: Key, compute: Callable[[], Awaitable[PartAnswer]]) -> PartAnswer:
        """Returns a response whose computation begins after this call, by `compute` of a caller with the same key."""
        running = self._running.get(key)
        if running is None:
            task = self._running[key] = asyncio.create_task(self._round(key, compute))
        elif key in self._following:
            task = self._following[key]
        else:
            task = self._following[key] = asyncio.create_task(self._next_round(running, key, compute))
        return await asyncio.shield(task)

    async def _next_round(
        self, running: asyncio.Task[PartAnswer], key: Key, compute: Callable[[], Awaitable[PartAnswer]]
    ) -> PartAnswer:
        await asyncio.wait([running])
        self._running[key] = self._following.pop(key)
        return await self._round(key, compute)

    async def _round(self, key: Key, compute: Callable[[], Awaitable[PartAnswer]]) -> PartAnswer:
        try:
            return await compute()
        finally:
            if self._running.get(key) is asyncio.current_task():
                del self._running[key]


class SharedParts:
    """ASGI middleware for the parts of pages under `/console`, for callers that have logged in."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._rounds = Rounds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        caller = caller_of(scope) if scope["type"] == "http" and is_below(scope["path"], TOP) else None
        if caller is None or scope["method"] != "GET" or PART not in (headers := Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        key = (caller.role, caller.tenant, caller.machine, scope["path"], scope["query_string"])
        found = await self._rounds.answer(key, lambda: self._computed(scope))
        sent, body = found.headers, found.body
        status, etag = found.status, Headers(raw=sent).get("etag")
        if status == 200 and etag is not None and headers.get("if-none-match") == etag:
            status, body = 304, b""
            shorter = MutableHeaders(raw=list(sent))
            del shorter["content-length"], shorter["content-type"]
            sent = shorter.raw
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": body})

    async def _computed(self, scope: Scope) -> PartAnswer:
        """Returns the whole part, even if the browser of the request already has this version."""
        kept = [(name, value) for name, value in scope["headers"] if name != b"if-none-match"]
        answer = PartAnswer()

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.status, answer.headers = message["status"], list(message["headers"])
            elif message["type"] == "http.response.body":
                answer.body += message.get("body", b"")

        await self._app({**scope, "headers": kept}, receive, send)
        return answer
