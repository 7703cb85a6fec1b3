"""Log in at an issuer in a browser: with a packaged one, and with one that misbehaves."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from console.application import create_app
from console.cookies import COOKIE
from console.issuer_logins import LOGIN_COOKIE
from infra.stack.ports import free_port
from tests.api.issuers import AUDIENCE, PackagedIssuer, SigningIssuer, served
from tests.api.world import ApiWorld, make_world
from tests.console.conftest import browser_of

RULES = [{"claim": "groups", "value": "train", "role": "submitter", "tenant": "vision"}]


@contextmanager
def world_of(database_url: str, folder: Path, issuer: str, **more: Any) -> Iterator[ApiWorld]:
    oidc = {"issuer": issuer, "audience": AUDIENCE, "rules": RULES, "client_id": AUDIENCE, **more}
    with make_world(database_url, folder, create=create_app, api={"oidc": oidc}) as world:
        yield world


def asked_of(answer: httpx.Response) -> dict[str, str]:
    """Returns the parameters with which a browser is sent to the issuer."""
    assert answer.status_code == 303, answer.text
    return {name: one for name, (one,) in parse_qs(urlsplit(answer.headers["location"]).query).items()}


@pytest.mark.rotating
async def test_a_browser_logs_in_at_the_issuer(database_url: str, tmp_path: Path) -> None:
    """From the page with the button through the issuer to the page that was wanted; the issuer checks the secret."""
    provider = PackagedIssuer(free_port())
    provider.start()
    (tmp_path / "secret").write_text("any\n")
    try:
        with world_of(database_url, tmp_path, provider.url, client_secret_file=str(tmp_path / "secret")) as world:
            async with browser_of(world)(None) as client:
                page = await client.get("/console/login?next=/console/queue")
                assert "Log in with 127.0.0.1" in page.text
                sent = await client.get("/console/login/issuer?next=/console/queue")
                asked = asked_of(sent)
                assert asked["redirect_uri"] == "http://api/console/login/back"
                assert asked["code_challenge_method"] == "S256" and "offline_access" not in asked["scope"]
                assert "HttpOnly" in sent.headers["set-cookie"] and "Path=/console/login" in sent.headers["set-cookie"]
                httpx.put(f"{provider.url}/users/eve", json={"groups": "train"}).raise_for_status()
                back = httpx.post(sent.headers["location"], data={"sub": "eve"}).headers["location"]
                answer = await client.get(back)
                assert (answer.status_code, answer.headers.get("location")) == (303, "/console/queue"), answer.text
                assert LOGIN_COOKIE not in client.cookies and COOKIE in client.cookies
                queue = await client.get("/console/queue")
                assert queue.status_code == 200 and ", submitter" in queue.text
                assert (await client.get(back)).status_code == 403, "its state was used"
                assert (await client.get("/v1/workloads")).status_code == 401
    finally:
        provider.stop()


@pytest.fixture
def issuer() -> Iterator[SigningIssuer]:
    made = SigningIssuer(free_port())
    made.answers["/.well-known/openid-configuration"] = {
        "issuer": made.url, "jwks_uri": f"{made.url}/jwks", "token_endpoint": f"{made.url}/token",
        "authorization_endpoint": f"{made.url}/authorize?kind=x",
    }  # fmt: skip
    with served(made):
        yield made


async def test_logins_that_did_not_begin_here_are_refused(
    database_url: str, tmp_path: Path, issuer: SigningIssuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another browser's state, a changed cookie, another login's token, a refusal, a page elsewhere: no session."""
    claims: dict[str, Any] = {}
    answers: list[tuple[int, Any]] = []

    def granted(path: str, form: dict[str, str]) -> tuple[int, Any]:
        issuer.forms.append(form)
        return answers.pop() if answers else (200, {"id_token": issuer.token(groups=["train"], **claims)})

    monkeypatch.setattr(issuer, "granted", granted)
    with world_of(database_url, tmp_path, issuer.url) as world:
        async with browser_of(world)(None) as client, browser_of(world)(None) as other:
            asked = asked_of(await client.get("/console/login/issuer?next=//evil.example"))
            assert asked["kind"] == "x"
            back = {"state": asked["state"], "code": "c1"}
            for browser, given in ((other, back), (client, {**back, "state": "x"}), (client, {"code": "c1"})):
                answer = await browser.get("/console/login/back", params=given)
                assert answer.status_code == 403 and "has not begun this login" in answer.text
            kept = client.cookies[LOGIN_COOKIE]
            content = json.loads(base64.urlsafe_b64decode(kept.partition(".")[0]))
            forged = base64.urlsafe_b64encode(json.dumps({**content, "state": "x"}).encode()).decode()
            other.cookies.set(LOGIN_COOKIE, f"{forged}.{kept.partition('.')[2]}")
            assert (await other.get("/console/login/back", params={**back, "state": "x"})).status_code == 403
            assert issuer.forms == []

            async def again(**given: str) -> httpx.Response:
                asked = asked_of(await client.get("/console/login/issuer?next=//evil.example"))
                claims.setdefault("nonce", asked["nonce"])
                answer = await client.get("/console/login/back", params={"state": asked["state"], **given})
                claims.clear()
                return answer

            refused = await again(error="access_denied<script>")
            assert refused.status_code == 403 and "access_denied&lt;script&gt;" in refused.text
            claims["nonce"] = "of another login"
            assert "belongs to another login" in (await again(code="c2")).text
            for status, body in (
                (400, {"error": "invalid_grant"}), (200, ["x"]), (200, {"id_token": "x"}),
                (200, {"id_token": issuer.token(groups=["none"])}),
            ):  # fmt: skip
                answers.append((status, body))
                answer = await again(code="c3")
                assert answer.status_code in (401, 403), body
                assert answer.headers.get("set-cookie", "").startswith(f"{LOGIN_COOKIE}=")
            assert COOKIE not in client.cookies
            answer = await again(code="c4")
            assert (answer.status_code, answer.headers["location"]) == (303, "/console"), "never to another site"
            form = issuer.forms[-1]
            assert (form["grant_type"], form["client_id"], form["code"]) == ("authorization_code", AUDIENCE, "c4")
            assert len(form["code_verifier"]) >= 43


async def test_an_issuer_that_does_not_answer(database_url: str, tmp_path: Path) -> None:
    """The page says so, and keys work."""
    with world_of(database_url, tmp_path, f"http://127.0.0.1:{free_port()}") as world:
        async with browser_of(world)(None) as client:
            answer = await client.get("/console/login/issuer")
            assert answer.status_code == 503 and "login with tokens" in answer.text and "Log in with" in answer.text
        async with browser_of(world)("vision") as client:
            assert (await client.get("/console")).status_code == 200


async def test_without_a_client_there_is_no_button(world: ApiWorld) -> None:
    async with browser_of(world)(None) as client:
        assert "Log in with" not in (await client.get("/console/login")).text
        assert (await client.get("/console/login/issuer")).status_code == 404
        assert (await client.get("/console/login/back?code=x&state=y")).status_code == 404
