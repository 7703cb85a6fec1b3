"""Logins at the issuer with a browser: the authorization code flow with PKCE (OpenID Connect Core 3.1, RFC 7636)."""

import base64
import hashlib
import json
import secrets
from dataclasses import dataclass
from urllib.parse import urlencode

import httpx

from api.auth import LoginFailed
from api.oidc import Issuer
from api.problems import HttpProblem, ProblemType
from infra.config.oidc import OidcSettings

_ANSWER_S = 10.0
_MAX_ANSWER_BYTES = 1 << 18


@dataclass(frozen=True)
class PendingLogin:
    """What a login needs at its end; only its own browser may know it."""

    state: str
    verifier: str
    nonce: str

    @classmethod
    def new(cls) -> "PendingLogin":
        """Returns a login that begins now."""
        return cls(*(secrets.token_urlsafe(32) for _ in range(3)))


async def address(issuer: Issuer, settings: OidcSettings, pending: PendingLogin, back: str) -> str:
    """Returns the address at the issuer where the user logs in. From there the browser is sent to `back`.

    Raises:
        HttpProblem: 503, the issuer does not answer.
    """
    where = await issuer.endpoint("authorization_endpoint")
    challenge = base64.urlsafe_b64encode(hashlib.sha256(pending.verifier.encode()).digest()).rstrip(b"=").decode()
    asked = {
        "response_type": "code", "client_id": settings.client_id, "redirect_uri": back, "scope": _scope(settings),
        "state": pending.state, "nonce": pending.nonce, "code_challenge": challenge, "code_challenge_method": "S256",
    }  # fmt: skip
    return f"{where}{'&' if '?' in where else '?'}{urlencode(asked)}"


async def token(issuer: Issuer, settings: OidcSettings, pending: PendingLogin, code: str, back: str) -> str:
    """Returns the token for a code that the issuer has given to the browser. The token is not verified yet.

    Raises:
        LoginFailed: 401, the issuer refuses the code.
        HttpProblem: 503, the issuer does not answer.
    """
    where = await issuer.endpoint("token_endpoint")
    form = {
        "grant_type": "authorization_code", "code": code, "redirect_uri": back, "code_verifier": pending.verifier,
        "client_id": str(settings.client_id),
    }  # fmt: skip
    try:
        secret = settings.client_secret()
        proof = None if secret is None else httpx.BasicAuth(str(settings.client_id), secret)
        body = b""
        async with (
            httpx.AsyncClient(timeout=_ANSWER_S, verify=issuer.tls(), follow_redirects=False) as client,
            client.stream("POST", where, data=form, auth=proof or httpx.USE_CLIENT_DEFAULT) as answer,
        ):
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > _MAX_ANSWER_BYTES:
                    raise ValueError(f"it answers with more than {_MAX_ANSWER_BYTES} bytes")
        found = json.loads(body)
        given = found.get(settings.token) if isinstance(found, dict) else None
        if answer.status_code != 200 or not isinstance(given, str):
            why = found.get("error") if isinstance(found, dict) else None
            raise LoginFailed("refused token", f"the issuer answers {answer.status_code}, {why!r}", is_token=True)
    except (httpx.HTTPError, ValueError) as error:
        message = f"the issuer {settings.issuer} gave no token: {error or type(error).__name__}"
        raise HttpProblem(ProblemType.NOT_READY, message, headers={"Retry-After": "1"}) from None
    return given


def has_nonce(token: str, pending: PendingLogin) -> bool:
    """Returns whether an ID token says that it was issued for this login. Its signature is not verified."""
    try:
        nonce = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))["nonce"]
    except (ValueError, LookupError, TypeError):
        return False
    return secrets.compare_digest(str(nonce).encode(), pending.nonce.encode())


def _scope(settings: OidcSettings) -> str:
    return " ".join(one for one in settings.scope.split() if one != "offline_access")  # The token is not refreshed.
