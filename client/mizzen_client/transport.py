"""HTTP requests to the API, with retries and typed errors.

An idempotent request is retried after a lost connection or a response of 429, 502, 503 or 504, with exponential
backoff, until `patience_s` has passed. A submission that finds its tenant's queue full is retried for longer. A request
that is not idempotent is retried only if no connection was established.
"""

import io
import json
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import httpx

from mizzen_client.errors import ApiError, NotConfigured, Unreachable, api_error

Params = Mapping[str, str | int | list[str] | None]

_PASSING = frozenset({429, 502, 503, 504})
_ROOM = "limits.queued_per_tenant"
"""The limit on queued workloads. Its 429 lasts for minutes or hours, until queued workloads start."""
_IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE"})
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_CONNECT_S = 5.0


class StreamBroken(Exception):
    """A stream broke off. The caller decides where to resume it."""


class Backoff:
    """Exponential backoff between retries, until `patience_s` has passed since the first failure after a response."""

    def __init__(self, patience_s: float, on_retry: Callable[[str, float], None]) -> None:
        self._patience_s = patience_s
        self._on_retry = on_retry
        self._tries = 0
        self._deadline: float | None = None

    def connected(self) -> None:
        """Reset the deadline after a response. The backoff is reset only when data arrives (`succeeded`)."""
        self._deadline = None

    def succeeded(self) -> None:
        """Reset the deadline and the backoff after data has arrived."""
        self._tries, self._deadline = 0, None

    def pause(self, error: Exception, at_least_s: float = 0.0, *, silent: bool = False) -> None:
        """Sleep before the next retry, or raise `error` if the deadline would pass. `silent`: the user is not told."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._patience_s
        longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._tries)
        # Jitter: many clients that lost the same server must not all retry at the same moment.
        pause_s = at_least_s + random.uniform(longest_s / 2, longest_s)
        if now + pause_s > self._deadline:
            raise error
        if not silent:
            self._on_retry(str(error), self._deadline - now)
        self._tries += 1
        time.sleep(pause_s)


class Transport:
    """The connections to one API. `on_retry` is called with the error and the seconds left before the deadline."""

    def __init__(
        self,
        url: str,
        key: str | Callable[[], str] | None,
        patience_s: float,
        answer_s: float,
        on_retry: Callable[[str, float], None] | None = None,
        on_expiry: Callable[[str], None] | None = None,
        ca: str | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise NotConfigured(f"{url!r} is not the URL of an API: the form is http://host:port or https://host")
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        self._answer_s = answer_s
        self._on_retry = on_retry or (lambda error, left_s: None)
        self._on_expiry = on_expiry
        headers = {"accept": "application/json", "user-agent": "mizzen/0.1"}
        hooks: list[Callable[[httpx.Request], None]] = []
        if callable(key):
            hooks.append(partial(_authorise, key))
        elif key:
            headers["authorization"] = f"Bearer {key}"
        self.tls = tls_context(parts.scheme, ca)
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            event_hooks={"request": hooks},
            timeout=self._timeout(answer_s),
            verify=self.tls,
            # A proxy cannot reach services on this machine.
            trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1"),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def pauses(self, patience_s: float | None = None) -> Backoff:
        """Return a backoff for the caller's own retry loop."""
        return Backoff(self.patience_s if patience_s is None else patience_s, self._on_retry)

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        idempotent: bool | None = None,
        patience_s: float | None = None,
        room_patience_s: float | None = None,
        answer_s: float | None = None,
    ) -> Any:
        """Send a request and return the JSON of the response, or None if it is empty.

        Args:
            method: the HTTP method.
            path: the path of the URL.
            params: query parameters; those that are None are left out.
            body: the JSON of the request.
            content: the bytes of the request, instead of `body`.
            headers: additional headers.
            idempotent: whether the request may be retried. None: GET, HEAD, PUT and DELETE may be.
            patience_s: how long to retry; None: the default of this transport.
            room_patience_s: how long to retry while the tenant's queue is full; None: as for other errors.
            answer_s: a connection that receives nothing for this time counts as lost; None: the default.

        Raises:
            ApiError: the API responded with a problem.
            Unreachable: no response within `patience_s`, or a response that is not JSON.
        """
        again = method in _IDEMPOTENT if idempotent is None else idempotent
        usual, room = self.pauses(patience_s), self.pauses(room_patience_s)
        timeout = self._timeout(answer_s or self._answer_s)
        lost = False
        while True:
            at_least_s, pauses = 0.0, usual
            try:
                # Requests are in reference cycles, which would keep large bodies. A closed file has none.
                with nullcontext() if content is None else io.BytesIO(content) as file:
                    response = self._http.request(
                        method, path, params=_present(params), json=body, content=file, headers=headers, timeout=timeout
                    )
                self._look_at_expiry(response)
                if response.is_success:
                    return _json(response)
                if response.status_code == 404 and method == "DELETE" and lost:
                    return None  # The earlier try, whose response was lost, has removed the resource.
                if not (again and response.status_code in _PASSING):
                    # Not from a variable: its traceback would keep this frame, and the arguments of all callers.
                    raise _problem(response)
                failure: Exception = _problem(response)
                at_least_s = _retry_after_s(response)
                if room_patience_s is not None and _is_full(failure):
                    usual.succeeded()
                    pauses = room
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = self._unreachable(error)
            except httpx.HTTPError as error:
                failure, lost = self._unreachable(error), True
                if not again:
                    raise Unreachable(f"{failure}; it is unknown whether the request was executed") from None
            pauses.pause(failure, at_least_s)

    @contextmanager
    def stream(
        self,
        path: str,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        silence_s: float | None = None,
        *,
        lines: bool = True,
    ) -> Iterator[Iterator[bytes]]:
        """Return the lines of a streamed response, as bytes without line ends; with `lines` false, its pieces.

        An incomplete last line is yielded only if the stream ends properly. A connection that receives nothing for
        `silence_s` (default: `answer_s`) counts as lost.

        Raises:
            ApiError: the API responded with a problem that is not temporary.
            StreamBroken: the API cannot be reached now, or the stream broke off.
        """
        try:
            with self._http.stream(
                "GET",
                path,
                params=_present(params),
                headers=headers,
                timeout=self._timeout(silence_s or self._answer_s),
            ) as response:
                self._look_at_expiry(response)
                if response.is_success:
                    yield _lines(response) if lines else response.iter_bytes()
                    return
                response.read()
                problem = _problem(response)
                raise StreamBroken(str(problem)) if response.status_code in _PASSING else problem
        except httpx.HTTPError as error:
            raise StreamBroken(str(self._unreachable(error))) from None

    def _look_at_expiry(self, response: httpx.Response) -> None:
        expires_at = response.headers.get("mizzen-key-expires")
        if expires_at is not None and self._on_expiry is not None:
            self._on_expiry(expires_at)
            self._on_expiry = None

    @staticmethod
    def _timeout(silence_s: float) -> httpx.Timeout:
        return httpx.Timeout(silence_s, connect=min(silence_s, _CONNECT_S))

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        return Unreachable(f"no response from {self.url}: {error or type(error).__name__}")


