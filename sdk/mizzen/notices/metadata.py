"""HTTP requests to a metadata server, with one timeout for the whole response. No proxies, no redirects."""

import http.client
import io
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

LINK_LOCAL = "http://169.254.169.254"
"""Metadata address of AWS, GCP and Azure."""

TIMEOUT_S = 2.0
MAX_BYTES = 65536


class MetadataError(OSError):
    """A metadata server does not respond, or its response is not as the platform documents."""


@dataclass(frozen=True)
class Answer:
    """A complete response. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    text: str


class _Received:
    """The received bytes, with the interface of a socket that `http.client` needs."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


class Metadata:
    """A client of the metadata server at a base address."""

    def __init__(self, base: str, timeout_s: float = TIMEOUT_S) -> None:
        """Create the client without sending a request.

        Args:
            base: `http://host[:port][/prefix]`.
            timeout_s: timeout for the connection and the whole response together, in seconds.

        Raises:
            ValueError: `base` is not in this format.
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
        """Send one request on a new connection, and return the response.

        Raises:
            MetadataError: the connection failed, the response timed out, exceeds 64 KiB, or is not valid HTTP.
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
            # The page of a proxy or a captive portal.
            raise MetadataError(f"{self.base}{path}: the response is an HTML page instead of metadata")
        return Answer(response.status, found, data.decode("utf-8", "replace").strip())

    def unexpected(self, path: str, answer: Answer) -> MetadataError:
        """Return the error for a response that the platform does not document."""
        return MetadataError(f"{self.base}{path}: status {answer.status}, {answer.text[:100]!r}")


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _receive(connection: socket.socket, deadline_s: float) -> bytes:
    """Return all bytes of a response: up to its Content-Length, or until the server closes the connection."""
    data = b""
    wanted: int | None = None
    while wanted is None or len(data) < wanted:
        # A socket's timeout applies to each call, and a slow server can cause many calls.
        connection.settimeout(_left_s(deadline_s))
        piece = connection.recv(MAX_BYTES)
        if not piece:
            break
        data += piece
        if len(data) > MAX_BYTES:
            raise MetadataError("the response is too long")
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
    """Parse a response as a JSON object.

    Raises:
        MetadataError: it is not a JSON object.
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
    """Parse a time in ISO 8601 or HTTP header format (UTC if it has no zone) into epoch seconds; None if invalid."""
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
