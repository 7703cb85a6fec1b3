"""Opens the outgoing connection of a session."""

import json
import ssl
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidHandshake, InvalidStatus

from mizzen_client.tunnel.frames import MAX_FRAME_BYTES

_OPEN_S = 10.0
_LOCAL = ("localhost", "127.0.0.1", "::1")


class CannotConnect(Exception):
    """The connection was refused, or could not be made. The message says why."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status` is the status of the HTTP response; None: there was no response."""
        super().__init__(message)
        self.status = status


class _Connect(connect):
    """Follows no redirects: with some versions of the library, the token would be sent to the other server."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


async def dial(
    url: str, path: str, token: str, *, tls: ssl.SSLContext | None = None, headers: dict[str, str] | None = None
) -> ClientConnection:
    """Connects to a server of sessions, with a token as bearer. `url` is the base, with the scheme http or https.

    Raises:
        CannotConnect: the server refuses, or does not answer.
    """
    parts = urlsplit(url)
    scheme = "wss" if parts.scheme == "https" else "ws"
    try:
        return await _Connect(
            f"{scheme}://{parts.netloc}{parts.path.rstrip('/')}{path}",
            additional_headers={"authorization": f"Bearer {token}", **(headers or {})},
            compression=None,
            open_timeout=_OPEN_S,
            max_size=MAX_FRAME_BYTES,
            # A proxy cannot reach services on this machine.
            proxy=None if parts.hostname in _LOCAL else True,
            ssl=None if scheme == "ws" else tls or ssl.create_default_context(),
        )
    except InvalidStatus as error:
        raise CannotConnect(_detail(error), error.response.status_code) from None
    except (OSError, InvalidHandshake, TimeoutError) as error:
        raise CannotConnect(str(error) or type(error).__name__) from None


def _detail(error: InvalidStatus) -> str:
    """Returns the server's message about a refused connection."""
    try:
        return str(json.loads(error.response.body or b"")["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {error.response.status_code}"
