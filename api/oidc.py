"""Verifies OIDC tokens, which are accepted like API keys, and maps their claims to a role and a tenant.

The issuer's keys are read in a separate thread, and a token with an unknown key gets 503 meanwhile. So while the issuer
does not answer, API keys and tokens with a known key still work.
"""

import asyncio
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import httpx
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import JWKRegistry, Key
from joserfc.jws import extract_compact

from api.auth import Caller, LoginFailed, Role
from api.problems import HttpProblem, ProblemType
from domain.ids import NAME_RULE, is_name
from infra.config.oidc import OidcSettings

DISCOVERY = "/.well-known/openid-configuration"
_MAX_TOKEN = 16_384
_MAX_ID = 200
_MAX_DOCUMENT_BYTES = 1 << 20
_FETCH_S = 10.0
"""Longest time of one request to the issuer."""
_AGAIN_S = 30.0
"""Shortest time between two reads of the issuer's keys. A newer key of the issuer is refused until the next read."""
_FRESH_S = 3600.0
"""Age at which the keys are read again, so that keys which the issuer has withdrawn are no longer accepted."""
_TRUSTED_S = 86400.0
"""Age at which keys are no longer accepted, if the issuer has not answered since."""
_POLL_S = 0.05
_ENDPOINTS = ("authorization_endpoint", "token_endpoint")
_log = logging.getLogger(__name__)


