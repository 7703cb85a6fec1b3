"""Renders pages from templates. An open page gets the changing part of itself again, in place of the whole page."""

import hashlib
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from starlette.types import Scope

from api.auth import Caller, Role, caller_of, is_below
from api.people.key_labels import labels_of
from api.problems import MEDIA_TYPE, HttpProblem, not_found
from api.routing import Router
from api.state import ApiState
from console.sentences import readable
from domain.units import format_duration
from domain.version import VERSION
from infra.temporal_client import UI_PATH

TOP = "/console"
LOGIN = f"{TOP}/login"
CSRF = "mizzen.console-csrf"
"""Key in a request's scope for the secret that the forms of its login must contain (`console.cookies`)."""
CSRF_FIELD = "csrf"
PART = "hx-request"
"""Header of the script's requests for the changing part of a page."""
_templates = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, undefined=StrictUndefined,
    auto_reload=False, trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
router = Router(prefix=TOP, include_in_schema=False)


def owner_page(machine: str) -> str:
    """Returns the path of the page of a machine's owner."""
    return f"{TOP}/lending/{quote(machine)}"


def _when(at: datetime | None) -> str:
    return "" if at is None else f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def _until(first: datetime, last: datetime) -> str:
    """Returns an interval in UTC, to the minute."""
    begin, end = first.astimezone(UTC), last.astimezone(UTC)
    return (
        f"{begin:%Y-%m-%d %H:%M} – {end:%H:%M}"
        if begin.date() == end.date()
        else f"{begin:%Y-%m-%d %H:%M} – {end:%Y-%m-%d %H:%M}"
    )


def _ago(at: datetime | None) -> str:
    return "" if at is None else format_duration(max(0.0, (datetime.now(UTC) - at).total_seconds()))


@pass_context
def _readable(context: Context, sentence: str) -> str:
    """Returns a sentence of the API as pages show it (`console.sentences`). Each key is looked up once for a page."""
    known: dict[str, str] = context["key_labels"]

    def labels(ids: set[str]) -> dict[str, str]:
        state, caller = context["state"], context["caller"]
        if (new := ids - known.keys()) and caller is not None:
            with state.transaction() as session:
                known.update(dict.fromkeys(new, "") | labels_of(session, caller, new))
        return {id_: label for id_, label in known.items() if label}

    return readable(sentence, labels)


_templates.filters |= {
    "readable": _readable,
    "when": _when,
    "clock": lambda at: f"{at.astimezone(UTC):%H:%M}",
    "until": _until,
    "ago": _ago,
    "duration": lambda seconds: "" if seconds is None else format_duration(max(0.0, seconds)),
}
_templates.globals |= {"top": TOP, "version": VERSION, "csrf_field": CSRF_FIELD}


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> Response:
    """Returns a page, or its changing part if the script has asked for it: 304 if the browser has this version.

    A part has no token of the login, because other logins get the same part (`console.shared_parts`).
    """
    is_part = PART in request.headers
    login = {} if is_part else {"csrf": request.scope.get(CSRF, "")}
    text = _templates.get_template(template).render(
        is_part=is_part, caller=caller_of(request.scope), path=request.url.path,
        here=f"{request.url.path}?{request.url.query}".rstrip("?"), state=request.app.state.mizzen, key_labels={},
        **login, **values,
    )  # fmt: skip
    if not is_part:
        return HTMLResponse(text, status)
    etag = f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": "private, no-cache", "Vary": "HX-Request, Cookie"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return HTMLResponse(text, status, headers)


def temporal_link(state: ApiState, caller: Caller, workflow_id: str) -> str | None:
    """Returns the URL of a workflow's runs in Temporal's UI; None: there is no UI, or the caller is no operator."""
    if state.temporal_ui is None or not caller.may(Role.OPERATOR):
        return None
    query = quote(f'WorkflowId="{workflow_id}"', safe="")
    return f"{UI_PATH}/namespaces/{quote(state.settings.temporal.namespace, safe='')}/workflows?query={query}"


def problem_page(problem: HttpProblem, scope: Scope) -> Response:
    """Returns the page of an error of a request."""
    body = problem.to_json()
    return _problem(body, {name: str(value) for name, value in (problem.headers or {}).items()}, scope)


def _problem(body: dict[str, Any], headers: dict[str, str], scope: Scope) -> Response:
    text = _templates.get_template("problem.html").render(
        is_part=False, caller=caller_of(scope), path=scope["path"], csrf=scope.get(CSRF, ""), here=TOP, problem=body
    )  # fmt: skip
    return HTMLResponse(text, body["status"], headers)


def install(app: FastAPI) -> None:
    """Makes the errors of requests under `/console` pages. Call it after `api.problems.install`."""
    for kind, handler in list(app.exception_handlers.items()):
        app.add_exception_handler(kind, partial(_in_page, handler))  # type: ignore[arg-type]


async def _in_page(
    handler: Callable[[Request, Exception], Awaitable[Response]], request: Request, error: Exception
) -> Response:
    response = await handler(request, error)
    if response.media_type != MEDIA_TYPE or not is_below(request.url.path, TOP):
        return response
    if response.status_code != 401:
        return _problem(json.loads(bytes(response.body)), {}, request.scope)
    if PART in request.headers:
        return Response(status_code=204, headers={"HX-Redirect": LOGIN})
    wanted = f"{request.url.path}?{request.url.query}".rstrip("?") if request.method == "GET" else TOP
    return RedirectResponse(f"{LOGIN}?next={quote(wanted, safe='')}", 303)


@router.get("/{path:path}")
def no_page(path: str) -> Response:
    """Answers 404 for every path that has no page."""
    raise not_found("page", f"{TOP}/{path}")
