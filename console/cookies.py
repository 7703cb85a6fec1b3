"""The cookie of a browser that has logged in, and the secret that its forms must contain.

The cookie has a random secret and its signature; Postgres has the secret's hash, with the key or the token of the
login. Each request looks them up, so a login ends at once if its key does.
"""

import hmac
import secrets
from functools import cached_property
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from fastapi import Depends, Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.auth import Logins, enter, is_below
from api.problems import HttpProblem, ProblemType
from console.pages import CSRF, CSRF_FIELD, TOP, problem_page
from infra.db.console_sessions import hash_secret
from infra.errors import ConfigurationError
from infra.keys import load_master_key

COOKIE = "mizzen_console"
_SECRET = "mizzen.console-secret"
_MOST_FIELDS = 50
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; worker-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Signer:
    """Signs with a key that is derived from the master key."""

    def __init__(self, master_key_path: Path) -> None:
        self._path = master_key_path

    @cached_property
    def _key(self) -> bytes:
        return hmac.digest(load_master_key(self._path), b"console", "sha256")

    def sign(self, purpose: str, secret: str) -> str:
        """Returns the signature of a secret for one purpose.

        Raises:
            HttpProblem: 503, the master key cannot be read.
        """
        try:
            return hmac.new(self._key, f"{purpose} {secret}".encode(), "sha256").hexdigest()
        except ConfigurationError as error:
            raise HttpProblem(ProblemType.NOT_READY, f"the console needs the master key: {error}") from None

    def new_cookie(self) -> tuple[str, str]:
        """Returns the hash of a new secret, and the cookie that contains the secret."""
        secret = secrets.token_urlsafe(32)
        return hash_secret(secret), f"{secret}.{self.sign('cookie', secret)}"

    def opened(self, cookie: str) -> str | None:
        """Returns the secret in a cookie; None: its signature is not valid."""
        secret, _, signature = cookie.partition(".")
        is_good = secret and signature.isascii() and hmac.compare_digest(signature, self.sign("cookie", secret))
        return secret if is_good else None


def secret_of(scope: Scope) -> str | None:
    """Returns the secret of the login with which a request was sent; None: it has no valid login."""
    secret = scope.get(_SECRET)
    return secret if isinstance(secret, str) else None


class BrowserLogins:
    """ASGI middleware: the caller of a request under `/console` is the one who has logged in with its cookie.

    It also adds the headers that keep scripts and pages of others away.
    """

    def __init__(self, app: ASGIApp, logins: Logins, signer: Signer) -> None:
        self._app = app
        self._logins = logins
        self._signer = signer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http" or not is_below(scope["path"], TOP):
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault(
                    "Cache-Control", "no-cache" if is_below(scope["path"], f"{TOP}/static") else "no-store"
                )
            await send(message)

        try:
            await self._log_in(scope)
        except HttpProblem as problem:
            await problem_page(problem, scope)(scope, receive, guarded)
        else:
            await self._app(scope, receive, guarded)

    async def _log_in(self, scope: Scope) -> None:
        cookie = _cookie(Headers(scope=scope).get("cookie", ""))
        secret = None if cookie is None else self._signer.opened(cookie)
        if secret is not None and (caller := await self._logins.of_browser(hash_secret(secret))) is not None:
            enter(scope, caller)
            scope[_SECRET], scope[CSRF] = secret, self._signer.sign("csrf", secret)


def _cookie(header: str) -> str | None:
    try:
        found = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return None
    return None if found is None else found.value


def check_site(request: Request) -> None:
    """Raises 403 if a page of another site has sent a request."""
    headers = request.headers
    site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
    if site not in ("none", "same-origin") or (origin is not None and urlsplit(origin).netloc != headers.get("host")):
        raise HttpProblem(ProblemType.FORBIDDEN, "the request was sent by another site; open the page here, and retry")


async def read_form(request: Request) -> dict[str, str]:
    """Returns the fields of a form that a page of this console has sent.

    Raises:
        HttpProblem: 403, another site has sent it; 400, it is no form.
    """
    check_site(request)
    try:
        fields = parse_qsl((await request.body()).decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except ValueError as error:
        raise HttpProblem(ProblemType.MALFORMED_REQUEST, f"the body is not a form: {error}") from None
    return dict(fields)


async def _form(request: Request) -> dict[str, str]:
    fields = await read_form(request)
    wanted = request.scope.get(CSRF, "")
    given = fields.pop(CSRF_FIELD, "")
    if not (wanted and given.isascii() and hmac.compare_digest(given, wanted)):
        message = "the form does not belong to this login; reload the page, and send the form again"
        raise HttpProblem(ProblemType.FORBIDDEN, message)
    return fields


Form = Annotated[dict[str, str], Depends(_form)]
"""The fields of a form of this login. Every endpoint that changes something takes it."""
