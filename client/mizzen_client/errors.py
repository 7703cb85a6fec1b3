"""Errors of the API client.

ClientError
    NotConfigured: no URL of an API is configured, or the file of contexts is invalid
    DocumentError: a document cannot be read, or is not YAML or JSON
    ArchiveError: a working directory cannot be packed
    AmbiguousReference: an abbreviated id or a name matches several workloads
    UnknownReference: an id or a name matches nothing
    Unreachable: no response in time
    ApiError: the API responded with a problem
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
    """No URL of an API is configured, or the configuration is invalid."""


class DocumentError(ClientError):
    """A document cannot be read or is not YAML or JSON. The message starts with the file's name."""


class ArchiveError(ClientError):
    """A working directory cannot be packed; the message names the path."""


class AmbiguousReference(ClientError):
    """An abbreviated id or a name matches several workloads. The message lists them."""


class UnknownReference(ClientError):
    """An abbreviated id or a name matches no workload, or a machine's id is malformed."""


class Unreachable(ClientError):
    """No response arrived in time, or the response is not from mizzen's API."""


@dataclass(frozen=True)
class FieldError:
    """One of the problems of a document or request."""

    path: str
    """The path in the document, such as `jobs[0].tasks`. Empty: the whole document."""
    message: str
    value: Any = None
    suggestion: str | None = None
    """The nearest known key or value, if this one may be misspelt."""

    def __str__(self) -> str:
        extras = [] if self.value is None else [f"got {self.value!r}"]
        if self.suggestion is not None and self.suggestion not in self.message:
            extras.append(f"did you mean {self.suggestion!r}?")
        text = f"{self.path}: {self.message}" if self.path else self.message
        return f"{text} ({'; '.join(extras)})" if extras else text


class ApiError(ClientError):
    """The API responded with a problem document (RFC 9457)."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        self.status = status
        """The HTTP status."""
        self.type = str(body.get("type") or "about:blank")
        """The stable type of the problem, for use by programs."""
        self.title = str(body.get("title") or f"HTTP status {status}")
        self.detail = str(body.get("detail") or "")
        errors = body.get("errors")
        self.errors = tuple(_field_error(e) for e in errors) if isinstance(errors, list) else ()
        """The single problems with their paths, if the response lists them."""
        self.body = body
        super().__init__(self._text())

    def _text(self) -> str:
        return ": ".join(filter(None, [self.title, self.detail]))


class OutputError(ClientError):
    """An output cannot be fetched: it was not stored, the folder is not empty, or the archive is not valid."""


class Invalid(ApiError):
    """The request or document is invalid. Nothing was changed."""

    def without(self, path: str) -> "Invalid":
        """Return this error without the problems at `path`, or `self` if no others remain."""
        errors = self.body.get("errors")
        left = [e for e in errors if e.get("path") != path] if isinstance(errors, list) else []
        if not left:
            return self
        detail = "; ".join(f"{e.get('path')}: {e.get('message')}" for e in left)
        return Invalid(self.status, {**self.body, "errors": left, "detail": detail})


class NotAllowed(ApiError):
    """The API key is missing, unknown, or its role lacks the permission."""


class NotFound(ApiError):
    """The resource does not exist (any more), or it belongs to another tenant."""

    def _text(self) -> str:
        return self.detail or self.title  # The detail names the resource and says that it does not exist.


class Conflict(ApiError):
    """The current state of the resource does not allow the request."""


class Unavailable(ApiError):
    """The server is unavailable or busy, or has an internal error."""


_KINDS: dict[int, type[ApiError]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    410: NotFound,
    412: Conflict,
}


def api_error(status: int, body: Mapping[str, Any]) -> ApiError:
    """Return the error for a problem document with the HTTP status `status`."""
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
