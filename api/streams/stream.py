"""An answer that goes on: it ends, and frees what it holds, as soon as its client is gone."""

from collections.abc import AsyncGenerator, Callable

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api import limits


class Stream(StreamingResponse):
    """A streaming answer whose generator is closed at the end, whatever the end is.

    `release` is called at the end.
    """

    def __init__(self, content: AsyncGenerator[bytes, None], media_type: str, release: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers, media_type=media_type)
        self._generator = content
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See `StreamingResponse`."""
        limits.release(scope)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()

    async def stream_response(self, send: Send) -> None:
        """See `StreamingResponse`."""
        try:
            await super().stream_response(send)
        finally:
            # A cancelled `send` leaves the generator where it yielded; its blocks end here and not at some later time.
            await self._generator.aclose()
