"""Checks of request bodies and URLs: size, time, media type, and characters that Postgres cannot store."""

import asyncio
import contextlib
import re
import time
from typing import Annotated, Any, ClassVar

from fastapi import Depends, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import HttpProblem, ProblemType, field_path
from domain.ids import (
    MACHINE_PATTERN,
    NAME_PATTERN,
    READ_PATTERN,
    READ_RULE,
    TABLE_PATTERN,
    TABLE_RULE,
    is_read,
    is_table_name,
)  # fmt: skip
from infra.config.services import ApiSettings, LimitSettings

MAX_TEXT = 256
_LINGER_BYTES = 32 << 20
_LINGER_S = 10.0


class BodyLimits:
    """ASGI middleware: refuses URLs with a NUL character, and bodies that are too large or arrive too slowly.

    A body is refused while it arrives; it is not buffered.
    """

    def __init__(self, app: ASGIApp, settings: ApiSettings, limits: LimitSettings) -> None:
        self._app = app
        self._settings = settings
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            problem = HttpProblem(
                ProblemType.MALFORMED_REQUEST, "the URL contains a NUL character, which is not allowed"
            )
            await problem.response()(scope, receive, send)
            return
        archive = scope["method"] == "PUT" and scope["path"].startswith("/v1/archives/")
        limit = self._settings.max_archive_bytes if archive else self._settings.max_body_bytes
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            if "expect" not in headers:  # With `Expect: 100-continue` the client has not sent the body.
                await _drain(receive)
            await _too_large(limit).response()(scope, receive, send)
            return
        got, is_whole, began_s = 0, False, time.monotonic()

        async def bounded() -> Message:
            nonlocal got, is_whole
            if is_whole:
                return await receive()  # Returns when the client disconnects.
            allowed_s = self._limits.body_timeout_s + got / self._limits.body_bytes_per_s
            try:
                async with asyncio.timeout(began_s + allowed_s - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise _too_slow(self._limits, got) from None
            if message["type"] == "http.request":
                is_whole = not message.get("more_body", False)
                got += len(message.get("body", b""))
                if got > limit:
                    await _drain(receive)
                    raise _too_large(limit)
            return message

        await self._app(scope, bounded, send)


async def _drain(receive: Receive) -> None:
    """Reads and discards the body for a limited time, because most clients read the response only after sending all."""
    left = _LINGER_BYTES
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body"):
                    return


def _too_large(limit: int) -> HttpProblem:
    # The unread rest of the body makes the connection unusable.
    return HttpProblem(
        ProblemType.TOO_LARGE, f"the body exceeds the limit of {limit} bytes", headers={"Connection": "close"}
    )


def _too_slow(limits: LimitSettings, got: int) -> HttpProblem:
    allowed = f"{limits.body_timeout_s:g} s plus 1 s for each {limits.body_bytes_per_s:g} bytes"
    detail = f"only {got} bytes arrived in time; a body may take {allowed} (limits.body_timeout_s, body_bytes_per_s)"
    return HttpProblem(ProblemType.TIMED_OUT, detail, headers={"Connection": "close"})


async def _json_only(request: Request) -> None:
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = media == "application/json" or (media.startswith("application/") and media.endswith("+json"))
    if not is_json and await request.body():
        given = f"it is {media}" if media else "none is given"
        raise HttpProblem(ProblemType.UNSUPPORTED_MEDIA_TYPE, f"Content-Type must be application/json, {given}")


JsonOnly = Depends(_json_only)
"""Refuses a body that is not declared as JSON."""


_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def unstorable(text: str) -> str | None:
    """Returns why Postgres cannot store `text`; None: it can."""
    found = _UNSTORABLE.search(text)
    if found is None:
        return None
    return "contains a NUL character" if found.group() == "\0" else "contains an unpaired surrogate"


class Body(BaseModel):
    """Base class of JSON bodies. Refuses unknown fields, too many values, and strings that Postgres cannot store."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    most_members: ClassVar[int] = 1000
    """Members of one JSON object in the body. A body with a larger mapping raises this limit."""
    most_values: ClassVar[int] = 200_000
    """Values of the body, in all objects and lists."""

    @model_validator(mode="before")
    @classmethod
    def _storable(cls, data: Any) -> Any:
        left: list[Any] = [data]
        values = 0
        while left:
            value = left.pop()
            if isinstance(value, dict | list):
                # Bodies are validated on the event loop, where hundreds of thousands of values, or an error for each of
                # so many unknown keys, take seconds.
                if isinstance(value, dict) and len(value) > cls.most_members:
                    raise ValueError(f"a mapping has {len(value)} members; must have at most {cls.most_members}")
                values += len(value)
                if values > cls.most_values:
                    raise ValueError(f"the body has more than {cls.most_values} values")
            if isinstance(value, dict):
                left += [*value, *value.values()]
            elif isinstance(value, list):
                left += value
            elif isinstance(value, str) and (problem := unstorable(value)) is not None:
                raise ValueError(f"{_path_to(data, value)}{problem}")
        return data


def _path_to(data: Any, text: str) -> str:
    """Returns where `text` is in `data`, as the beginning of a message."""
    left: list[tuple[tuple[object, ...], Any]] = [((), data)]
    while left:
        path, value = left.pop()
        members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, member in members:
            if key == text:
                return f"a key of {field_path(path) or 'the body'} "
            if member == text:
                return f"{field_path((*path, key))} "
            left.append(((*path, key), member))
    return "the body "


def _single_line(text: str) -> str:
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ValueError("must be a single line without control characters")
    return text


def _table_name(text: str) -> str:
    if not is_table_name(text):
        raise ValueError(f"must be {TABLE_RULE}")
    return text


def _read(text: str) -> str:
    if not is_read(text):
        raise ValueError(f"must be {READ_RULE}")
    return text


Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=63)]
"""A name that follows `domain.ids.NAME_RULE`."""
MachineId = Annotated[str, StringConstraints(pattern=MACHINE_PATTERN, max_length=191)]
"""The id of a machine, `region/cluster/machine`, of three names."""
TableName = Annotated[str, StringConstraints(pattern=TABLE_PATTERN, max_length=127), AfterValidator(_table_name)]
"""A table name that follows `domain.ids.TABLE_RULE`."""
Read = Annotated[str, StringConstraints(pattern=READ_PATTERN, max_length=328), AfterValidator(_read)]
"""Data that a run read, a table or one partition, as in `domain.ids.READ_RULE`."""
Bytes = Annotated[int, Field(ge=0, le=1 << 60, strict=True)]
"""A size in bytes, at most 1 EiB."""
Line = Annotated[str, StringConstraints(max_length=MAX_TEXT), AfterValidator(_single_line)]
"""A single line of at most `MAX_TEXT` characters."""