class Issuer:
    """The signing keys of the issuer."""

    def __init__(self, settings: OidcSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._keys: dict[str | None, Key] = {}
        self._read_s, self._tried_s = float("-inf"), float("-inf")
        self._lock = threading.Lock()
        self._reading: threading.Thread | None = None
        self._endpoints: dict[str, str] = {}
        self.why = ""
        """Why the last try to read the keys failed; empty: it succeeded."""

    def key(self, kid: str | None) -> Key:
        """Returns the key with this id. Does not wait for the issuer.

        Raises:
            HttpProblem: 503, the keys are being read, or the issuer does not answer.
            KeyError: the issuer has no such key.
        """
        now_s = self._clock()
        found = self._keys.get(kid)
        age_s = now_s - self._read_s
        reading = self._refresh(now_s) if found is None or age_s > _FRESH_S else False
        if found is not None and age_s <= _TRUSTED_S:
            return found
        if reading:
            raise _unavailable("the issuer's keys are being read; retry")
        if self.why or age_s > _TRUSTED_S:
            raise _unavailable(f"the issuer {self._settings.issuer} cannot be asked for its keys: {self.why}")
        raise KeyError(kid)

    async def endpoint(self, name: str) -> str:
        """Returns the URL of one of the issuer's endpoints (RFC 8414); waits while its configuration is read.

        Raises:
            HttpProblem: 503, the issuer does not answer, or has no such endpoint.
        """
        if self._clock() - self._read_s > _FRESH_S:
            while self._refresh(self._clock()):
                await asyncio.sleep(_POLL_S)
        if name not in self._endpoints:
            raise _unavailable(self.why or f"the issuer {self._settings.issuer} has no {name}, or an unsafe one")
        return self._endpoints[name]

    def tls(self) -> ssl.SSLContext:
        """Returns the authorities to trust in connections to the issuer."""
        found = ssl.create_default_context()
        if self._settings.ca is not None:
            found.load_verify_locations(self._settings.ca)
        return found

    def _refresh(self, now_s: float) -> bool:
        """Starts a read, unless one was started recently. Returns whether one is in progress."""
        with self._lock:
            if self._reading is not None and self._reading.is_alive():
                return True
            if now_s - self._tried_s < _AGAIN_S:
                return False
            self._tried_s = now_s
            self._reading = threading.Thread(target=self._read, name="issuer", daemon=True)
            self._reading.start()
            return True

    def _read(self) -> None:
        issuer = self._settings.issuer
        try:
            with httpx.Client(timeout=_FETCH_S, verify=self.tls(), follow_redirects=False) as client:
                found = _document(client, issuer.rstrip("/") + DISCOVERY)
                if found.get("issuer") != issuer:
                    raise ValueError(f"its configuration names the issuer {found.get('issuer')!r}")
                where = str(found.get("jwks_uri"))
                if not OidcSettings.is_safe(where):
                    raise ValueError(f"jwks_uri {where!r} must be https")
                given = _document(client, where).get("keys")
            self._endpoints = {
                name: url for name in _ENDPOINTS if OidcSettings.is_safe(url := str(found.get(name, "")))
            }
            keys = {key.kid: key for entry in given or () if (key := _key(entry)) is not None}
            if len(keys) == 1:
                keys[None] = next(iter(keys.values()))  # If there is only one key, tokens may omit its id.
            self._keys, self._read_s, self.why = keys, self._clock(), ""
        except Exception as error:
            self.why = str(error) or type(error).__name__
            _log.warning("the keys of the issuer %s cannot be read: %s", issuer, self.why)


class Tokens:
    """Checks tokens and returns their callers."""

    def __init__(self, settings: OidcSettings, issuer: Issuer | None = None) -> None:
        self._settings = settings
        self.issuer = issuer or Issuer(settings)

    def caller(self, token: str) -> Caller:
        """Returns the caller for a token.

        Raises:
            LoginFailed: 401, the token is not valid, or no rule gives it a role.
            HttpProblem: 503, its key cannot be read now.
        """
        claims = self._claims(token)
        subject = claims["sub"]
        if not isinstance(subject, str) or not 0 < len(subject) <= _MAX_ID or not subject.isprintable():
            raise _refused("claim sub: must be a text of at most 200 characters")
        label = claims.get("email") or claims.get("preferred_username") or claims.get("name") or ""
        expires_at = datetime.fromtimestamp(claims["exp"], UTC)
        role, tenant = self._role(claims)
        shown = "".join(char for char in str(label) if char.isprintable())[:_MAX_ID]
        return Caller(f"oidc:{subject}", role, tenant, shown, expires_at, is_token=True)

    def _claims(self, token: str) -> dict[str, Any]:
        if len(token) > _MAX_TOKEN:
            raise _refused(f"has more than {_MAX_TOKEN} characters")
        try:
            header = extract_compact(token.encode()).headers()
            if header.get("alg") not in self._settings.algorithms:
                allowed = ", ".join(self._settings.algorithms)
                raise _refused(f"algorithm {str(header.get('alg'))[:20]!r}: must be one of {allowed}")
            key = self.issuer.key(header.get("kid"))
            claims = jwt.decode(token, key, algorithms=list(self._settings.algorithms)).claims
        except (JoseError, ValueError, TypeError) as error:
            raise _refused(f"is not a signed token of the issuer ({type(error).__name__})") from None
        except KeyError:
            raise _refused("was signed with a key that the issuer does not have") from None
        self._check(claims)
        return claims

    def _check(self, claims: Mapping[str, Any]) -> None:
        """Checks the registered claims. Raises `LoginFailed`."""
        settings, now_s = self._settings, time.time()
        if claims.get("iss") != settings.issuer:
            raise _refused(f"claim iss: must be {settings.issuer}")
        audience = claims.get("aud")
        if settings.audience not in (audience if isinstance(audience, list) else [audience]):
            raise _refused(f"claim aud: must contain {settings.audience}")
        for name, is_needed in (("exp", True), ("nbf", False), ("iat", False)):
            at_s = claims.get(name)
            if at_s is None and not is_needed:
                continue
            if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0 <= at_s < 1e11:
                raise _refused(f"claim {name}: must be seconds since 1970")
            if name == "exp" and at_s + settings.leeway_s <= now_s:
                raise _refused("has expired; log in again")
            if name != "exp" and at_s - settings.leeway_s > now_s:
                raise _refused(f"claim {name}: is in the future")
        if "sub" not in claims:
            raise _refused("claim sub: is missing")

    def _role(self, claims: Mapping[str, Any]) -> tuple[Role, str | None]:
        """Returns the role and the tenant of the first rule that fits."""
        for rule in self._settings.rules:
            value = claims.get(rule.claim)
            if rule.value not in (value if isinstance(value, list) else [value]):
                continue
            tenant = rule.tenant
            if rule.tenant_claim is not None:
                tenant = claims.get(rule.tenant_claim)
                if not isinstance(tenant, str) or not is_name(tenant):
                    raise _refused(f"claim {rule.tenant_claim}: must be the name of a tenant, {NAME_RULE}")
            return Role(rule.role), tenant
        raise _refused("no rule of api.oidc.rules gives its claims a role")


def _refused(why: str) -> LoginFailed:
    return LoginFailed("refused token", f"the token {why}" if " " in why else why, is_token=True)


def _unavailable(why: str) -> HttpProblem:
    return HttpProblem(ProblemType.NOT_READY, f"login with tokens: {why}", headers={"Retry-After": "1"})


def _document(client: httpx.Client, url: str) -> dict[str, Any]:
    """Returns a JSON object. Its size and the time for it are limited."""
    give_up_s, body = time.monotonic() + _FETCH_S, b""
    with client.stream("GET", url, headers={"accept": "application/json"}) as answer:
        if answer.status_code != 200:
            raise ValueError(f"{url} answers {answer.status_code}")
        for piece in answer.iter_bytes():
            body += piece
            if len(body) > _MAX_DOCUMENT_BYTES or time.monotonic() > give_up_s:
                raise ValueError(f"{url} answers with more than {_MAX_DOCUMENT_BYTES} bytes or too slowly")
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError(f"{url} does not answer with a JSON object")
    return found


def _key(entry: Any) -> Key | None:
    """Returns the public key if it is for signatures and of a supported kind, else None."""
    if not isinstance(entry, dict) or entry.get("kty") not in ("RSA", "EC") or entry.get("use", "sig") != "sig":
        return None
    try:
        return JWKRegistry.import_key(entry)
    except (JoseError, ValueError, TypeError, KeyError):
        return None
