"""Logins with tokens of an OIDC issuer: who they are, and every token that must be refused."""

import base64
import hmac
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from joserfc.jwk import RSAKey

from api.auth import Caller, LoginFailed, Role
from api.oidc import Issuer, Tokens
from api.problems import HttpProblem
from infra.config.oidc import OidcSettings
from infra.config.settings import load_settings
from infra.errors import ConfigurationError
from infra.stack.ports import free_port
from tests.api.issuers import AUDIENCE, PackagedIssuer, SigningIssuer, served
from tests.api.world import make_world

RULES = [
    {"claim": "groups", "value": "operators", "role": "operator"},
    {"claim": "groups", "value": "train", "role": "submitter", "tenant_claim": "team"},
    {"claim": "team", "value": "vision", "role": "viewer", "tenant": "vision"},
]


class Clock:
    """A clock that tests move."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def issuer() -> Iterator[SigningIssuer]:
    """Yields an issuer that signs any claims."""
    made = SigningIssuer(free_port())
    with served(made):
        yield made


def _tokens(issuer: SigningIssuer, clock: Callable[[], float] = time.monotonic, **settings: Any) -> Tokens:
    given = OidcSettings.model_validate({"issuer": issuer.url, "audience": AUDIENCE, "rules": RULES, **settings})
    return Tokens(given, Issuer(given, clock))


def _caller(tokens: Tokens, token: str) -> Caller:
    """Returns the caller; waits while the issuer's keys are read, as clients do after 503."""
    while True:
        try:
            return tokens.caller(token)
        except HttpProblem as problem:
            if "are being read" not in str(problem):
                raise
            time.sleep(0.02)


@pytest.mark.rotating
async def test_tokens_of_an_issuer_log_in(database_url: str, tmp_path: Path) -> None:
    """Rules map claims to role and tenant; keys work beside tokens; tokens also open Temporal's UI."""
    provider = PackagedIssuer(free_port())
    provider.start()
    oidc = {"issuer": provider.url, "audience": AUDIENCE, "rules": RULES, "client_id": AUDIENCE}
    try:
        with make_world(database_url, tmp_path, api={"oidc": oidc}) as world:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(world.app), base_url="http://api") as client:

                async def ask(token: str, path: str = "/v1/whoami") -> httpx.Response:
                    while True:
                        answer = await client.get(path, headers={"authorization": f"Bearer {token}"})
                        if answer.status_code != 503:
                            return answer
                        assert answer.headers["retry-after"] == "1"

                operator = provider.token("root", groups=["x", "operators"], email="root@example.org")
                me = (await ask(operator)).json()
                assert (me["id"], me["role"], me["tenant"], me["label"]) == (
                    "oidc:root", "operator", None, "root@example.org",
                )  # fmt: skip
                submitter = provider.token("eve", groups="train", team="speech")
                assert (await ask(submitter)).json()["tenant"] == "speech"
                assert (await ask(submitter, "/v1/keys")).status_code == 403
                assert (await ask(provider.token("bob", team="vision"))).json()["role"] == "viewer"
                for refused in (provider.token("eve", groups=["train"], team="no name"), provider.token("zoe")):
                    assert (await ask(refused)).status_code == 401
                assert (await ask(provider.token("root", "other", groups=["operators"]))).status_code == 401
                assert (await ask(world.raw_keys["operator"])).json()["id"] != "oidc:root"
                assert (await client.get("/temporal/", auth=("", submitter))).status_code == 403
                assert (await client.get("/temporal/", auth=("", operator))).status_code == 404, "no UI here"
                found = await client.get("/.well-known/mizzen-login")
                assert found.json()["client_id"] == AUDIENCE
                failed = (await ask(operator, "/v1/audit")).json()["items"]
                assert failed and operator not in str(failed) and submitter not in str(failed)
                provider.stop()
                assert (await ask(operator)).status_code == 200, "the key is known"
    finally:
        provider.stop()


