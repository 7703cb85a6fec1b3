"""HTTP requests to a metadata server, with one timeout for the whole response. No proxies, no redirects."""

import http.client
import io
import os
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from mizzen.notices.notice import DEFAULT_LEAD_S, Notice, Watcher, Window
from mizzen.notices.signals import SigtermWatcher

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


class CloudWatcher(Watcher, ABC):
    """Base class of watchers that poll a metadata server."""

    address_variables: ClassVar[tuple[str, ...]]
    """Variables with the address of the metadata server; the first that is set applies, else the link-local one.

    A variable whose name ends in `_HOST` has the address without `http://`.
    """

    def __init__(
        self,
        window: Window,
        base: str | None,
        environ: Mapping[str, str] | None,
        *,
        timeout_s: float,
        period_s: float,
        clock: Callable[[], float],
        lead_s: float = DEFAULT_LEAD_S,
    ) -> None:
        """Create the watcher without sending a request.

        Args:
            window: time from the platform's notice to the end.
            base: address of the metadata server; from the environment by default.
            environ: variables to read; `os.environ` by default.
            timeout_s: timeout of each request, in seconds.
            period_s: seconds between calls of `poll`.
            clock: returns seconds since the epoch.
            lead_s: how long before a known end the notice is given, in seconds.

        Raises:
            ValueError: the address or an environment variable is invalid.
        """
        super().__init__(window, period_s=period_s, lead_s=lead_s, clock=clock)
        environ = os.environ if environ is None else environ
        self._metadata = Metadata(base or self._address(environ), timeout_s)
        self._of_signal = SigtermWatcher.usual.or_told(environ)
        """Window of a SIGTERM."""

    @abstractmethod
    def answers(self) -> bool:
        """Return whether the server is this platform's.

        Raises:
            MetadataError: the server does not respond, or belongs to another platform.
        """

    def on_signal(self, received: int) -> Notice:
        """Return the notice of a SIGTERM. Clouds do not send it: a user stops the process, or the guest shuts down."""
        return self._notice(self.kind_of_signal, signal.Signals(received).name, window=self._of_signal)

    def _address(self, environ: Mapping[str, str]) -> str:
        for name in self.address_variables:
            if text := environ.get(name):
                return f"http://{text}" if name.endswith("_HOST") else text
        return LINK_LOCAL


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
