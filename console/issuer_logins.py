"""Log in at the OIDC issuer, and come back: `api.oidc_code_flow`.

The state of a login is in a signed cookie of its own, for a few minutes, so no other browser can end it.
"""

import base64
import hmac
import json
import time
from dataclasses import asdict
from typing import Annotated

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse

from api.oidc import Tokens
from api.oidc_code_flow import PendingLogin, address, has_nonce, token
from api.problems import HttpProblem, ProblemType
from api.routing import Router
from api.state import ApiState, StateOf
from console.cookies import Signer
from console.logins import entered, login_page, own
from console.pages import TOP
from infra.config.oidc import OidcSettings

router = Router(prefix=TOP, include_in_schema=False)
LOGIN_COOKIE = "mizzen_login"
BACK = f"{TOP}/login/back"
_LOGIN_S = 600
_Text = Annotated[str, Query(max_length=4096)]


def _issuer(state: ApiState) -> tuple[Tokens, OidcSettings]:
    oidc = state.settings.api.oidc
    if state.tokens is None or oidc is None or oidc.client_id is None:
        raise HttpProblem(ProblemType.NOT_FOUND, "api.oidc.client_id is not set: log in with a key or a token")
    return state.tokens, oidc


@router.get("/login/issuer")
async def go_to_issuer(request: Request, state: StateOf, next: _Text = TOP) -> Response:
    """Sends the browser to the issuer."""
    tokens, oidc = _issuer(state)
    pending = PendingLogin.new()
    try:
        where = await address(tokens.issuer, oidc, pending, _back(request))
    except HttpProblem as problem:
        return login_page(request, state, next, problem.detail, problem.status_code)
    kept = {**asdict(pending), "next": own(next), "until_s": time.time() + _LOGIN_S}
    content = base64.urlsafe_b64encode(json.dumps(kept).encode()).decode()
    signer: Signer = request.app.state.console
    answer = RedirectResponse(where, 303)
    answer.set_cookie(
        LOGIN_COOKIE, f"{content}.{signer.sign('login', content)}", max_age=_LOGIN_S, path=f"{TOP}/login",
        secure=request.url.scheme == "https", httponly=True, samesite="lax",
    )  # fmt: skip
    return answer


@router.get("/login/back")
async def come_back(
    request: Request,
    state: StateOf,
    code: _Text = "",
    issued: Annotated[str, Query(alias="state", max_length=200)] = "",
    error: _Text = "",
) -> Response:
    """Ends a login: the browser comes from the issuer, with a code for the token."""
    tokens, oidc = _issuer(state)
    kept = _kept(request)
    if kept is None or not hmac.compare_digest(issued.encode(), kept[0].state.encode()):
        why = "This browser has not begun this login, or it took longer than ten minutes. Log in again."
        return login_page(request, state, TOP, why, 403)
    pending, target = kept
    try:
        if error or not code:
            raise HttpProblem(ProblemType.FORBIDDEN, f"the issuer has refused the login: {error[:200] or 'no code'}")
        given = await token(tokens.issuer, oidc, pending, code, _back(request))
        if oidc.token == "id_token" and not has_nonce(given, pending):
            raise HttpProblem(ProblemType.FORBIDDEN, "the issuer's token belongs to another login")
        answer = await entered(request, state, given, target)
    except HttpProblem as problem:
        answer = login_page(request, state, target, problem.detail, problem.status_code)
    answer.delete_cookie(LOGIN_COOKIE, path=f"{TOP}/login")
    return answer


def _back(request: Request) -> str:
    return str(request.url.replace(path=BACK, query=""))


def _kept(request: Request) -> tuple[PendingLogin, str] | None:
    """Returns the login that this browser has begun, and the page to open then."""
    content, _, signature = request.cookies.get(LOGIN_COOKIE, "").partition(".")
    signer: Signer = request.app.state.console
    if not signature.isascii() or not hmac.compare_digest(signature, signer.sign("login", content)):
        return None
    kept = json.loads(base64.urlsafe_b64decode(content))
    if time.time() > kept.pop("until_s"):
        return None
    target = kept.pop("next")
    return PendingLogin(**kept), target
