"""Errors as problem documents (RFC 9457). The list of problem types is closed and their URIs never change."""

import logging
import math
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeVar, get_args

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.exc import DataError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from domain.ids import RULES

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:mizzen:problem:"
MAX_ERRORS = 100
"""Maximum number of errors listed in one response."""
_MAX_SHOWN = 200
_LONGEST_TYPO = 100
_REFUSED = "mizzen.refused"
_log = logging.getLogger(__name__)
T = TypeVar("T")


class ProblemType(StrEnum):
    """The closed list of problem types. The type URI is `TYPE_PREFIX` followed by the value."""

    MALFORMED_REQUEST = "malformed-request"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not-found"
    METHOD_NOT_ALLOWED = "method-not-allowed"
    CONFLICT = "conflict"
    WRONG_PHASE = "wrong-phase"
    GONE = "gone"
    TOO_LARGE = "too-large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported-media-type"
    INVALID_REQUEST = "invalid-request"
    INVALID_DOCUMENT = "invalid-document"
    IDEMPOTENCY_MISMATCH = "idempotency-mismatch"
    TIMED_OUT = "timed-out"
    LIMIT_EXCEEDED = "limit-exceeded"
    BUSY = "busy"
    TOO_MANY_FOLLOWERS = "too-many-followers"
    DATABASE_UNAVAILABLE = "database-unavailable"
    SCHEDULER_UNAVAILABLE = "scheduler-unavailable"
    STORAGE_UNAVAILABLE = "storage-unavailable"
    NOT_READY = "not-ready"
    INTERNAL = "internal"


_KINDS: dict[ProblemType, tuple[int, str]] = {
    ProblemType.MALFORMED_REQUEST: (400, "The request is malformed"),
    ProblemType.UNAUTHENTICATED: (401, "A valid API key is needed"),
    ProblemType.FORBIDDEN: (403, "The API key's role does not allow this"),
    ProblemType.NOT_FOUND: (404, "Not found"),
    ProblemType.METHOD_NOT_ALLOWED: (405, "This method is not allowed here"),
    ProblemType.CONFLICT: (409, "The current state does not allow this"),
    ProblemType.WRONG_PHASE: (409, "The workload's phase does not allow this"),
    ProblemType.GONE: (410, "The data was deleted after its retention time"),
    ProblemType.TOO_LARGE: (413, "The body is too large"),
    ProblemType.UNSUPPORTED_MEDIA_TYPE: (415, "The media type is not supported"),
    ProblemType.INVALID_REQUEST: (422, "The request is not valid"),
    ProblemType.INVALID_DOCUMENT: (422, "The document is not valid"),
    ProblemType.IDEMPOTENCY_MISMATCH: (422, "The Idempotency-Key was already used with another body"),
    ProblemType.TIMED_OUT: (408, "The request did not arrive in time"),
    ProblemType.LIMIT_EXCEEDED: (429, "A limit of the key, the tenant or the address is reached"),
    ProblemType.BUSY: (503, "The server is busy"),
    ProblemType.TOO_MANY_FOLLOWERS: (503, "Too many streams are open"),
    ProblemType.DATABASE_UNAVAILABLE: (503, "The database does not respond"),
    ProblemType.SCHEDULER_UNAVAILABLE: (503, "The scheduler does not respond"),
    ProblemType.STORAGE_UNAVAILABLE: (503, "The object store does not respond"),
    ProblemType.NOT_READY: (503, "Not ready yet"),
    ProblemType.INTERNAL: (500, "Internal server error"),
}
_RETRY_AFTER = {"Retry-After": "1"}


