"""Log in with an API key or a token of the issuer, and log out."""

import re
from datetime import UTC, datetime, timedelta

from fastapi import Request, Response
from fastapi.responses import RedirectResponse
from starlette.concurrency import run_in_threadpool

from api.auth import AnyKey, Caller, LoginFailed, Role
from api.problems import HttpProblem, ProblemType
from api.routing import Router
from api.state import ApiState, StateOf
from console.cookies import COOKIE, Form, Signer, hash_secret, read_form, secret_of
from console.pages import LOGIN, TOP, page
from infra.db.console_sessions import ConsoleSession, close_session, open_session

router = Router(prefix=TOP, include_in_schema=False)
_OWN = re.compile(rf"{TOP}(/[\w./~%-]*)?(\?[\w./~%&=+:-]*)?", re.ASCII)


def _own(target: str) -> str:
    """Returns where to go after the login: `target`, if it is a page of the console."""
    return target if _OWN.fullmatch(target) else TOP


@router.get("/login")
def show_login(request: Request, next: str = TOP) -> Response:
    """Shows the form to log in."""
    return page(request, "login.html", next=_own(next), why=None)


@router.post("/login")
async def log_in(request: Request, state: StateOf) -> Response:
    """Opens a session for a key or a token, and goes to the page that the browser wanted."""
    fields = await read_form(request)
    target = _own(fields.get("next", TOP))
    try:
        caller = await state.logins.caller(request.scope, f"Bearer {fields.get('key', '').strip()}")
        if not caller.may(Role.VIEWER):
            message = f"the console requires the role viewer; the key has the role {caller.role.value}"
            raise HttpProblem(ProblemType.FORBIDDEN, message)
    except HttpProblem as problem:
        why = "Enter a key." if isinstance(problem, LoginFailed) and not fields.get("key") else problem.detail
        return page(request, "login.html", status=problem.status_code, next=target, why=why)
    signer: Signer = request.app.state.console
    sha256, cookie = signer.new_cookie()
    await run_in_threadpool(_open, state, caller, sha256)
    answer = RedirectResponse(target, 303)
    answer.set_cookie(
        COOKIE, cookie, path=TOP, secure=request.url.scheme == "https", httponly=True, samesite="lax"
    )  # fmt: skip
    return answer


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
