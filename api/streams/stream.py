"""A streaming response that releases its resources as soon as its client disconnects."""

from collections.abc import AsyncGenerator, Callable

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api import limits


class Stream(StreamingResponse):
    """A streaming response that always closes its generator at the end and then calls `release`."""

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

    async def read(self, most: int) -> tuple[bytes, bool]:
        """Instead of sending the content, returns its first `most` bytes or slightly more, and whether that is all."""
        content = b""
        try:
            async for part in self._generator:
                content += part
                if len(content) >= most:
                    return content[:most], False
            return content, True
        finally:
            await self._generator.aclose()
            self._release()

    async def stream_response(self, send: Send) -> None:
        """See `StreamingResponse`."""
        try:
            await super().stream_response(send)
        finally:
            # A cancelled `send` leaves the generator suspended; closing it runs its `finally` blocks immediately.
            await self._generator.aclose()
