"""HTTP to the API: what is tried again, for how long, and which error comes of what.

Whatever may be sent twice is sent again after a lost connection or an answer of 429, 502, 503 or 504, with growing
pauses, until `patience_s` is over; a submission that finds its tenant's queue full waits for room for longer. The rest
is only sent again where the first try surely did not arrive.
"""

import json
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx

from mizzen.client.errors import ApiError, NotConfigured, Unreachable, api_error

Params = Mapping[str, str | int | list[str] | None]

_PASSING = frozenset({429, 502, 503, 504})
_ROOM = "limits.queued_per_tenant"
"""The limit whose 429 ends when queued workloads start: after minutes or hours."""
_IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE"})
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_CONNECT_S = 5.0


class Lost(Exception):
    """A stream broke off: the caller decides from where to go on."""


class Pauses:
    """Growing pauses between tries, until `patience_s` have passed since the first failure after a sign of life."""

    def __init__(self, patience_s: float, on_retry: Callable[[str, float], None]) -> None:
        self._patience_s = patience_s
        self._on_retry = on_retry
        self._tries = 0
        self._deadline: float | None = None

    def connected(self) -> None:
        """There is an answer: patience begins anew, but pauses stay long until something comes of it."""
        self._deadline = None

    def succeeded(self) -> None:
        """Something came: all begins anew."""
        self._tries, self._deadline = 0, None

    def pause(self, error: Exception, at_least_s: float = 0.0) -> None:
        """Waits a while, or raises `error` if there is no time left."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._patience_s
        longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._tries)
        # Many clients that lost the same server must not all come back at the same moment.
        pause_s = at_least_s + random.uniform(longest_s / 2, longest_s)
        if now + pause_s > self._deadline:
            raise error
        self._on_retry(str(error), self._deadline - now)
        self._tries += 1
        time.sleep(pause_s)


class Transport:
    """A connection to one API. `on_retry` gets the error and the seconds that are left before giving up."""

    def __init__(
        self,
        url: str,
        key: str | None,
        patience_s: float,
        answer_s: float,
        on_retry: Callable[[str, float], None] | None = None,
        on_expiry: Callable[[str], None] | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise NotConfigured(f"{url!r} is not the address of an API: give it as http://host:port or https://host")
        self.url = url.rstrip("/")
        self.patience_s = patience_s
        self._answer_s = answer_s
        self._on_retry = on_retry or (lambda error, left_s: None)
        self._on_expiry = on_expiry
        headers = {"accept": "application/json", "user-agent": "mizzen/0.1"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=self._timeout(answer_s),
            # The system's certificates, as a company's proxy has its own among them. Plain HTTP needs none, and a TLS
            # context that trusts nobody is quick to make.
            verify=ssl.create_default_context() if parts.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            # A proxy for the world outside does not know this machine.
            trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1"),
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def pauses(self, patience_s: float | None = None) -> Pauses:
        """Pauses for a loop of tries of its own."""
        return Pauses(self.patience_s if patience_s is None else patience_s, self._on_retry)

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
    ) -> Any:
        """The answer's JSON; None where it is empty. `idempotent` defaults to what the method promises.

        `room_patience_s` is how long a full queue of the tenant is waited for; None: as long as anything else.

        Raises:
            ApiError: the API answered with a problem.
            Unreachable: no answer within `patience_s`, or one that is not JSON.
        """
        again = method in _IDEMPOTENT if idempotent is None else idempotent
        usual, room = self.pauses(patience_s), self.pauses(room_patience_s)
        lost = False
        while True:
            at_least_s, pauses = 0.0, usual
            try:
                response = self._http.request(
                    method, path, params=_present(params), json=body, content=content, headers=headers
                )
                self._look_at_expiry(response)
                if response.is_success:
                    return _json(response)
                if response.status_code == 404 and method == "DELETE" and lost:
                    return None  # The try whose answer was lost has removed it.
                failure: Exception = _problem(response)
                if not (again and response.status_code in _PASSING):
                    raise failure
                at_least_s = _retry_after_s(response)
                if room_patience_s is not None and _is_full(failure):
                    usual.succeeded()
                    pauses = room
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = self._unreachable(error)
            except httpx.HTTPError as error:
                failure, lost = self._unreachable(error), True
                if not again:
                    raise Unreachable(f"{failure}; it is not known whether it was done") from None
            pauses.pause(failure, at_least_s)

    @contextmanager
    def stream(
        self,
        path: str,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
        silence_s: float | None = None,
    ) -> Iterator[Iterator[bytes]]:
        """Lines of a streamed answer, as bytes without their end; an unfinished last line only at a proper end.

        A connection that is silent for `silence_s` (default: `answer_s`) counts as lost.

        Raises:
            ApiError: the API answered with a problem that will not pass.
            Lost: it cannot be reached now, or the stream broke off.
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
                    yield _lines(response)
                    return
                response.read()
                problem = _problem(response)
                raise Lost(str(problem)) if response.status_code in _PASSING else problem
        except httpx.HTTPError as error:
            raise Lost(str(self._unreachable(error))) from None

    def _look_at_expiry(self, response: httpx.Response) -> None:
        expires_at = response.headers.get("mizzen-key-expires")
        if expires_at is not None and self._on_expiry is not None:
            self._on_expiry(expires_at)
            self._on_expiry = None

    @staticmethod
    def _timeout(silence_s: float) -> httpx.Timeout:
        return httpx.Timeout(silence_s, connect=min(silence_s, _CONNECT_S))

    def _unreachable(self, error: httpx.HTTPError) -> Unreachable:
        return Unreachable(f"no answer from {self.url}: {error or type(error).__name__}")


def _present(params: Params | None) -> dict[str, str | int | list[str]]:
    return {name: value for name, value in (params or {}).items() if value is not None}


def _json(response: httpx.Response) -> Any:
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        kind = response.headers.get("content-type", "no type")
        raise Unreachable(f"{response.url} answered with {kind}, not JSON: is this the address of the API?") from None


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
    # Not `iter_lines`: it also splits at the separators that text in a log may hold.
    rest = b""
    for chunk in response.iter_bytes():
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest


def decode(text: str) -> Any:
    """JSON from a stream.

    Raises:
        Lost: it is cut off.
    """
    try:
        return json.loads(text)
    except ValueError:
        raise Lost("an event was cut off") from None