@dataclass(frozen=True)
class FieldError:
    """One error in a document or request."""

    path: str
    """Path of the field, such as `jobs[0].resources.accelerators`; empty for the whole document."""
    message: str
    value: object = None
    """The invalid value; None also if the field is missing."""
    suggestion: str | None = None
    """The most similar known key or name, if the given one is misspelt."""
    rule: str | None = None
    """The broken rule, if it is one that only the description of the document's JSON Schema states."""

    def to_json(self) -> dict[str, Any]:
        """Returns the error as an entry of `errors` in a problem document."""
        body: dict[str, Any] = {"path": self.path, "message": self.message}
        if self.value is not None and not isinstance(self.value, dict):  # The path says more than a mapping's text.
            body["value"] = shown(self.value)
        if self.suggestion is not None:
            body["suggestion"] = self.suggestion
        return body


class LimitView(BaseModel):
    """The limit that a request would have exceeded."""

    name: str = Field(examples=["limits.streams_per_key"], description="Name of the setting")
    value: float = Field(examples=[32])


class HttpProblem(HTTPException):
    """An HTTP error. If it is raised while a request is handled, the response is a problem document."""

    def __init__(
        self,
        kind: ProblemType,
        detail: str,
        *,
        errors: Iterable[FieldError] = (),
        headers: dict[str, str] | None = None,
        limit: LimitView | None = None,
    ) -> None:
        status, self.title = _KINDS[kind]
        super().__init__(status, detail, headers)
        self.kind = kind
        self.errors = tuple(errors)
        self.limit = limit
        self.is_hidden = False

    def to_json(self) -> dict[str, Any]:
        """Returns the problem document."""
        body: dict[str, Any] = {
            "type": TYPE_PREFIX + self.kind.value,
            "title": self.title,
            "status": self.status_code,
            "detail": str(shown(self.detail, 2000)),
        }
        if self.errors:
            body["errors"] = [error.to_json() for error in self.errors[:MAX_ERRORS]]
        if self.limit is not None:
            body["limit"] = self.limit.model_dump()
        return body

    def response(self) -> Response:
        """Returns the response."""
        return JSONResponse(self.to_json(), self.status_code, dict(self.headers or {}), MEDIA_TYPE)


class FieldErrorView(BaseModel):
    """One error in a document or request."""

    path: str = Field(examples=["jobs[0].resources.accelerators"])
    message: str
    value: Any = None
    suggestion: str | None = None


class ProblemView(BaseModel):
    """A problem document (RFC 9457). Programs should read `type`, which is stable, and should not parse `detail`."""

    model_config = ConfigDict(title="HttpProblem")
    type: str = Field(examples=["urn:mizzen:problem:invalid-document"])
    title: str
    status: int
    detail: str
    errors: list[FieldErrorView] | None = None
    limit: LimitView | None = Field(None, description="The exceeded limit, for type limit-exceeded")


def not_found(what: str, name: str, *, is_hidden: bool = False) -> HttpProblem:
    """Returns a 404 problem: there is no `what` with this name.

    `is_hidden`: the object exists but belongs to another tenant. Only operators see this, in the audit log.
    """
    problem = HttpProblem(ProblemType.NOT_FOUND, f"there is no {what} {shown(name)!r}")
    problem.is_hidden = is_hidden
    return problem


def existing(session: Session, model: type[T], key: str | tuple[str, ...], what: str, *, lock: bool = False) -> T:
    """Returns the row with this primary key, with its row lock if `lock`.

    Raises:
        HttpProblem: 404, there is no `what` with this name.
    """
    row = session.get(model, key, with_for_update=lock)
    if row is None:
        raise not_found(what, key if isinstance(key, str) else "/".join(key))
    return row


def is_refusal(scope: Scope) -> bool:
    """Returns whether the response was 404 because the object belongs to another tenant."""
    return bool(scope.get(_REFUSED))


def invalid(path: str, message: str, value: object = None) -> HttpProblem:
    """Returns a 422 problem for one field of a request."""
    error = FieldError(path, message, value)
    return HttpProblem(ProblemType.INVALID_REQUEST, f"{path}: {message}", errors=[error])


def refuse_document(problems: list[FieldError]) -> HttpProblem:
    """Returns a 422 problem for a document with these errors, at least one."""
    first = problems[0]
    text = f"{first.path}: {first.message}" if first.path else first.message
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return HttpProblem(ProblemType.INVALID_DOCUMENT, text + more, errors=problems)


