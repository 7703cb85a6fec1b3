"""Small HTTP requests to a metadata server, with one time limit for the whole answer. No proxies, no redirects."""

import http.client
import io
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

LINK_LOCAL = "http://169.254.169.254"
"""Where AWS, GCP and Azure have theirs."""

TIMEOUT_S = 2.0
MAX_BYTES = 65536


class MetadataError(OSError):
    """A metadata server that does not answer, or not as its platform documents."""


@dataclass(frozen=True)
class Answer:
    """A whole answer. `headers` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    text: str


class _Received:
    """What `http.client` takes for a socket: the bytes that came."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


class Metadata:
    """The server at a base address."""

    def __init__(self, base: str, timeout_s: float = TIMEOUT_S) -> None:
        """Nothing is sent yet.

        Args:
            base: `http://host[:port][/prefix]`.
            timeout_s: for connecting and the whole answer together.

        Raises:
            ValueError: `base` is not such an address.
        """
        parts = urlsplit(base)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme != "http" or not parts.hostname or port == -1 or parts.query or parts.username:
            raise ValueError(f"metadata address {base!r}: must be http://host[:port][/prefix]")
        self.base = base
        self.timeout_s = timeout_s
        self._place = (parts.hostname, port or 80)
        self._host = parts.netloc
        self._prefix = parts.path.rstrip("/")

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"", timeout_s: float | None = None
    ) -> Answer:
        """Send one request and read its answer, on a connection of its own.

        Raises:
            MetadataError: no connection, no whole answer in time, more than 64 KiB, or no HTTP.
        """
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        lines = [f"{method} {self._prefix}{path} HTTP/1.1", f"Host: {self._host}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body or method != "GET":
            lines.append(f"Content-Length: {len(body)}")
        sent = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        try:
            with socket.create_connection(self._place, timeout=_left_s(deadline_s)) as connection:
                connection.sendall(sent)
                received = _receive(connection, deadline_s)
            response = http.client.HTTPResponse(_Received(received), method=method)  # type: ignore[arg-type]
            response.begin()
            data = response.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MetadataError(f"{self.base}{path}: {error or type(error).__name__}") from error
        found = {name.lower(): value for name, value in response.getheaders()}
        if "text/html" in found.get("content-type", ""):
            # A proxy's or a captive portal's page.
            raise MetadataError(f"{self.base}{path}: an HTML page in place of metadata")
        return Answer(response.status, found, data.decode("utf-8", "replace").strip())

    def unexpected(self, path: str, answer: Answer) -> MetadataError:
        """The error for an answer that the platform does not document."""
        return MetadataError(f"{self.base}{path}: status {answer.status}, {answer.text[:100]!r}")


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _receive(connection: socket.socket, deadline_s: float) -> bytes:
    """All bytes of an answer: until the length that it names, or until the other side closes."""
    data = b""
    wanted: int | None = None
    while wanted is None or len(data) < wanted:
        # The limit of a socket is for each call, and a slow server can make many.
        connection.settimeout(_left_s(deadline_s))
        piece = connection.recv(MAX_BYTES)
        if not piece:
            break
        data += piece
        if len(data) > MAX_BYTES:
            raise MetadataError("the answer is too long")
        if wanted is None:
            head, end, _ = data.partition(b"\r\n\r\n")
            wanted = _whole_length(head) if end else None
    return data


def _whole_length(head: bytes) -> int | None:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return len(head) + 4 + int(value)
    return None


def json_object(metadata: Metadata, path: str, answer: Answer) -> dict[str, Any]:
    """The JSON object of an answer.

    Raises:
        MetadataError: it is none.
    """
    import json

    try:
        value = json.loads(answer.text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise metadata.unexpected(path, answer)
    return value


def epoch_s(text: object) -> float | None:
    """The time that a platform wrote (ISO 8601 or as in HTTP headers; UTC without a zone), or None."""
    from datetime import UTC, datetime
    from email.utils import parsedate_to_datetime

    if not isinstance(text, str):
        return None
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            when = parse(text)
            return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
        except (ValueError, TypeError, OverflowError):
            continue
    return None
