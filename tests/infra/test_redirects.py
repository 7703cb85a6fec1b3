"""Servers that mizzen asks cannot send it, or its credentials, to another address by a redirect."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from botocore.exceptions import BotoCoreError, ClientError
from temporalio.exceptions import ApplicationError

from activities.lifecycle.image_digests import pinned
from agent.credentials.aws import assume
from agent.credentials.scope import BucketScope
from api.oidc import Issuer
from domain.spec import WorkloadSpec
from infra.config.oidc import OidcSettings
from mizzen.objects import MissingObject, open_store
from mizzen_client.client import Client
from mizzen_client.errors import ClientError as ApiError
from mizzen_client.tunnel.dial import CannotConnect, dial
from tests.activities.world import job

_SECRET = "s3cret"
_XML = b"<Error><Code>Moved</Code><Message>elsewhere</Message></Error>"
_STATUSES = (301, 302, 307, 308)


@dataclass
class _Server:
    """An HTTP server that records the headers of requests."""

    url: str = ""
    got: list[str] = field(default_factory=list)


def _serve(server: _Server, status: Callable[[], int], location: Callable[[str], str]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            server.got.append(f"{self.command} {self.path}\n{self.headers}")
            self.send_response(status())
            if where := location(self.path):
                self.send_header("location", where)
                self.send_header("x-amz-bucket-region", "eu-west-1")
            body = b"" if self.command == "HEAD" else _XML
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *_: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{running.server_port}"
    threading.Thread(target=running.serve_forever, args=(0.05,), daemon=True).start()
    return running


@pytest.fixture(params=_STATUSES)
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[_Server, _Server]]:
    """A server that redirects each request to the same path of the other one, which is one inside a network."""
    asked, inner = _Server(), _Server()
    running = [_serve(inner, lambda: 200, lambda _: "")]
    running.append(_serve(asked, lambda: request.param, lambda path: inner.url + path))
    try:
        yield asked, inner
    finally:
        for one in running:
            one.shutdown()
            one.server_close()


def test_a_registry(servers: tuple[_Server, _Server]) -> None:
    """The control plane does not follow, and the login stays where it is."""
    asked, inner = servers
    host = asked.url.removeprefix("http://")
    spec = WorkloadSpec(name="w", tenant="t", jobs=(job(image=f"{host}/lab/a:1", image_pull_secret="hub"),))
    with pytest.raises(ApplicationError, match="answered with status 30"):
        pinned(spec, {}, {"hub": f"robot:{_SECRET}"}, (asked.url,))
    assert asked.got and not inner.got


def test_an_issuer(servers: tuple[_Server, _Server]) -> None:
    """Its keys are not read elsewhere, where somebody else could put their own."""
    asked, inner = servers
    rules = [{"claim": "team", "value": "vision", "role": "viewer"}]
    issuer = Issuer(OidcSettings.model_validate({"issuer": asked.url, "audience": "mizzen", "rules": rules}))
    issuer._refresh(time.monotonic())
    assert issuer._reading is not None
    issuer._reading.join()
    assert "answers 30" in issuer.why
    assert asked.got and not inner.got


def test_s3(servers: tuple[_Server, _Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither objects nor credentials are sent on, and STS is asked at its own address only."""
    asked, inner = servers
    settings = {"ENDPOINT_URL": asked.url, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": _SECRET, "MAX_ATTEMPTS": "1"}
    for name, value in {**settings, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    store = open_store("s3://bucket/prefix")
    calls: list[Callable[[], object]] = [
        lambda: store.get("key"), lambda: store.size("key"), lambda: store.put("key", b"x"),
        lambda: list(store.list("")), lambda: store.delete("key"),
        lambda: assume("arn:aws:iam::1:role/r", BucketScope((), ()), "task", 900.0),
    ]  # fmt: skip
    for call in calls:
        before = len(asked.got)
        with contextlib.suppress(BotoCoreError, ClientError, MissingObject):
            call()
        assert len(asked.got) > before
    assert not inner.got


def test_google(servers: tuple[_Server, _Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Google's library follows redirects, as its service needs; the token is not sent to another host."""
    asked, inner = servers
    token = tmp_path / "token.json"
    token.write_text(json.dumps({"token": _SECRET, "expiry": "2100-01-01T00:00:00Z"}))
    monkeypatch.setenv("MIZZEN_GCS_TOKEN_FILE", str(token))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", asked.url)
    store = open_store("gs://bucket/prefix")
    store.get("key")
    assert _SECRET in asked.got[0]
    assert inner.got and _SECRET not in "".join(inner.got)


async def test_the_api(servers: tuple[_Server, _Server]) -> None:
    """Neither a client's key nor the token of a session is sent to another address."""
    asked, inner = servers
    with Client(asked.url, _SECRET) as client, pytest.raises(ApiError):
        client.whoami()
    assert _SECRET in asked.got[0] and not inner.got
    with pytest.raises(CannotConnect):
        await dial(asked.url, "/v1/sessions/x", _SECRET, tls=None)
    assert len(asked.got) > 1 and not inner.got
