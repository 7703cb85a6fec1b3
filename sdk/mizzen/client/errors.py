"""What can go wrong between a user and the API.

ClientError
    NotConfigured: no address of an API is known, or the file of contexts cannot be used
    DocumentError: a document cannot be read, or is not YAML or JSON
    ArchiveError: a working directory cannot be packed
    AmbiguousReference: an abbreviated id or a name means several workloads
    UnknownReference: it means none
    Unreachable: no answer in time
    ApiError: the API answered with a problem
        Invalid (400, 413, 415, 422)
        NotAllowed (401, 403)
        NotFound (404, 410)
        Conflict (409, 412)
        Unavailable (429 and 5xx)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class ClientError(Exception):
    """Base of all errors of the client."""


class NotConfigured(ClientError):
    """No address of an API is known, or what is configured cannot be used."""


class DocumentError(ClientError):
    """A document cannot be read or is not YAML or JSON. The message starts with the file's name."""


class ArchiveError(ClientError):
    """A working directory cannot be packed; the message names the path."""


class AmbiguousReference(ClientError):
    """An abbreviated id or a name means several workloads: the message lists them."""


class UnknownReference(ClientError):
    """An abbreviated id or a name means no workload."""


class Unreachable(ClientError):
    """No answer came in time, or what answered is not mizzen's API."""


@dataclass(frozen=True)
class FieldError:
    """One of the problems of a document or request."""

    path: str
    """Where in the document: `jobs[0].tasks`. Empty: the whole."""
    message: str
    value: Any = None
    suggestion: str | None = None
    """The nearest known key or value, for a misspelt one."""

    def __str__(self) -> str:
        extras = [] if self.value is None else [f"got {self.value!r}"]
        if self.suggestion is not None and self.suggestion not in self.message:
            extras.append(f"did you mean {self.suggestion!r}?")
        text = f"{self.path}: {self.message}" if self.path else self.message
        return f"{text} ({'; '.join(extras)})" if extras else text


class ApiError(ClientError):
    """The API answered with a problem document (RFC 9457)."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        self.status = status
        """The HTTP status."""
        self.type = str(body.get("type") or "about:blank")
        """The stable type: what programs should look at."""
        self.title = str(body.get("title") or f"HTTP status {status}")
        self.detail = str(body.get("detail") or "")
        errors = body.get("errors")
        self.errors = tuple(_field_error(e) for e in errors) if isinstance(errors, list) else ()
        """Each problem with its path, where there are several."""
        self.body = body
        super().__init__(self._text())

    def _text(self) -> str:
        return ": ".join(filter(None, [self.title, self.detail]))


class Invalid(ApiError):
    """The request or document is not valid; nothing was changed."""

    def without(self, path: str) -> "Invalid":
        """The same without the problems at `path`; itself if they are all there is."""
        errors = self.body.get("errors")
        left = [e for e in errors if e.get("path") != path] if isinstance(errors, list) else []
        if not left:
            return self
        detail = "; ".join(f"{e.get('path')}: {e.get('message')}" for e in left)
        return Invalid(self.status, {**self.body, "errors": left, "detail": detail})


class NotAllowed(ApiError):
    """The API key is missing, unknown, or has too small a role."""


class NotFound(ApiError):
    """There is no such thing (any more), or it is another tenant's."""

    def _text(self) -> str:
        return self.detail or self.title  # The detail names the thing, and says that it is not there.


class Conflict(ApiError):
    """The present state does not allow it."""


class Unavailable(ApiError):
    """The server cannot answer now, or has a fault."""


_KINDS: dict[int, type[ApiError]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    410: NotFound,
    412: Conflict,
}


def api_error(status: int, body: Mapping[str, Any]) -> ApiError:
    """The error for a problem document with HTTP `status`."""
    if status == 429 or status >= 500:
        return Unavailable(status, body)
    return _KINDS.get(status, Invalid)(status, body)


def _field_error(body: Any) -> FieldError:
    if not isinstance(body, Mapping):
        return FieldError("", str(body))
    return FieldError(
        path=str(body.get("path") or ""),
        message=str(body.get("message") or ""),
        value=body.get("value"),
        suggestion=body.get("suggestion"),
    )