def over_limit(name: str, value: float, detail: str, retry_after_s: float) -> HttpProblem:
    """Returns a 429 problem: the request exceeds the setting `limits.<name>`, whose value is `value`.

    `detail` says what was counted and what is allowed. `retry_after_s` is sent in the `Retry-After` header.
    """
    pause_s = max(1, math.ceil(retry_after_s))
    return HttpProblem(
        ProblemType.LIMIT_EXCEEDED,
        f"{detail} (limits.{name} is {value:g})",
        headers={"Retry-After": str(pause_s)},
        limit=LimitView(name=f"limits.{name}", value=value),
    )


def busy(detail: str, retry_after_s: int = 5) -> HttpProblem:
    """Returns a 503 problem: the process already handles the maximum number of requests of this kind."""
    return HttpProblem(ProblemType.BUSY, detail, headers={"Retry-After": str(retry_after_s)})


def database_unavailable() -> HttpProblem:
    """Returns a 503 problem: Postgres does not respond."""
    detail = "Postgres does not respond; if a commit was in progress, the change may have been made: retry the request"
    return HttpProblem(ProblemType.DATABASE_UNAVAILABLE, detail, headers=_RETRY_AFTER)


def shown(value: object, limit: int = _MAX_SHOWN) -> Any:
    """Returns `value` in the form in which responses repeat it: truncated to `limit` characters and valid as JSON."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 1 << 53:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, bytes):
        value = value[: limit + 1].decode(errors="replace")
    if not isinstance(value, str):
        try:
            value = reprlib.repr(value)
        except ValueError:  # an integer of thousands of digits
            value = "a very large number"
    text = value if len(value) <= limit else value[:limit] + "..."
    return text.encode("utf-8", "backslashreplace").decode()


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the most similar word in `known`, ignoring case; None: no word is similar enough."""
    if len(word) > _LONGEST_TYPO:
        return None
    by_fold = {k.casefold(): k for k in sorted(known, reverse=True)}
    found = get_close_matches(word.casefold(), sorted(by_fold), n=1, cutoff=0.6)
    return by_fold[found[0]] if found else None


def field_path(parts: Iterable[object]) -> str:
    """Formats a path: `("jobs", 0, "name")` becomes `jobs[0].name`."""
    out = ""
    for part in parts:
        out += f"[{part}]" if isinstance(part, int) else f".{part}" if out else str(part)
    return str(shown(out))


def _of_validation(error: RequestValidationError, request: Request) -> HttpProblem:
    errors: list[FieldError] = []
    is_secret = "/secrets/" in request.url.path  # Responses never repeat the value of a secret.
    for found in error.errors():
        if found["type"] == "json_invalid":
            at = found["loc"][-1]
            reason = found.get("ctx", {}).get("error", "")
            return HttpProblem(ProblemType.MALFORMED_REQUEST, f"the body is not JSON: {reason} at character {at}")
        place, *rest = found["loc"]
        # In a union, the path has the type, such as `str-enum[Phase]`, after the parameter's name: drop it.
        is_alternative = place == "query" and len(rest) > 1 and isinstance(rest[-1], str)
        rest = rest[:-1] if is_alternative else rest
        path = field_path(rest) if place == "body" else field_path([place, *rest])
        value = None if is_secret or found["type"] == "missing" else found.get("input")
        message = _message(found, request)
        if is_alternative and errors and errors[-1].path == path:
            message = f"{errors.pop().message}, or {message.removeprefix('Input should be ')}"
        errors.append(FieldError(path, message, value))
    detail = "; ".join(f"{e.path}: {e.message}" if e.path else e.message for e in errors[:5])
    return HttpProblem(ProblemType.INVALID_REQUEST, detail, errors=errors)


