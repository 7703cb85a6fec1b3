"""Log in with an API key or a token of the issuer, and log out."""

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse
from starlette.concurrency import run_in_threadpool

from api.auth import AnyKey, Caller, LoginFailed, Role, Viewer
from api.problems import HttpProblem, ProblemType
from api.routing import Router
from api.state import ApiState, StateOf
from console.cookies import COOKIE, Form, Signer, check_site, read_form, secret_of
from console.pages import LOGIN, TOP, owner_page, page
from infra.db.console_sessions import (
    LINK_PATH,
    ConsoleSession,
    close_session,
    hash_secret,
    new_link,
    open_session,
    take_link,
)

router = Router(prefix=TOP, include_in_schema=False)
link_router = Router(include_in_schema=False)
LINKS = "/v1/console-links"
"""Path of the endpoint that creates links. It takes a key, not the cookie."""
_OWN = re.compile(rf"{TOP}(/[\w./~%-]*)?(\?[\w./~%&=+:-]*)?", re.ASCII)


def own(target: str) -> str:
    """Returns the page to open after the login: `target`, if it is a page of the console, else the first page."""
    return target if _OWN.fullmatch(target) else TOP


def login_page(request: Request, state: ApiState, next: str, why: str | None = None, status: int = 200) -> Response:
    """Returns the page to log in. `why`: why the last try has failed."""
    oidc = state.settings.api.oidc
    issuer = None if oidc is None or oidc.client_id is None else urlsplit(oidc.issuer).hostname
    return page(request, "login.html", status=status, next=own(next), why=why, issuer=issuer)


@router.get("/login")
def show_login(request: Request, state: StateOf, next: str = TOP) -> Response:
    """Shows the form to log in."""
    return login_page(request, state, next)


@router.post("/login")
async def log_in(request: Request, state: StateOf) -> Response:
    """Opens a session for a key or a token, and redirects to the page that the browser requested before."""
    fields = await read_form(request)
    target = fields.get("next", TOP)
    try:
        return await entered(request, state, fields.get("key", "").strip(), target)
    except HttpProblem as problem:
        why = "Enter a key." if isinstance(problem, LoginFailed) and not fields.get("key") else problem.detail
        return login_page(request, state, target, why, problem.status_code)


async def entered(request: Request, state: ApiState, key: str, target: str) -> Response:
    """Opens a session for a key or a token, and redirects to `target`.

    Raises:
        HttpProblem: they are not valid, or their role may not use the console.
    """
    caller = await state.logins.caller(request.scope, f"Bearer {key}")
    if not (caller.may(Role.VIEWER) or caller.role is Role.MACHINE):
        message = f"the console requires the role viewer; the key has the role {caller.role.value}"
        raise HttpProblem(ProblemType.FORBIDDEN, message)
    signer: Signer = request.app.state.console
    sha256, cookie = signer.new_cookie()
    await run_in_threadpool(_open, state, caller, sha256)
    return _entered(request, own(target), caller.machine, cookie)


def _entered(request: Request, target: str, machine: str | None, cookie: str) -> Response:
    answer = RedirectResponse(target if machine is None else owner_page(machine), 303)
    answer.set_cookie(
        COOKIE, cookie, path=TOP, secure=request.url.scheme == "https", httponly=True, samesite="lax"
    )  # fmt: skip
    return answer


@link_router.post(LINKS, status_code=201)
def create_link(state: StateOf, caller: Viewer) -> dict[str, str]:
    """Returns the path of a link that logs one browser in with the key of the request, once."""
    if caller.is_token:
        raise HttpProblem(ProblemType.FORBIDDEN, "links need an API key; log in with the token itself")
    with state.transaction() as session:
        return {"path": new_link(session, caller.id)}


@router.get(LINK_PATH.removeprefix(TOP))
def enter_by_link(request: Request, state: StateOf, link: Annotated[str, Query(max_length=100)] = "") -> Response:
    """Logs the browser in with a link that works once. Requests that come from a page of another site are refused."""
    check_site(request)
    with state.transaction() as session:
        key = take_link(session, link)
        if key is None:
            why = "The link was used, or has expired. `mizzen console` prints another one."
            return login_page(request, state, TOP, why, 401)
        signer: Signer = request.app.state.console
        sha256, cookie = signer.new_cookie()
        ends = datetime.now(UTC) + timedelta(seconds=state.settings.api.console_session_s)
        expires_at = ends if key.expires_at is None else min(ends, key.expires_at)
        open_session(session, ConsoleSession(sha256=sha256, key=key.id, expires_at=expires_at))
        return _entered(request, TOP, key.machine, cookie)


def _open(state: ApiState, caller: Caller, sha256: str) -> None:
    ends = [datetime.now(UTC) + timedelta(seconds=state.settings.api.console_session_s)]
    ends += [] if caller.expires_at is None else [caller.expires_at]
    token = {"id": caller.id, "role": caller.role.value, "tenant": caller.tenant, "label": caller.label}
    made = ConsoleSession(
        sha256=sha256, key=None if caller.is_token else caller.id, token=token if caller.is_token else None,
        expires_at=min(ends),
    )  # fmt: skip
    with state.transaction() as session:
        open_session(session, made)


@router.post("/logout")
def log_out(request: Request, state: StateOf, _: AnyKey, __: Form) -> Response:
    """Ends the session of the browser. Its open pages end within seconds."""
    with state.transaction() as session:
        close_session(session, hash_secret(secret_of(request.scope) or ""))
    answer = RedirectResponse(LOGIN, 303)
    answer.delete_cookie(COOKIE, path=TOP)
    return answer
