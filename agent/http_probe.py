"""Sends one HTTP request of a readiness probe. The server is a user's task, so it may respond with anything."""

import asyncio
import os
from collections.abc import Iterable
from math import isfinite
from typing import NamedTuple
from urllib.parse import quote

import h11

from domain.serving_spec import LOAD_HEADER, ProbeSpec

_CHUNK_BYTES = 16 << 10
_RESPONSE_BYTES = 128 << 10
"""A response is read up to this size and discarded. Of a longer response, only the status counts."""
_HEADERS_BYTES = 32 << 10
_WORDS = 200
"""Maximum length of an error."""


class ProbeResult(NamedTuple):
    """The result of one probe."""

    error: str | None
    """Why the task is not ready, in at most 200 characters; None: it is ready."""
    load: float | None = None
    """The load that a ready task reports in the header `LOAD_HEADER`; None: it reports none."""


async def probe(address: str, port: int, spec: ProbeSpec) -> ProbeResult:
    """Sends the request of a probe.

    A status of 2xx or 3xx means ready; redirects are not followed. The error has no text from the response, and of the
    request only the path: both may contain secrets.
    """
    try:
        async with asyncio.timeout(spec.timeout_s):
            status, load = await _ask(address, port, spec)
    except TimeoutError:
        problem = f"no complete response within {spec.timeout_s:g} s"
    except h11.LocalProtocolError:
        problem = "path or headers of the request are not valid in HTTP"
    except h11.RemoteProtocolError:
        problem = "the response is not valid HTTP/1.1"
    except (OSError, UnicodeError) as error:  # UnicodeError: the address is not a valid host name.
        code = error.errno if isinstance(error, OSError) else None
        problem = os.strerror(code).lower() if code is not None and code > 0 else f"cannot connect to {address}"
    else:
        if status is not None and 200 <= status < 400:
            return ProbeResult(None, load)
        problem = f"status {status}" if status is not None else f"its first {_RESPONSE_BYTES} bytes contain no status"
    method = "GET" if spec.body is None else "POST"
    path = spec.path.partition("?")[0]
    return ProbeResult(f"{method} {path[: _WORDS // 2]} on port {port}: {problem}"[:_WORDS])


async def _ask(address: str, port: int, spec: ProbeSpec) -> tuple[int | None, float | None]:
    """Returns the status of the response and its load, after it has been read to its end or to `_RESPONSE_BYTES`.

    The status is None if the first `_RESPONSE_BYTES` bytes contain no status.
    """
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEADERS_BYTES)
    request = _request(connection, f"{address}:{port}", spec)
    reader, writer = await asyncio.open_connection(address, port, limit=_CHUNK_BYTES)
    try:
        writer.write(request)
        await writer.drain()
        status, load = None, None
        received = 0
        while received < _RESPONSE_BYTES:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(_CHUNK_BYTES)
                received += len(data)
                connection.receive_data(data)
            elif isinstance(event, h11.Response):
                status, load = event.status_code, _load(event.headers)
            elif event is h11.PAUSED or isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                break
        return status, load
    finally:
        writer.transport.abort()


def _load(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Returns the load that a response reports; None: it has no such header, or no number of 0 or more in it."""
    text = next((value for name, value in headers if name == LOAD_HEADER.lower().encode()), b"")
    try:
        load = float(text)
    except ValueError:
        return None
    return load if isfinite(load) and load >= 0 else None


def _request(connection: h11.Connection, host: str, spec: ProbeSpec) -> bytes:
    """Returns the bytes of the request.

    Raises:
        h11.LocalProtocolError: the path or a header is invalid.
    """
    body = b"" if spec.body is None else spec.body.encode(errors="replace")
    headers = {"host": host, "user-agent": "mizzen", "accept": "*/*"}
    if spec.body is not None:
        headers["content-type"] = "application/json"
    headers |= {name.lower(): value for name, value in spec.headers.items()}
    headers |= {"connection": "close"}
    if spec.body is not None:
        headers |= {"content-length": str(len(body))}
    try:
        encoded = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
    except UnicodeEncodeError:
        raise h11.LocalProtocolError("a header has characters that HTTP does not allow") from None
    target = quote(spec.path, safe="/?&=%:@!$'()*+,;~[]")
    events = [
        h11.Request(method="GET" if spec.body is None else "POST", target=target, headers=encoded),
        *([h11.Data(data=body)] if body else []),
        h11.EndOfMessage(),
    ]
    return b"".join(filter(None, map(connection.send, events)))