def _message(found: dict[str, Any], request: Request) -> str:
    """Returns what is right, where pydantic's own message does not say it."""
    place, *rest = found["loc"]
    rule = RULES.get(found.get("ctx", {}).get("pattern", ""))
    if place == "query" and rest == ["cursor"]:
        rule = "`next_cursor` of the previous page"
    if found["type"] in ("model_attributes_type", "dict_type", "model_type"):
        rule = "a JSON object"
    if rule is not None:
        return f"must be {rule}"
    if found["type"] == "missing":
        return "missing"
    if found["type"] != "extra_forbidden":
        return str(found["msg"]).removeprefix("Value error, ")
    part = request.scope["route"].body_field.field_info.annotation
    for name in (name for name in rest[:-1] if isinstance(name, str)):
        part = fields_of(part).get(name)
    known = list(fields_of(part))
    near = nearest(str(rest[-1]), known)
    right = f"did you mean {near}?" if near else f"the known fields are {', '.join(known)}"
    return f"unknown field; {right}" if known else "unknown field"


def fields_of(annotation: Any) -> dict[str, Any]:
    """Returns the annotations of the fields of the first model in `annotation`, by their names in JSON."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {field.alias or name: field.annotation for name, field in annotation.model_fields.items()}
    return next((fields for part in get_args(annotation) if (fields := fields_of(part))), {})


_OF_STATUS = {
    400: ProblemType.MALFORMED_REQUEST,
    404: ProblemType.NOT_FOUND,
    405: ProblemType.METHOD_NOT_ALLOWED,
    413: ProblemType.TOO_LARGE,
    415: ProblemType.UNSUPPORTED_MEDIA_TYPE,
}


def _of_http(error: HTTPException, request: Request) -> HttpProblem:
    kind = _OF_STATUS.get(error.status_code, ProblemType.MALFORMED_REQUEST)
    detail = {
        ProblemType.NOT_FOUND: f"the path {shown(request.url.path)} does not exist; /openapi.json lists all paths",
        ProblemType.METHOD_NOT_ALLOWED: f"{request.method} is not allowed at {shown(request.url.path)}",
        ProblemType.MALFORMED_REQUEST: "the body is not valid JSON",
    }.get(kind, str(error.detail))
    headers = dict(error.headers or {})
    if kind is ProblemType.METHOD_NOT_ALLOWED:
        # Starlette names the methods of one route, although several routes may have the path.
        matching = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
        headers["Allow"] = ", ".join(
            sorted({method for route in matching for method in getattr(route, "methods", None) or ()})
        )
    return HttpProblem(kind, detail, headers=headers)


def of_database(error: Exception) -> HttpProblem:
    """Returns the problem for an error of Postgres or of the connection to it."""
    if isinstance(error, DataError):
        return HttpProblem(ProblemType.INVALID_REQUEST, "a value is out of the range that the database can store")
    if isinstance(error, IntegrityError):
        return HttpProblem(
            ProblemType.CONFLICT, "an object that this depends on was changed concurrently; read it and retry"
        )
    _log.warning("database: %s", str(error).splitlines()[0])
    return database_unavailable()


def install(app: FastAPI) -> None:
    """Installs error handlers so that every error response of `app` is a problem document."""

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error, HttpProblem) and error.is_hidden:
            request.scope[_REFUSED] = True
        return (error if isinstance(error, HttpProblem) else _of_http(error, request)).response()

    async def validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _of_validation(error, request).response()

    async def database(_request: Request, error: Exception) -> Response:
        return of_database(error).response()

    async def gone(request: Request, _error: Exception) -> Response:
        _log.info("%s %s: the client closed the connection before it had sent its request", request.method,
                  shown(request.url.path))  # fmt: skip
        return Response(status_code=400)  # It is not sent.

    async def fault(_request: Request, _error: Exception) -> Response:
        return HttpProblem(ProblemType.INTERNAL, "an unexpected error; see the log of the server").response()

    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, validation)
    for kind in (OperationalError, InterfaceError, PoolTimeout, DataError, IntegrityError):
        app.add_exception_handler(kind, database)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, fault)