def test_only_valid_tokens_are_accepted(issuer: SigningIssuer) -> None:
    """Each claim and the signature are checked; the message says what is wrong and repeats no token."""
    tokens, now = _tokens(issuer), int(time.time())
    assert _caller(tokens, issuer.token()).tenant == "vision"
    assert _caller(tokens, issuer.token(aud=["other", AUDIENCE], exp=now - 10)).role is Role.VIEWER
    stranger = RSAKey.generate_key(2048, {"kid": "one"})
    whole = issuer.token()
    claims = whole.split(".")[1]
    # Signed with the issuer's public key as if it were a shared secret.
    signed = _part(b'{"alg":"HS256","kid":"one"}') + "." + claims
    confused = f"{signed}.{_part(hmac.digest(issuer.key.as_pem(private=False), signed.encode(), 'sha256'))}"
    none = _part(b'{"alg":"none"}') + f".{claims}."
    for token, why in (
        (issuer.token(exp=now - 31), "has expired"),
        (issuer.token(exp=None), "claim exp"),
        (issuer.token(exp="tomorrow"), "claim exp"),
        (issuer.token(exp=True), "claim exp"),
        (issuer.token(nbf=now + 60), "claim nbf: is in the future"),
        (issuer.token(iat=now + 3600), "claim iat: is in the future"),
        (issuer.token(aud="other"), "claim aud"),
        (issuer.token(aud=None), "claim aud"),
        (issuer.token(aud=[AUDIENCE + "x"]), "claim aud"),
        (issuer.token(iss=issuer.url + "/"), "claim iss"),
        (issuer.token(iss=None), "claim iss"),
        (issuer.token(sub=None), "claim sub"),
        (issuer.token(sub="a" * 201), "claim sub"),
        (issuer.token(team="speech"), "no rule"),
        (issuer.token(team=None), "no rule"),
        (issuer.token(groups=["train"], team=None), "claim team"),
        (issuer.token(groups=["train"], team=["vision"]), "claim team"),
        (issuer.token(key=stranger), "BadSignature"),
        (confused, "algorithm 'HS256'"),
        (none, "algorithm 'none'"),
        (whole[:-4] + "AAAA", "BadSignature"),
        (".".join([whole.split(".")[0], issuer.token(sub="root").split(".")[1], whole.split(".")[2]]), "BadSignature"),
        ("a.b.c", "is not a signed token"),
        ("nothing", "is not a signed token"),
        ("a" * 20_000, "more than 16384 characters"),
        (issuer.token(header={"kid": "two"}), "the issuer does not have"),
        (issuer.token(header={"jwk": {"kty": "RSA"}}, key=stranger), "BadSignature"),
    ):
        with pytest.raises(LoginFailed, match=why) as refused:
            _caller(tokens, token)
        assert token not in str(refused.value)


def test_new_keys_are_read_but_not_for_every_token(issuer: SigningIssuer) -> None:
    """After a rotation new tokens work within the limit of one read in half a minute; withdrawn keys do not."""
    clock = Clock()
    tokens = _tokens(issuer, clock)
    old = issuer.token()
    _caller(tokens, old)
    assert issuer.reads == 2
    first, issuer.key = issuer.key, RSAKey.generate_key(2048, {"kid": "two", "use": "sig"})
    new = issuer.token(header={"kid": "two"})
    for _ in range(50):
        with pytest.raises(LoginFailed, match="does not have"):
            _caller(tokens, new)
    assert issuer.reads == 2
    clock.now_s += 30
    assert _caller(tokens, new).id == "oidc:alice"
    assert issuer.reads == 4
    with pytest.raises(LoginFailed):
        _caller(tokens, old)
    issuer.answers["/jwks"] = {"keys": [first.as_dict(private=False), {"kty": "new"}, {"kty": "oct", "k": "AAAA"}]}
    clock.now_s += 3601
    _caller(tokens, new)  # Starts the hourly read, and does not wait for it.
    while issuer.reads < 6 or not _refuses(tokens, new):
        time.sleep(0.02)


def _part(body: bytes) -> str:
    return base64.urlsafe_b64encode(body).decode().rstrip("=")


def _problem(tokens: Tokens, token: str) -> str:
    with pytest.raises(HttpProblem) as refused:
        tokens.caller(token)
    assert refused.value.status_code == 503
    return str(refused.value)


def _refuses(tokens: Tokens, token: str) -> bool:
    try:
        tokens.caller(token)
    except LoginFailed:
        return True
    except HttpProblem:
        pass
    return False


def test_an_issuer_that_is_down_or_slow(issuer: SigningIssuer) -> None:
    """Nothing waits for the issuer: known keys stay valid for a day; unknown ones get 503 with the reason."""
    clock = Clock()
    tokens = _tokens(issuer, clock)
    _caller(tokens, issuer.token())
    issuer.open.clear()
    clock.now_s += 3601
    for _ in range(20):
        tokens.caller(issuer.token())
        with pytest.raises(HttpProblem, match="are being read"):
            tokens.caller(issuer.token(header={"kid": "two"}))
    issuer.answers["/.well-known/openid-configuration"] = {"issuer": "http://127.0.0.1:1"}
    issuer.open.set()
    clock.now_s += 90_000
    while "cannot be asked" not in (why := _problem(tokens, issuer.token())):
        time.sleep(0.02)
    assert "names the issuer 'http://127.0.0.1:1'" in why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"issuer": "http://issuer.example.org"}, "must be an https URL"),
        ({"rules": []}, "rules"),
        ({"rules": [{"claim": "a", "value": "b", "role": "machine"}]}, "role"),
        ({"rules": [{"claim": "a", "value": "b", "role": "submitter"}]}, "needs tenant or tenant_claim"),
        ({"rules": [{"claim": "a", "value": "b", "role": "operator", "tenant": "t"}]}, "must be omitted"),
        ({"algorithms": ["HS256"]}, "algorithms"),
        ({"algorithms": ["none"]}, "algorithms"),
    ],
)
def test_unsafe_settings_are_refused(change: dict[str, Any], why: str) -> None:
    """The error names the field and what would be valid."""
    body = {"issuer": "https://issuer.example.org", "audience": AUDIENCE, "rules": RULES}
    load_settings(overrides={"api": {"oidc": body}})
    with pytest.raises(ConfigurationError, match=why):
        load_settings(overrides={"api": {"oidc": body | change}})
