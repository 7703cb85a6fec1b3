"""A stream that tells the browser that something has changed, and that its login has ended. It contains nothing else.

The tabs of a browser share one stream, because a browser opens only six connections to a host.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import suppress

from fastapi import Request, Response

from api.auth import Caller, caller_of
from api.problems import HttpProblem
from api.routing import Router
from api.state import ApiState, StateOf
from api.streams.events import MEDIA_TYPE
from api.streams.stream import Stream
from console.cookies import secret_of
from console.pages import TOP
from infra.db.console_sessions import hash_secret

router = Router(prefix=TOP, include_in_schema=False)
_CHECK_S = 4.0
"""Interval at which the login is checked."""
_PAUSE_S = 2.0
"""Shortest time between two messages."""
_IDLE_S = 30.0
"""Longest time between two messages, because pages show relative times, and queue positions that change silently."""
_ENDED = b"event: ended\ndata:\n\n"


@router.get("/changes")
async def changes(request: Request, state: StateOf) -> Response:
    """Streams `changed` and `ended` as server-sent events."""
    caller, secret = caller_of(request.scope), secret_of(request.scope)
    if caller is None or secret is None:
        return Response(_ENDED, media_type=MEDIA_TYPE)
    release = state.hub.admit(caller, waits=True, is_browser=True)
    return Stream(_changes(state, caller, hash_secret(secret)), MEDIA_TYPE, release)


async def _changes(state: ApiState, caller: Caller, sha256: str) -> AsyncGenerator[bytes, None]:
    # A database that does not answer ends the stream; the browser then opens it again.
    with suppress(HttpProblem), state.hub.register(caller, None, caller.tenant, waits=True) as follower:
        yield b"retry: 2000\n\n"
        told_s = checked_s = time.monotonic()
        has_changed = False
        while await follower.wait(0.0 if has_changed else _CHECK_S):
            now_s = time.monotonic()
            has_changed = has_changed or follower.was_told or now_s - told_s >= _IDLE_S
            if now_s - checked_s >= _CHECK_S:
                checked_s = now_s
                if await state.logins.of_browser(sha256) is None:
                    break
            if has_changed and now_s - told_s >= _PAUSE_S:
                yield b"event: changed\ndata:\n\n"
                told_s, has_changed = now_s, False
            elif has_changed:
                await follower.pause(told_s + _PAUSE_S - now_s)
        if follower.is_revoked or await state.logins.of_browser(sha256) is None:
            yield _ENDED
