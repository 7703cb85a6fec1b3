"""Forwards the messages of one session between its client and its agent, and counts them.

A message is read from one side only after the previous one was sent to the other side. So a slow side slows down the
other side, and the process holds at most one message per direction.
"""

import asyncio
import contextlib
import hmac
import time
from collections.abc import Awaitable
from typing import Any

from sqlalchemy import Engine
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from api.sessions.session_rows import OpenedSession, hash_of, reason_of, refusal_of
from infra.config.services import LimitSettings
from infra.db.session import in_db
from mizzen_client.tunnel.frames import BadFrame, FrameKind, control, unpack

ANSWER_S = 45.0
"""How long the agent may take to join. The session's workflow gives up earlier, and records why."""
_LOOK_S = 0.3
_RECORDED_S = 3.0
_MAX_WORDS = 1000
BEGIN_S = 10.0
"""How long the client may take to send its first message."""
_AWAY = (WebSocketDisconnect, RuntimeError)
_COMPLETED = asyncio.FIRST_COMPLETED


class SessionEnd(Exception):
    """Ends a session. The message says why, for the user and the audit log."""


class Relay:
    """A session whose client is connected to this process."""

    def __init__(self, engine: Engine, opened: OpenedSession, client: WebSocket, limits: LimitSettings) -> None:
        self._engine = engine
        self.opened = opened
        self.ended = asyncio.Event()
        """Set when the agent's connection is no longer needed."""
        self.agent_sha256: str | None = None
        self.from_client = 0
        """Total size of the client's messages, in bytes."""
        self.from_agent = 0
        self.exit_code: int | None = None
        """Exit status of the command, as the agent reports it."""
        self._client = client
        self._limits = limits
        self._agent: asyncio.Future[WebSocket] = asyncio.get_running_loop().create_future()
        self._stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._active_s = time.monotonic()
        self._has_exited = False
        self._was_closed = False
        """Whether the agent has ended the session."""

    def stop(self, why: str) -> None:
        """Ends the session."""
        if not self._stopped.done():
            self._stopped.set_result(why)

    def admits(self, token: str) -> bool:
        """Returns whether a token is the agent's and has not been used before."""
        if self.agent_sha256 is None or not hmac.compare_digest(self.agent_sha256, hash_of(token)):
            return False
        self.agent_sha256 = None
        return True

    def join(self, agent: WebSocket) -> None:
        """Connects the agent."""
        self._agent.set_result(agent)

    async def first(self) -> bytes | str:
        """Returns the client's first message.

        Raises:
            SessionEnd: the client sends none.
        """
        try:
            async with asyncio.timeout(BEGIN_S):
                return await _message(self._client)
        except TimeoutError:
            raise SessionEnd(f"the client has sent nothing within {BEGIN_S:g} s") from None
        except _AWAY:
            raise SessionEnd("the client has disconnected") from None

    async def run(self, begin: bytes) -> str:
        """Waits for the agent, and forwards until the end. Returns why the session has ended.

        `begin` is the first message for the agent.
        """
        early = asyncio.create_task(_message(self._client))
        works: list[asyncio.Task[None]] = []
        try:
            agent = await self._joined(early)
            await agent.send_bytes(begin)
            works = [
                asyncio.create_task(self._to_agent(agent, early)),
                asyncio.create_task(self._to_client(agent)),
                asyncio.create_task(self._watch()),
            ]
            waited: set[asyncio.Future[Any]] = {*works, self._stopped}
            await asyncio.wait(waited, return_when=_COMPLETED)
            for work in list(works):
                if work.done():
                    work.result()  # Each of these tasks ends by raising the reason as an exception.
            why = self._stopped.result()
        except (SessionEnd, BadFrame) as end:
            why = str(end)
        finally:
            for one in (early, *works):
                one.cancel()
            await asyncio.wait([early, *works])
            self.ended.set()
        if not self._has_exited:
            if self._was_closed and (reason := await self._reason()):
                why = f"{why}: {reason}"
            await say_closed(self._client, why)
        return why

    async def _reason(self) -> str | None:
        """Returns why the task was stopped. The control plane may record it later than the agent reports the stop."""
        give_up_s = time.monotonic() + _RECORDED_S
        while (reason := await in_db(self._engine, reason_of, self.opened)) is None and time.monotonic() < give_up_s:
            await asyncio.sleep(_LOOK_S)
        return reason

    async def _joined(self, early: "asyncio.Task[bytes | str]") -> WebSocket:
        give_up_s = time.monotonic() + ANSWER_S
        while not self._agent.done():
            waited: set[asyncio.Future[Any]] = {self._agent, self._stopped, *([] if early.done() else [early])}
            await asyncio.wait(waited, timeout=_LOOK_S, return_when=_COMPLETED)
            if self._stopped.done():
                raise SessionEnd(self._stopped.result())
            if early.done() and early.exception() is not None:
                raise SessionEnd("the client has disconnected")
            if not self._agent.done():
                if (why := await in_db(self._engine, refusal_of, self.opened.id)) is not None:
                    raise SessionEnd(why)
                if time.monotonic() > give_up_s:
                    raise SessionEnd(
                        f"the agent of {self.opened.machine} has not joined within {ANSWER_S:g} s: the agent got no"
                        " request, or does not answer"
                    )
        return self._agent.result()

    async def _to_agent(self, agent: WebSocket, early: "asyncio.Task[bytes | str]") -> None:
        reading: Awaitable[bytes | str] = early
        while True:
            try:
                message = await reading
            except _AWAY:
                raise SessionEnd("the client has disconnected") from None
            frame = unpack(message)
            if frame.kind is FrameKind.CONTROL and frame.message().get("type") not in ("resize", "signal"):
                raise BadFrame("the client has sent an unknown message")
            self.from_client += len(message)
            self._count()
            await _send(agent, message, self._lost)
            reading = _message(self._client)

    async def _to_client(self, agent: WebSocket) -> None:
        while True:
            try:
                message = await _message(agent)
            except _AWAY:
                raise SessionEnd(self._lost) from None
            frame = unpack(message)
            self.from_agent += len(message)
            self._count()
            said = frame.message() if frame.kind is FrameKind.CONTROL else {}
            if said.get("type") == "closed":
                self._was_closed = True
                raise SessionEnd(str(said.get("because") or "the agent has ended the session")[:_MAX_WORDS])
            await _send(self._client, message, "the client has disconnected")
            if said.get("type") == "exit":
                code = said.get("code")
                self.exit_code = code if isinstance(code, int) else None
                self._has_exited = True
                raise SessionEnd("the command has ended")

    def _count(self) -> None:
        self._active_s = time.monotonic()
        if self.from_client + self.from_agent > self._limits.session_bytes:
            raise SessionEnd(
                f"the session has transferred {self._limits.session_bytes} bytes, the maximum (limits.session_bytes)"
            )

    async def _watch(self) -> None:
        """Ends the session when it is idle for too long, or too long altogether."""
        limits, began_s = self._limits, time.monotonic()
        while True:
            idle_left_s = self._active_s + limits.session_idle_s - time.monotonic()
            left_s = began_s + limits.session_s - time.monotonic()
            if idle_left_s <= 0:
                raise SessionEnd(f"no byte was sent for {limits.session_idle_s:g} s (limits.session_idle_s)")
            if left_s <= 0:
                raise SessionEnd(f"the session has lasted {limits.session_s:g} s, the maximum (limits.session_s)")
            await asyncio.sleep(min(idle_left_s, left_s))

    @property
    def _lost(self) -> str:
        return f"the connection of the agent of {self.opened.machine} was lost: the agent or the network has failed"


async def say_closed(websocket: WebSocket, why: str) -> None:
    """Tells a client why its session ends, if it is still there."""
    with contextlib.suppress(*_AWAY):
        await websocket.send_bytes(control("closed", because=why))


async def close(websocket: WebSocket) -> None:
    """Closes a connection, if it is open."""
    if websocket.client_state is WebSocketState.CONNECTED:
        with contextlib.suppress(*_AWAY):
            await websocket.close()


async def _message(websocket: WebSocket) -> bytes | str:
    """Returns the next message of the connection.

    Raises:
        WebSocketDisconnect, RuntimeError: the connection is closed.
    """
    received = await websocket.receive()
    if received["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(received.get("code") or 1006)
    found: bytes | str = received["bytes"] if received.get("bytes") is not None else received["text"]
    return found


async def _send(websocket: WebSocket, message: bytes | str, lost: str) -> None:
    try:
        await websocket.send_bytes(message if isinstance(message, bytes) else message.encode())
    except _AWAY:
        raise SessionEnd(lost) from None
