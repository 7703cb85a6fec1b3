"""Logins with the device flow of an OIDC issuer (RFC 8628), and the renewal of their tokens.

The user opens a page of the issuer in any browser and confirms a code there; the command polls for the tokens.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from mizzen_client.errors import NotConfigured, Unreachable
from mizzen_client.transport import tls_context

LOGIN_PATH = "/.well-known/mizzen-login"
_DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_HERE = ("localhost", "127.0.0.1", "::1")
_ANSWER_S = 20.0
_INTERVAL_S = 5.0
"""Default time between two polls, and the amount by which a `slow_down` response lengthens it."""
_SOONER_S = 60.0
"""How long before its expiry a token is renewed."""


@dataclass(frozen=True)
class Login:
    """The tokens of an issuer, and the data for their renewal."""

    token: str = field(repr=False)
    expires_at_s: float
    """When the token expires, in seconds since 1970."""
    refresh_token: str | None = field(repr=False)
    token_endpoint: str
    client_id: str
    kind: str
    """Which token of the issuer the API accepts: `id_token` or `access_token`."""

    @property
    def is_fresh(self) -> bool:
        """Whether the token can still be used."""
        return time.time() < self.expires_at_s - _SOONER_S


def login_settings(url: str, ca: str | None) -> dict[str, str] | None:
    """Return the settings for logins of the API at `url`; None: it has no issuer.

    Raises:
        Unreachable: the API does not answer.
        NotConfigured: the file `ca` is unusable.
    """
    with _client(url, ca) as client:
        answer = _sent(client, "GET", url.rstrip("/") + LOGIN_PATH)
    found = _json(answer) if answer.status_code == 200 else {}
    needed = ("issuer", "client_id", "scope", "token")
    return {name: str(found[name]) for name in needed} if all(name in found for name in needed) else None


def log_in(settings: Mapping[str, str], ca: str | None, show: Callable[[str, str], None]) -> Login:
    """Get tokens with the device flow. `show` is called with the page to open and the code to confirm there.

    Raises:
        NotConfigured: the issuer has no device flow, or the user or the issuer refuses.
        Unreachable: the issuer does not answer.
    """
    issuer, client_id = settings["issuer"], settings["client_id"]
    if urlsplit(issuer).scheme != "https" and urlsplit(issuer).hostname not in _HERE:
        raise NotConfigured(f"issuer {issuer!r}: must be https")
    with _client(issuer, ca) as client:
        found = _json(_sent(client, "GET", issuer.rstrip("/") + "/.well-known/openid-configuration"))
        if found.get("issuer") != issuer:
            raise NotConfigured(f"{issuer}: its configuration names the issuer {found.get('issuer')!r}")
        asks, gives = found.get("device_authorization_endpoint"), found.get("token_endpoint")
        if not asks or not gives:
            raise NotConfigured(f"{issuer} has no device flow; log in with an API key (--key -)")
        for endpoint in (asks, gives):
            if urlsplit(str(endpoint)).scheme != urlsplit(issuer).scheme:
                raise NotConfigured(f"{issuer}: its endpoint {endpoint!r} must be {urlsplit(issuer).scheme}")
        asked = _json(_sent(client, "POST", asks, {"client_id": client_id, "scope": settings["scope"]}))
        if "device_code" not in asked:
            raise NotConfigured(f"{issuer} refuses the device flow: {_why(asked)}")
        show(str(asked.get("verification_uri_complete") or asked["verification_uri"]), str(asked["user_code"]))
        give_up_s = time.monotonic() + float(asked.get("expires_in", 600))
        pause_s = float(asked.get("interval", _INTERVAL_S))
        form = {"grant_type": _DEVICE_GRANT, "device_code": asked["device_code"], "client_id": client_id}
        while True:
            time.sleep(pause_s)
            if time.monotonic() > give_up_s:
                raise NotConfigured("the code was not confirmed in time; run `mizzen login` again")
            try:
                answer = _json(_sent(client, "POST", gives, form))
            except Unreachable:
                pause_s *= 2  # As RFC 8628 asks.
                continue
            if "error" not in answer:
                break
            if answer["error"] == "slow_down":
                pause_s += _INTERVAL_S
            elif answer["error"] != "authorization_pending":
                raise NotConfigured(f"{issuer} refuses the login: {_why(answer)}")
    empty = Login("", 0.0, None, str(gives), client_id, settings["token"])
    return _with_tokens(empty, answer)


def renew(login: Login, ca: str | None) -> Login:
    """Return new tokens.

    Raises:
        NotConfigured: there is no refresh token, or the issuer does not accept it.
        Unreachable: the issuer does not answer.
    """
    again = "run `mizzen login` again"
    if login.refresh_token is None:
        raise NotConfigured(f"the login has expired, and the issuer gave no token to renew it; {again}")
    form = {"grant_type": "refresh_token", "refresh_token": login.refresh_token, "client_id": login.client_id}
    with _client(login.token_endpoint, ca) as client:
        answer = _json(_sent(client, "POST", login.token_endpoint, form))
    if "error" in answer:
        raise NotConfigured(f"the login cannot be renewed: {_why(answer)}; {again}")
    return _with_tokens(login, answer)


def _with_tokens(login: Login, answer: Mapping[str, Any]) -> Login:
    token = answer.get(login.kind)
    if not isinstance(token, str):
        raise NotConfigured(
            f"{login.token_endpoint} returned no {login.kind}; the API's operator must correct api.oidc"
        )
    lifetime_s = float(answer.get("expires_in", 300))
    return replace(
        login,
        token=token,
        expires_at_s=time.time() + lifetime_s,
        refresh_token=answer.get("refresh_token", login.refresh_token),
    )


def _client(url: str, ca: str | None) -> httpx.Client:
    parts = urlsplit(url)
    return httpx.Client(timeout=_ANSWER_S, verify=tls_context(parts.scheme, ca), trust_env=parts.hostname not in _HERE)


def _sent(client: httpx.Client, method: str, url: str, form: Mapping[str, str] | None = None) -> httpx.Response:
    try:
        answer = client.request(method, url, data=form, headers={"accept": "application/json"})
    except httpx.HTTPError as error:
        raise Unreachable(f"no response from {url}: {error or type(error).__name__}") from None
    if answer.status_code >= 500:
        raise Unreachable(f"{url} answers {answer.status_code}")
    return answer


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise NotConfigured(f"{answer.url} does not answer with a JSON object ({answer.status_code})")
    return body


def _why(answer: Mapping[str, Any]) -> str:
    error = str(answer.get("error", "no reason"))
    said = answer.get("error_description")
    return f"{error}: {said}" if said else error
