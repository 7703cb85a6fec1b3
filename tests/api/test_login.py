"""`mizzen login` with the device flow of an issuer, and the renewal of its tokens."""

import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.stack.ports import free_port
from mizzen_client import Client, NotConfigured
from mizzen_client.cli.app import run
from mizzen_client.contexts import config_path, load_contexts, save_contexts
from tests.api.issuers import AUDIENCE, SigningIssuer, served
from tests.api.world import ApiWorld, make_world

RULES = [{"claim": "team", "value": "vision", "role": "submitter", "tenant": "vision"}]


@pytest.fixture
def issuer() -> Iterator[SigningIssuer]:
    """Yields an issuer with the device flow."""
    made = SigningIssuer(free_port())
    with served(made):
        yield made


@pytest.fixture
def url(
    issuer: SigningIssuer,
    database_url: str,
    tmp_path: Path,
    serve: Callable[[ApiWorld], str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """Yields the URL of an API that accepts the issuer's tokens; there are no saved contexts."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    for name in ("MIZZEN_API", "MIZZEN_API_KEY", "MIZZEN_API_CA", "MIZZEN_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    oidc: dict[str, Any] = {"issuer": issuer.url, "audience": AUDIENCE, "rules": RULES, "client_id": "mizzen-cli"}
    with make_world(database_url, tmp_path, api={"oidc": oidc}) as world:
        yield serve(world)


def _expire(by_s: float) -> None:
    """Makes the saved token expire `by_s` seconds from now."""
    contexts = load_contexts()
    (name, saved), *_ = contexts.named.items()
    assert saved.login is not None
    login = replace(saved.login, expires_at_s=time.time() + by_s)
    save_contexts(replace(contexts, named={name: replace(saved, login=login)}))


def test_a_login_is_saved_and_renewed(
    url: str, issuer: SigningIssuer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code is shown; tokens are stored for the owner only, and renewed once, shortly before they expire."""
    monkeypatch.setattr("mizzen_client.device._INTERVAL_S", 0.05)
    issuer.outcomes = ["authorization_pending", "slow_down", "authorization_pending"]
    assert run(["login", url, "--device"]) == 0
    shown = capsys.readouterr()
    assert (
        f"{issuer.url}/confirm" in shown.err and "ABCD-EFGH" in shown.err and "submitter of tenant vision" in shown.out
    )
    first, *polls = issuer.forms
    assert first == {"client_id": "mizzen-cli", "scope": "openid profile email offline_access"}
    assert len(polls) == 4 and {poll["device_code"] for poll in polls} == {"d1"}
    assert stat.S_IMODE(config_path().stat().st_mode) == 0o600
    assert run(["queue"]) == 0 and len(issuer.forms) == 5, "the token is fresh"
    capsys.readouterr()
    assert run(["contexts", "list", "-o", "json"]) == 0
    assert issuer.refresh_token not in capsys.readouterr().out
    _expire(30)
    used = issuer.refresh_token
    with Client.from_environment() as client:
        assert client.whoami()["id"] == "oidc:alice" == client.whoami()["id"]
        assert issuer.forms[5:] == [{"grant_type": "refresh_token", "refresh_token": used, "client_id": "mizzen-cli"}]
        _expire(-30)  # Also a client that runs for long renews.
        assert client.whoami()["tenant"] == "vision"
    assert len(issuer.forms) == 7
    login = load_contexts().named["127.0.0.1"].login
    assert login is not None and login.refresh_token == issuer.refresh_token != used


def test_a_login_that_ends_says_so(
    url: str, issuer: SigningIssuer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal, an expired code and a withdrawn login are errors with a remedy; the first two save nothing."""
    for outcome in ("access_denied", "expired_token"):
        issuer.outcomes = [outcome]
        assert run(["login", url, "--device"]) == 2
        assert f"refuses the login: {outcome}" in capsys.readouterr().err
    assert not config_path().exists()
    assert run(["login", url, "--device"]) == 0
    issuer.refresh_token = "withdrawn"
    _expire(-1)
    with Client.from_environment() as client, pytest.raises(NotConfigured, match="run `mizzen login` again"):
        client.whoami()


def test_an_api_without_an_issuer(serve: Callable[[ApiWorld], str], world: ApiWorld, capsys: Any) -> None:
    """The option needs an issuer; without it, keys are used as before."""
    url = serve(world)
    assert run(["login", url, "--device"]) == 2
    assert "has no issuer for logins" in capsys.readouterr().err