def _authorise(token: Callable[[], str], request: httpx.Request) -> None:
    request.headers["authorization"] = f"Bearer {token()}"


def tls_context(scheme: str, ca: str | None) -> ssl.SSLContext:
    """Return the TLS context for URLs of this scheme. `ca`: a PEM file with further authorities.

    Raises:
        NotConfigured: the file is unusable.
    """
    if scheme != "https":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # It is not used, and an empty context is faster to create.
    context = ssl.create_default_context()  # The system's certificates include the one of a company's proxy.
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except ssl.SSLError:
            raise NotConfigured(f"CA file {ca}: contains no certificate in PEM") from None
        except OSError as error:
            raise NotConfigured(f"CA file {ca}: {error.strerror}") from None
    return context


def _present(params: Params | None) -> dict[str, str | int | list[str]]:
    return {name: value for name, value in (params or {}).items() if value is not None}


def _json(response: httpx.Response) -> Any:
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        kind = response.headers.get("content-type", "no type")
        raise Unreachable(f"{response.url} responded with {kind}, not JSON: is this the URL of the API?") from None


def _problem(response: httpx.Response) -> ApiError:
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        body = {"title": f"{response.status_code} {response.reason_phrase}", "detail": str(response.url)}
    return api_error(response.status_code, body)


def _is_full(failure: Exception) -> bool:
    limit = failure.body.get("limit") if isinstance(failure, ApiError) else None
    return isinstance(limit, Mapping) and limit.get("name") == _ROOM


def _retry_after_s(response: httpx.Response) -> float:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdigit() else 0.0


def _lines(response: httpx.Response) -> Iterator[bytes]:
    # `iter_lines` is not used because it also splits at other line separators, which a log may contain.
    rest = b""
    for chunk in response.iter_bytes():
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest


def decode(text: str) -> Any:
    """Parse JSON from a stream.

    Raises:
        StreamBroken: the text is truncated.
    """
    try:
        return json.loads(text)
    except ValueError:
        raise StreamBroken("an event was truncated") from None
